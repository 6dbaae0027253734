"""The state of the deployment in one sentence, and what else an operator has to know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from typing import Literal, NamedTuple

from delaytasks.console.failures import FailedNow
from delaytasks.console.snapshot import Snapshot
from delaytasks.core.clock import UTC
from delaytasks.core.durations import show_duration
from delaytasks.core.policies import Policy

Severity = Literal["good", "warn", "bad"]
#: Failures that are older are no news.
RECENT = timedelta(hours=1)
#: Problems that are named.
MOST_PROBLEMS = 6
#: A larger offset of a worker's clock is mentioned. The database's clock decides in any case.
CLOCK_S = 5.0


class Problem(NamedTuple):
    """One sentence, and the page that shows more."""

    level: Severity
    text: str
    #: The endpoint of the page, and its parameters.
    page: str
    parameters: dict[str, str]


@dataclass(frozen=True)
class Verdict:
    """`headline` answers whether tasks run on time; `problems` begin with the worst."""

    level: Severity
    headline: str
    problems: list[Problem]


def verdict_of(snapshot: Snapshot, zone: tzinfo = UTC) -> Verdict:
    """Judge a snapshot. Times of day are in `zone`."""
    if snapshot.is_down:
        error = snapshot.databases[0].error or ""
        problem = Problem("bad", f"The database does not answer: {error}", "overview", {})
        return Verdict("bad", "Unknown. The database does not answer.", [problem])
    problems = [
        *_stopped(snapshot),
        *_late(snapshot),
        *_failing(snapshot, zone),
        *_degraded(snapshot),
    ]
    order = {"bad": 0, "warn": 1, "good": 2}
    problems.sort(key=lambda problem: order[problem.level])
    worst = problems[0].level if problems else "good"
    return Verdict(worst, _headline(snapshot), problems[:MOST_PROBLEMS])


def _headline(snapshot: Snapshot) -> str:
    waiting = snapshot.gauges.pending
    if not snapshot.alive:
        if waiting or snapshot.overdue:
            return "Stopped. No worker is alive."
        return "Idle. No worker is alive, and no task waits."
    if snapshot.overdue and snapshot.oldest is not None:
        late = show_duration((snapshot.now - snapshot.oldest).total_seconds())
        return f"Late. {tasks(snapshot.overdue)} overdue, the oldest by {late}."
    flaw = _flaw(snapshot)
    return f"On time, but {flaw}." if flaw else "On time."


def _flaw(snapshot: Snapshot) -> str | None:
    """Return the worst problem that makes no task late, in a few words."""
    if failed := sum(group.tasks for group in _recent(snapshot)):
        return f"{_number(failed)} failed"
    if snapshot.broker_error:
        return "the broker does not answer"
    if silent := sum(not worker.is_alive for worker in snapshot.workers):
        return "1 worker is silent" if silent == 1 else f"{silent:,} workers are silent"
    if limited := sum(policy.held or 0 for policy in _limited(snapshot)):
        return f"{_number(limited)} {'waits' if limited == 1 else 'wait'} for a limit"
    return None


def _recent(snapshot: Snapshot) -> list[FailedNow]:
    """Return the groups of failures that are news."""
    return [
        group
        for group in snapshot.groups
        if group.last_at is not None and snapshot.now - group.last_at <= RECENT
    ]


def _clock_time(at: datetime, now: datetime, zone: tzinfo) -> str:
    local = at.astimezone(zone)
    is_today = local.date() == now.astimezone(zone).date()
    return f"{local:%H:%M %Z}" if is_today else f"{local:%b %d, %H:%M %Z}"


def _stopped(snapshot: Snapshot) -> Iterator[Problem]:
    for database in snapshot.databases:
        if database.error:
            text = f"Database {database.number} does not answer: {database.error}"
            yield Problem("bad", text, "overview", {})
    live = int(snapshot.gauges.pending + snapshot.gauges.running)
    if not snapshot.alive and live:
        text = f"No worker is alive, and {tasks(live)} waiting. Start a worker."
        yield Problem("bad", text, "workers", {})


def _late(snapshot: Snapshot) -> Iterator[Problem]:
    for late in snapshot.late:
        if not snapshot.alive and late.reason.code == "no_worker":
            continue  # the sentence about all workers says so
        age = show_duration(late.late_s)
        level: Severity = "warn" if late.reason.code in ("paused", "limit") else "bad"
        verb = "is" if late.tasks == 1 else "are"
        text = f"{_number(late.tasks)} of {late.tag} {verb} overdue by up to {age}. "
        text += late.reason.sentence
        yield Problem(level, text, "tasks", {"tag": late.tag, "status": "NOT_COMPLETE"})


def _failing(snapshot: Snapshot, zone: tzinfo) -> Iterator[Problem]:
    for group in _recent(snapshot):
        verb = "has failed at" if group.tasks == 1 else "have failed since"
        since = "" if group.first_at is None else _clock_time(group.first_at, snapshot.now, zone)
        text = f"{_number(group.tasks)} of {group.tag} {verb} {since}: {group.summary}"
        yield Problem("bad", text, "failure", {"name": group.name})


def _degraded(snapshot: Snapshot) -> Iterator[Problem]:
    if snapshot.broker_error:
        text = (
            "The broker does not answer; workers read the table, so tasks start a few seconds "
            f"late: {snapshot.broker_error}"
        )
        yield Problem("warn", text, "overview", {})
    if snapshot.alive and any(sweep.is_late for sweep in snapshot.sweeps):
        yield Problem("warn", "No sweep has run lately. Do beat and a worker run?", "overview", {})
    for worker in snapshot.workers:
        if not worker.is_alive:
            text = f"The worker {worker.name} is silent. Its running tasks restart after its lease."
            yield Problem("warn", text, "workers", {})
        elif abs(worker.clock_offset_s) > CLOCK_S:
            offset = show_duration(worker.clock_offset_s)
            text = f"The clock of {worker.name} is off by {offset}. Tasks are still on time."
            yield Problem("warn", text, "workers", {})
    yield from _held_back(snapshot)
    for policy in snapshot.paused:
        held = f", {policy.held:,} held" if policy.held else ""
        by = f" by {policy.updated_by}" if policy.updated_by else ""
        text = f"The {policy.kind} {policy.name} is paused{by}{held}."
        yield Problem("warn", text, "policies", {})


def _limited(snapshot: Snapshot) -> list[Policy]:
    """Return the policies whose limit holds tasks back."""
    found = snapshot.policies
    return [each for each in found if each.has_limits and each.held and not each.is_paused]


def _held_back(snapshot: Snapshot) -> Iterator[Problem]:
    for policy in _limited(snapshot):
        limits = {
            "concurrency": policy.concurrency,
            "of each key": policy.key_concurrency,
            "rate": policy.rate_text,
        }
        shown = ", ".join(f"{name} {limit}" for name, limit in limits.items() if limit is not None)
        verb = "waits" if policy.held == 1 else "wait"
        text = f"{_number(policy.held or 0)} of {policy.name} {verb} for its limit ({shown})."
        yield Problem("warn", text, "policies", {})


def tasks(count: int) -> str:
    """Return, for example, "1 task is" or "1,200 tasks are"."""
    return f"{_number(count)} {'is' if count == 1 else 'are'}"


def _number(count: int) -> str:
    return "1 task" if count == 1 else f"{count:,} tasks"
