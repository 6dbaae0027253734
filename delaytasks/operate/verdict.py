"""Judges a snapshot of the state, in words.

The console, `delaytasks status` and `status --watch` show this verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from typing import Any, Literal, NamedTuple

from delaytasks.model.clock import UTC
from delaytasks.model.inputs import show_duration
from delaytasks.model.moves import Status
from delaytasks.model.policies import Policy
from delaytasks.model.text import count, some_values
from delaytasks.operate.state import DeploymentState, FailedNow, RecentRuns
from delaytasks.operate.state_queries import NO_STANDBY, READ_ONLY
from delaytasks.operate.statistics import LATE_RANGE
from delaytasks.operate.why import LATE_BECAUSE

# -- The sentences of a verdict, and the words that they share ------------------------------------


Severity = Literal["good", "note", "warning", "bad"]
SEVERITIES: Sequence[Severity] = ("good", "note", "warning", "bad")


class Problem(NamedTuple):
    """One sentence, and the page of the console that shows more."""

    level: Severity
    text: str
    #: The overview has more below the sentences.
    page: str = "overview"
    #: The parameters of the page.
    parameters: Mapping[str, str] = {}


def clock_time(at: datetime, now: datetime, zone: tzinfo) -> str:
    """Return a time of day, with the date unless it is today."""
    local = at.astimezone(zone)
    is_today = local.date() == now.astimezone(zone).date()
    return f"{local:%H:%M %Z}" if is_today else f"{local:%b %d, %H:%M %Z}"


def since_text(seconds: float, now: datetime, zone: tzinfo) -> str:
    """Return when something began, for example "since 14:02 UTC (3m)"."""
    at = clock_time(now - timedelta(seconds=seconds), now, zone)
    return f"since {at} ({show_duration(seconds)})"


def tasks_are(number: int) -> str:
    """Return, for example, "1 task is" or "1,200 tasks are"."""
    return "1 task is" if number == 1 else f"{number:,} tasks are"


def runs_have(number: int, tag: str | None = None) -> str:
    """Return, for example, "1 run of mail.send has" or "12 runs have"."""
    of = "" if tag is None else f" of {tag}"
    return f"1 run{of} has" if number == 1 else f"{number:,} runs{of} have"


# -- Judges the failures of a deployment, for the verdict -----------------------------------------


#: Failures that are older are no news.
RECENT = timedelta(hours=1)
#: Failed runs that are retried are a warning if they are more, and a note otherwise. The alert
#: `DelayTasksFailing` has the same limits for tasks.
FEW_RUNS, SMALL_SHARE = 5, 0.05
#: Tags that are named in one sentence.
NAMED_TAGS = 3


def failure_flaw(state: DeploymentState) -> str | None:
    """Return the end of the headline, for example "14 tasks failed"; None without failures."""
    if _recent(state):
        is_estimate = state.counts[Status.FAILED].is_estimate
        return f"{'about ' if is_estimate else ''}{count(state.failed, 'task')} failed"
    if retried := sum(runs.runs for _, runs in _retried(state) if _is_much(runs)):
        return f"{runs_have(retried)} failed and will be retried"
    return None


def failure_problems(state: DeploymentState, zone: tzinfo) -> Iterator[Problem]:
    recent = _recent(state)
    for group in recent:
        text = f"{_failures(group, state.now, zone)}: {group.summary}"
        yield Problem("bad", text, "failure", {"name": group.name})
    for group, runs in _retried(state):
        failures = _failed_runs(group, runs, state.now, zone)
        level: Severity = "warning" if _is_much(runs) else "note"
        text = f"{failures}, and will be retried: {group.summary}"
        yield Problem(level, text, "failure", {"name": group.name})
    if state.failed and not recent:
        text = f"{tasks_are(state.failed)} failed, but none in the last hour."
        yield Problem("note", text, "failures")
    elif others := _others(state, recent):
        text = f"{count(others, 'other task')} failed more than an hour ago."
        yield Problem("note", text, "failures")
    if waiting := {group.tag for group in state.groups if group.is_retried and not group.recent}:
        tags = some_values(sorted(waiting), NAMED_TAGS)
        text = f"Failed runs of {tags} wait for a retry, but none is of the last hour."
        yield Problem("note", text, "failures")


def _recent(state: DeploymentState) -> list[FailedNow]:
    """Return the groups whose FAILED tasks are news."""
    return [group for group in state.groups if _is_recent(group, state.now)]


def _others(state: DeploymentState, recent: Sequence[FailedNow]) -> int:
    """Return the number of FAILED tasks in other groups than these, or 0 if it is not known."""
    return state.failed - sum(group.tasks for group in recent) if state.has_all_failures else 0


def _is_recent(group: FailedNow, now: datetime) -> bool:
    if not group.tasks:  # none of its tasks was read but the last one
        return group.recent is not None and not group.is_retried
    at = group.sample.failed_at
    return at is not None and now - at <= RECENT


def _retried(state: DeploymentState) -> list[tuple[FailedNow, RecentRuns]]:
    """Return the groups whose failed runs are retried, and are news."""
    return [
        (group, group.recent)
        for group in state.groups
        if group.is_retried and group.recent is not None and not _is_recent(group, state.now)
    ]


def _is_much(runs: RecentRuns) -> bool:
    return runs.runs > FEW_RUNS and runs.share > SMALL_SHARE


def _failures(group: FailedNow, now: datetime, zone: tzinfo) -> str:
    """Return how many tasks have failed, and since when; or how many runs, if no task was read."""
    if not group.tasks and group.recent is not None:
        return _failed_runs(group, group.recent, now, zone)
    least = "At least " if group.has_more else ""
    verb = "has failed at" if group.tasks == 1 else "have failed since"
    since = "" if group.since is None else clock_time(group.since, now, zone)
    return f"{least}{count(group.tasks, 'task')} of {group.tag} {verb} {since}"


def _failed_runs(group: FailedNow, runs: RecentRuns, now: datetime, zone: tzinfo) -> str:
    return f"{runs_have(runs.runs, group.tag)} failed since {clock_time(runs.since, now, zone)}"


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
    if state.database.problem == READ_ONLY:
        text = f"The database answers, but {READ_ONLY}."
        return Verdict("bad", "Stopped. The database is read-only.", [Problem("bad", text)])
    tasks = [*_stopped(state), *_late(state), *failure_problems(state, zone), *ahead]
    others = [*_services(state, zone), *_workers(state, zone), *_held_back(state, zone)]
    problems = worst_first(
        [*tasks, *others, *_paused(state, zone), *_lost(state, zone), *_late_starts(state)]
    )
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


def _late_starts(state: DeploymentState) -> Iterator[Problem]:
    """Return a note, since these tasks have run."""
    if state.late_starts:
        most = sorted(state.late_starts.items(), key=lambda each: -each[1])
        reasons = "; ".join(f"{number:,} because {LATE_BECAUSE[why]}" for why, number in most)
        number, minutes = sum(state.late_starts.values()), LATE_RANGE.total_seconds() / 60
        text = f"{count(number, 'run')} of the last {minutes:g} minutes began late: {reasons}."
        yield Problem("note", text, "tags")


def _services(state: DeploymentState, zone: tzinfo) -> Iterator[Problem]:
    broker_error, down_s = state.services.broker_error, state.broker_down_s
    if state.database.problem == NO_STANDBY:
        text = f"The database may lose or delay commits: {NO_STANDBY}."
        yield Problem("warning", text)
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


_RESTART = "run again elsewhere, at the latest when their leases end."


def _workers(state: DeploymentState, zone: tzinfo) -> Iterator[Problem]:
    for worker in state.workers:
        services, name = worker.services, worker.name
        if not worker.is_alive:
            text = f"The worker {name} is silent. If it is lost, its tasks {_RESTART}"
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
        text = (
            f"{count(number, 'worker')} were lost, the last one at {at}: "
            f"{some_values(names, NAMED_WORKERS)}. They were killed, or their hosts are "
            "down. Their tasks "
        )
    yield Problem("note", f"{text}{_RESTART}", "workers")


def _limited(state: DeploymentState) -> list[Policy]:
    """Return the policies whose limit holds tasks back."""
    return [each for each in state.policies if each.has_limits and each.held and not each.is_paused]


def _held_back(state: DeploymentState, zone: tzinfo) -> Iterator[Problem]:
    for policy in _limited(state):
        limits = {
            "concurrency": policy.concurrency,
            "of each key": policy.concurrency_per_key,
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


def _paused(state: DeploymentState, zone: tzinfo) -> Iterator[Problem]:
    for policy in state.paused:
        held = f", {policy.held:,} held" if policy.held else ""
        by = f" by {policy.updated_by}" if policy.updated_by else ""
        end = policy.paused_until
        until = "" if end is None else f" until {clock_time(end, state.now, zone)}"
        text = f"The {policy.kind} {policy.name} is paused{by}{until}{held}."
        yield Problem("warning", text, "policies")
