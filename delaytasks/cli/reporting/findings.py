"""Derives the findings and the verdict of a report from its data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from delaytasks.cli.output import count
from delaytasks.cli.reporting.data import DueStep, ReportData
from delaytasks.core.durations import show_duration, show_measured
from delaytasks.core.histograms import LATENESS_BOUNDS_S, bucket_of
from delaytasks.operations.live import LiveSnapshot
from delaytasks.operations.overdue import ExplainedGroup
from delaytasks.statistics.results import OnTime, RunTotals, SeriesPoint

#: The share of failures, the lateness and the number of runs from which the report has a finding.
FAILING_SHARE, FAILED_SHARE, LEAST_RUNS = 0.01, 0.1, 20
LATE_S, VERY_LATE_S = 1.0, 60.0

FindingLevel = Literal["good", "note", "warning", "bad"]
FINDING_LEVELS: Sequence[FindingLevel] = ("good", "note", "warning", "bad")


class ReportFinding(NamedTuple):
    """A sentence about the state of the deployment."""

    level: FindingLevel
    sentence: str


def findings_of(data: ReportData) -> Sequence[ReportFinding]:
    """Return the findings, the most important first."""
    found = [
        *_state(data.now),
        *_late(data.late),
        *_failing(data.totals),
        *_lateness(data.series, data.totals),
        *_promises(data.on_time),
        *_coming(data.due, data.needed_workers),
    ]
    return sorted(found, key=lambda finding: -FINDING_LEVELS.index(finding.level))


def verdict_of(findings: Sequence[ReportFinding]) -> FindingLevel:
    return max((each.level for each in findings), key=FINDING_LEVELS.index, default="good")


def _state(now: LiveSnapshot) -> Iterator[ReportFinding]:
    for shard, error in now.down.items():
        yield ReportFinding("bad", f"The database of shard {shard} does not answer: {error}.")
    alive = [worker for worker in now.workers if worker.is_alive]
    if not alive:
        yield ReportFinding("bad", "No worker is alive, so no task runs.")
    dead = [worker.name for worker in now.workers if not worker.is_alive]
    if dead and alive:
        yield ReportFinding(
            "warning", f"Workers have not reported for some time: {', '.join(dead)}."
        )
    if now.is_sweep_late:
        ago = "never ran" if now.swept_s is None else f"ran {show_duration(now.swept_s)} ago"
        sentence = f"The last sweep {ago}: tasks whose messages were lost run late or not at all."
        yield ReportFinding("bad", sentence)
    for kind, groups in (("queue", now.queues), ("tag", now.tags)):
        for group in groups:
            if group.is_paused:
                sentence = f"The {kind} {group.name} is paused; {group.held:,} tasks are held."
                yield ReportFinding("note", sentence)


def _late(late: Sequence[ExplainedGroup]) -> Iterator[ReportFinding]:
    for group in late:
        oldest = f"the oldest by {show_duration(group.late_s)}"
        yield ReportFinding(
            "warning" if group.is_expected else "bad",
            f"Overdue: {count(group.tasks, 'task')} of the tag {group.tag} in the queue "
            f"{group.queue}, {oldest}. {group.reason.text}",
        )


def _failing(totals: dict[str, RunTotals]) -> Iterator[ReportFinding]:
    for tag, counts in totals.items():
        ended = counts.done + counts.failed
        share = counts.failed / ended if ended else 0.0
        if ended >= LEAST_RUNS and share >= FAILING_SHARE:
            level: FindingLevel = "bad" if share >= FAILED_SHARE else "warning"
            yield ReportFinding(
                level, f"{share:.1%} of the tasks of the tag {tag} failed ({counts.failed:,})."
            )
        if counts.worker_lost:
            yield ReportFinding(
                "bad",
                f"{count(counts.worker_lost, 'task')} of the tag {tag} failed because workers died "
                "again and again.",
            )


def _lateness(
    series: Sequence[SeriesPoint], totals: dict[str, RunTotals]
) -> Iterator[ReportFinding]:
    if not totals:
        yield ReportFinding(
            "note",
            "No task has ended in this time, or the workers have not written their counts yet.",
        )
    worst = max(series, key=lambda point: point.total.lateness_quantile(0.99) or 0.0, default=None)
    worst_s = 0.0 if worst is None else worst.total.lateness_quantile(0.99) or 0.0
    if worst is not None and worst_s > LATE_S:
        level: FindingLevel = "bad" if worst_s > VERY_LATE_S else "warning"
        at = f"{worst.start:%Y-%m-%d %H:%M} UTC"
        yield ReportFinding(
            level,
            f"From {at} on, one run in 100 started {show_measured(worst_s)} late or later; most "
            f"late runs were of the tag {_latest_tag(worst)}.",
        )


def _latest_tag(point: SeriesPoint) -> str:
    """Return the tag with the most runs that were late."""
    late = bucket_of(LATE_S, LATENESS_BOUNDS_S) + 1
    return max(point.tags, key=lambda tag: sum(point.tags[tag].lateness[late:]))


def _promises(on_time: Sequence[OnTime]) -> Iterator[ReportFinding]:
    for each in on_time:
        if each.budget_left < 0:
            yield ReportFinding(
                "warning",
                f"{each.share:.2%} of the runs of the tag {each.tag} began in time, fewer than "
                f"the target of {each.target:.0%}.",
            )


def _coming(due: Sequence[DueStep], needed_workers: int | None) -> Iterator[ReportFinding]:
    stuck = sum(step.due for step in due if step.late_s is None)
    late = [step for step in due if step.late_s is not None and step.late_s > VERY_LATE_S]
    if stuck:
        yield ReportFinding(
            "warning",
            f"In hours of the next day with {stuck:,} tasks, some will not start: no worker serves "
            "their queue, or they are paused.",
        )
    if late:
        worst = max(late, key=lambda step: step.late_s or 0.0)
        need = (
            "" if needed_workers is None else f" {count(needed_workers, 'worker')} would be enough."
        )
        yield ReportFinding(
            "warning",
            f"Tasks that are due from {worst.start:%Y-%m-%d %H:%M} UTC on will start up to "
            f"{show_duration(worst.late_s or 0.0)} late.{need}",
        )
