"""Judges the failures of a deployment, for the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, tzinfo

from delaytasks.core.states import Status
from delaytasks.core.text import count, first_names
from delaytasks.operations.failed_now import FailedNow, RecentRuns
from delaytasks.operations.problems import Problem, Severity, clock_time, runs_have, tasks_are
from delaytasks.operations.state import DeploymentState

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
        is_estimate = state.tables is not None and state.tables.counts[Status.FAILED].is_estimate
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
        tags = first_names(sorted(waiting), NAMED_TAGS)
        more = ", …" if len(waiting) > NAMED_TAGS else ""
        text = f"Failed runs of {tags}{more} wait for a retry, but none is of the last hour."
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
