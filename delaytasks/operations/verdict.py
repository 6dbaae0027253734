"""Judges the state of a deployment: a headline, and the problems that an operator has to know.

The console, `delaytasks stats` and `top` show this verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo
from typing import Any

from delaytasks.core.clock import UTC
from delaytasks.core.inputs import show_duration
from delaytasks.core.policies import Policy
from delaytasks.core.text import count, first_names
from delaytasks.operations.failing import failure_flaw, failure_problems
from delaytasks.operations.problems import (
    SEVERITIES,
    Problem,
    Severity,
    clock_time,
    since_text,
    tasks_are,
)
from delaytasks.operations.state import DeploymentState

#: Problems that are named.
MOST_PROBLEMS = 6
#: Lost workers that are named.
NAMED_WORKERS = 3
#: A larger offset of a worker's clock is mentioned. The database's clock decides in any case.
CLOCK_S = 5.0
#: An outage of a worker's broker or timer, or a silence of beat, that is longer is mentioned.
LEAST_OUTAGE_S = 15.0


@dataclass(frozen=True)
class Verdict:
    """`headline` answers whether tasks run on time; `problems` begin with the worst."""

    level: Severity
    headline: str
    problems: Sequence[Problem]

    def as_json(self) -> dict[str, Any]:
        problems = [{"level": each.level, "text": each.text} for each in self.problems]
        return {"level": self.level, "headline": self.headline, "problems": problems}


def verdict_of(
    state: DeploymentState, zone: tzinfo = UTC, ahead: Sequence[Problem] = ()
) -> Verdict:
    """Judge a state. Times of day are in `zone`.

    `ahead` has problems that will make tasks late.
    """
    if state.is_down:
        text = f"The database does not answer: {state.database.error}"
        headline = "Unknown. The database does not answer."
        return Verdict("bad", headline, [Problem("bad", text)])
    tasks = [*_stopped(state), *_late(state), *failure_problems(state, zone), *ahead]
    others = [*_services(state, zone), *_workers(state, zone), *_held_back(state, zone)]
    problems = worst_first([*tasks, *others, *_paused(state), *_lost(state, zone)])
    headline = _headline(state, bool(ahead))
    return Verdict(worst_of(problems), headline, problems[:MOST_PROBLEMS])


def worst_first(problems: Sequence[Problem]) -> list[Problem]:
    return sorted(problems, key=lambda problem: -SEVERITIES.index(problem.level))


def worst_of(problems: Sequence[Problem]) -> Severity:
    return max((each.level for each in problems), key=SEVERITIES.index, default="good")


def _headline(state: DeploymentState, is_peak_ahead: bool) -> str:
    if not state.alive:
        if state.waiting or state.overdue:
            return "Stopped. No worker is alive."
        return "Idle. No worker is alive, and no task waits."
    if state.overdue and state.oldest is not None:
        late = show_duration((state.now - state.oldest).total_seconds())
        return f"Late. {tasks_are(state.overdue)} overdue, the oldest by {late}."
    flaw = _flaw(state) or ("a peak ahead will start late" if is_peak_ahead else None)
    return f"On time, but {flaw}." if flaw else "On time."


def _flaw(state: DeploymentState) -> str | None:
    """Return the worst problem that makes no task late, in a few words."""
    if flaw := failure_flaw(state):
        return flaw
    if state.services.broker_error:
        return "the broker does not answer"
    if silent := sum(not worker.is_alive for worker in state.workers):
        return "1 worker is silent" if silent == 1 else f"{silent:,} workers are silent"
    if limited := sum(policy.held or 0 for policy in _limited(state)):
        return f"{count(limited, 'task')} {'waits' if limited == 1 else 'wait'} for a limit"
    return None


def _stopped(state: DeploymentState) -> Iterator[Problem]:
    if state.alive:
        return
    if state.waiting or state.running:
        waiting = f"{tasks_are(state.waiting)} waiting" if state.waiting else ""
        running = f"{tasks_are(state.running)} running" if state.running else ""
        tasks = " and ".join(filter(None, (waiting, running)))
        yield Problem("bad", f"No worker is alive, and {tasks}. Start a worker.", "workers")


def _late(state: DeploymentState) -> Iterator[Problem]:
    for late in state.late:
        if not state.alive and late.reason.code == "no_worker":
            continue  # the problem of all workers explains it
        age, verb = show_duration(late.late_s), "is" if late.tasks == 1 else "are"
        text = f"{count(late.tasks, 'task')} of {late.tag} {verb} overdue by up to {age}. "
        level: Severity = "warning" if late.reason.code in ("paused", "limit") else "bad"
        where = {"tag": late.tag, "status": "NOT_COMPLETE"}
        yield Problem(level, text + late.reason.text, "tasks", where)


def _services(state: DeploymentState, zone: tzinfo) -> Iterator[Problem]:
    broker_error, down_s = state.services.broker_error, state.broker_down_s
    if broker_error:
        fact = "does not answer"
        if down_s is not None:
            fact = f"has not answered {since_text(down_s, state.now, zone)}"
        text = (
            f"The broker {fact}; workers read the table, so tasks start a few seconds late: "
            f"{broker_error}"
        )
        yield Problem("warning", text, "workers")
    if state.alive and any(sweep.is_late for sweep in state.sweeps):
        yield Problem("warning", "No sweep has run lately. Do beat and a worker run?")
        return
    age_s = state.beat_age_s
    if age_s is not None and age_s > LEAST_OUTAGE_S and not broker_error:
        text = (
            f"No message of beat has arrived {since_text(age_s, state.now, zone)}. The workers "
            "sweep by themselves, less often. Is celery beat running?"
        )
        yield Problem("warning", text)


def _workers(state: DeploymentState, zone: tzinfo) -> Iterator[Problem]:
    for worker in state.workers:
        services, name = worker.services, worker.name
        if not worker.is_alive:
            text = f"The worker {name} is silent. Its running tasks restart after its lease."
            yield Problem("warning", text, "workers")
            continue
        if abs(worker.clock_offset_s) > CLOCK_S:
            offset = show_duration(worker.clock_offset_s)
            text = f"The clock of {name} is off by {offset}. Tasks are still on time."
            yield Problem("warning", text, "workers")
        for service, down_s in (
            ("its broker", services.broker_down_s),
            ("the server of its timer", services.timer_down_s),
        ):
            # If the broker is down for everyone, that is one problem.
            if down_s is not None and down_s > LEAST_OUTAGE_S and not state.services.broker_error:
                since = since_text(down_s, state.now, zone)
                text = (
                    f"The worker {name} has not reached {service} {since}. It finds due tasks in "
                    "the table, so they start some seconds late."
                )
                yield Problem("warning", text, "workers")


def _lost(state: DeploymentState, zone: tzinfo) -> Iterator[Problem]:
    """Return a note: the others do the work of a lost worker, and if that is too much, other
    problems say so."""
    if not state.lost:
        return
    number, names = len(state.lost), [worker.name for worker in state.lost]
    at = clock_time(state.lost[0].lost_at, state.now, zone)
    if number == 1:
        text = f"Worker {names[0]} was lost at {at}: it was killed, or its host is down. Its tasks "
    else:
        more = ", …" if number > NAMED_WORKERS else ""
        text = (
            f"{count(number, 'worker')} were lost, the last one at {at}: "
            f"{first_names(names, NAMED_WORKERS)}{more}. They were killed, or their hosts are "
            "down. Their tasks "
        )
    yield Problem("note", f"{text}run again elsewhere when their leases end.", "workers")


def _limited(state: DeploymentState) -> list[Policy]:
    """Return the policies whose limit holds tasks back."""
    return [each for each in state.policies if each.has_limits and each.held and not each.is_paused]


def _held_back(state: DeploymentState, zone: tzinfo) -> Iterator[Problem]:
    for policy in _limited(state):
        limits = {
            "concurrency": policy.concurrency,
            "of each key": policy.key_concurrency,
            "rate": policy.rate_text,
        }
        shown = ", ".join(f"{name} {limit}" for name, limit in limits.items() if limit is not None)
        verb = "waits" if policy.held == 1 else "wait"
        text = f"{count(policy.held or 0, 'task')} of {policy.name} {verb} for its limit ({shown})"
        yield Problem("warning", f"{text}{_oldest(policy, state.now, zone)}.", "policies")


def _oldest(policy: Policy, now: datetime, zone: tzinfo) -> str:
    """Return since when the oldest task waits for a limit: since it was due."""
    if policy.held_since is None or policy.held_since >= now:
        return ""
    since = since_text((now - policy.held_since).total_seconds(), now, zone)
    return f" {since}" if policy.held == 1 else f", the oldest {since}"


def _paused(state: DeploymentState) -> Iterator[Problem]:
    for policy in state.paused:
        held = f", {policy.held:,} held" if policy.held else ""
        by = f" by {policy.updated_by}" if policy.updated_by else ""
        text = f"The {policy.kind} {policy.name} is paused{by}{held}."
        yield Problem("warning", text, "policies")
