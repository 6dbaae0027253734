"""Derives the findings of a report from its data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from delaytasks.cli.reporting.data import DueStep, ReportData
from delaytasks.core.durations import show_duration, show_measured
from delaytasks.core.histograms import LATENESS_BOUNDS_S, bucket_of
from delaytasks.core.text import count
from delaytasks.operations.problems import Problem, Severity
from delaytasks.operations.verdict import verdict_of, worst_first, worst_of
from delaytasks.statistics.results import OnTime, RunTotals, SeriesPoint

#: The share of failures, the lateness and the number of runs from which the report has a finding.
FAILING_SHARE, FAILED_SHARE, LEAST_RUNS = 0.01, 0.1, 20
LATE_S, VERY_LATE_S = 1.0, 60.0


class ReportFindings(NamedTuple):
    """The present verdict, and the further findings about the period of the report."""

    level: Severity
    headline: str
    problems: Sequence[Problem]

    def as_json(self) -> dict[str, Any]:
        findings = [{"level": each.level, "text": each.text} for each in self.problems]
        return {"verdict": self.level, "headline": self.headline, "findings": findings}


def findings_of(data: ReportData) -> ReportFindings:
    """Return the findings, the most important first."""
    now = verdict_of(data.state)
    found = [
        *now.problems,
        *_failing(data.totals),
        *_lateness(data.series, data.totals),
        *_promises(data.on_time),
        *_coming(data.due, data.needed_workers),
    ]
    return ReportFindings(worst_of(found), now.headline, worst_first(found))


def _failing(totals: dict[str, RunTotals]) -> Iterator[Problem]:
    for tag, counts in totals.items():
        ended = counts.done + counts.failed
        share = counts.failed / ended if ended else 0.0
        if ended >= LEAST_RUNS and share >= FAILING_SHARE:
            level: Severity = "bad" if share >= FAILED_SHARE else "warning"
            yield Problem(
                level, f"{share:.1%} of the tasks of the tag {tag} failed ({counts.failed:,})."
            )
        if counts.worker_lost:
            yield Problem(
                "bad",
                f"{count(counts.worker_lost, 'task')} of the tag {tag} failed because workers died "
                "again and again.",
            )


def _lateness(series: Sequence[SeriesPoint], totals: dict[str, RunTotals]) -> Iterator[Problem]:
    if not totals:
        yield Problem(
            "note",
            "No task has ended in this time, or the workers have not written their counts yet.",
        )
    worst = max(series, key=lambda point: point.total.lateness_quantile(0.99) or 0.0, default=None)
    worst_s = 0.0 if worst is None else worst.total.lateness_quantile(0.99) or 0.0
    if worst is not None and worst_s > LATE_S:
        level: Severity = "bad" if worst_s > VERY_LATE_S else "warning"
        at = f"{worst.start:%Y-%m-%d %H:%M} UTC"
        yield Problem(
            level,
            f"From {at} on, one run in 100 started {show_measured(worst_s)} late or later; most "
            f"late runs were of the tag {_latest_tag(worst)}.",
        )


def _latest_tag(point: SeriesPoint) -> str:
    """Return the tag with the most runs that were late."""
    late = bucket_of(LATE_S, LATENESS_BOUNDS_S) + 1
    return max(point.tags, key=lambda tag: sum(point.tags[tag].lateness[late:]))


def _promises(on_time: Sequence[OnTime]) -> Iterator[Problem]:
    for each in on_time:
        if each.budget_left < 0:
            yield Problem(
                "warning",
                f"{each.share:.2%} of the runs of the tag {each.tag} began in time, fewer than "
                f"the target of {each.target:.0%}.",
            )


def _coming(due: Sequence[DueStep], needed_workers: int | None) -> Iterator[Problem]:
    stuck = sum(step.due for step in due if step.late_s is None)
    late = [step for step in due if step.late_s is not None and step.late_s > VERY_LATE_S]
    if stuck:
        yield Problem(
            "warning",
            f"In hours of the next day with {stuck:,} tasks, some will not start: no worker serves "
            "their queue, or they are paused.",
        )
    if late:
        worst = max(late, key=lambda step: step.late_s or 0.0)
        need = (
            "" if needed_workers is None else f" {count(needed_workers, 'worker')} would be enough."
        )
        yield Problem(
            "warning",
            f"Tasks that are due from {worst.start:%Y-%m-%d %H:%M} UTC on will start up to "
            f"{show_duration(worst.late_s or 0.0)} late.{need}",
        )
