"""Draws the charts of the overview: the tasks due soon, and the runs from the statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo
from typing import NamedTuple

from markupsafe import Markup

from delaytasks.console.counts import BAR, DueSoon
from delaytasks.console.requests import state
from delaytasks.core.durations import parse_duration, show_measured
from delaytasks.core.errors import StoreError
from delaytasks.statistics.charts import Series, lateness_chart, stacked_bars, throughput_chart
from delaytasks.statistics.results import RunTotals, SeriesPoint


class ChartPeriod(NamedTuple):
    since: str
    step: str
    #: Seconds for which all viewers see the same chart.
    kept_s: float


PERIODS = {
    "hour": ChartPeriod("1h", "1m", 10.0),
    "day": ChartPeriod("1d", "15m", 60.0),
    "week": ChartPeriod("7d", "2h", 300.0),
}
_SHOWN_OUTCOMES = ("done", "failed", "retried", "cancelled")


@dataclass
class Runs:
    """The runs of one period."""

    step: str
    has_runs: bool = False
    done: int = 0
    p50: str = "–"
    p99: str = "–"
    longest: str = "–"
    summary: str = ""
    lateness: Markup | str = ""
    throughput: Markup | str = ""
    problem: str | None = None


def due_chart(due: DueSoon, now: datetime, zone: tzinfo) -> Markup:
    """Return the bars of the tasks that are due in each of the next minutes."""
    starts = [now.astimezone(zone) + n * BAR for n in range(len(due.counts))]
    return Markup(stacked_bars(starts, BAR, [Series("due", "due", due.counts)]))


def runs_of(name: str, zone: tzinfo) -> Runs:
    """Return the runs of a period; a database that does not answer is part of the result."""
    period, shared = PERIODS[name], state()

    def read() -> list[SeriesPoint]:
        return shared.delays.statistics.series(since=period.since, step=period.step)

    try:
        points = shared.cache.get(("runs", name), period.kept_s, read)
    except StoreError as error:
        return Runs(period.step, problem=f"The statistics cannot be read: {error}")
    return _runs(period, points, zone)


def _runs(period: ChartPeriod, points: Sequence[SeriesPoint], zone: tzinfo) -> Runs:
    total, step = RunTotals.total(point.total for point in points), parse_duration(period.step)
    counts = {outcome: getattr(total, outcome) for outcome in _SHOWN_OUTCOMES}
    words = [f"{count:,} {outcome}" for outcome, count in counts.items() if count]
    return Runs(
        period.step,
        has_runs=any(counts.values()),
        done=total.done,
        p50=show_measured(total.lateness_quantile(0.5)),
        p99=show_measured(total.lateness_quantile(0.99)),
        longest=show_measured(total.lateness_max_s if total.started else None),
        summary=", ".join(words) or "no runs",
        lateness=Markup(lateness_chart(points, step, zone)),
        throughput=Markup(throughput_chart(points, step, zone)),
    )
