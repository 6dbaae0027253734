"""Draws the charts of the overview and of a tag: the tasks due soon, and the runs from the
statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, tzinfo
from typing import NamedTuple

from flask import request
from markupsafe import Markup

from delaytasks.console.counts import BAR, DueSoon
from delaytasks.console.requests import state
from delaytasks.core.durations import parse_duration, show_measured
from delaytasks.core.errors import StoreError
from delaytasks.runtime import runtime_of
from delaytasks.statistics.charts import (
    Series,
    duration_chart,
    lateness_chart,
    stacked_bars,
    throughput_chart,
)
from delaytasks.statistics.reading import count_rows
from delaytasks.statistics.results import RunTotals, SeriesPoint


class ChartPeriod(NamedTuple):
    since: str
    step: str
    #: Seconds for which all viewers see the same chart.
    kept_s: float
    #: Whether the number of rows is checked before they are read.
    has_row_limit: bool = False


#: The steps of a month and a year are whole days, so a row of a day is read as one number.
PERIODS = {
    "hour": ChartPeriod("1h", "1m", 10.0),
    "day": ChartPeriod("1d", "15m", 60.0),
    "week": ChartPeriod("7d", "2h", 300.0),
    "month": ChartPeriod("30d", "1d", 900.0, has_row_limit=True),
    "year": ChartPeriod("365d", "7d", 3600.0, has_row_limit=True),
}
#: The most rows that a long chart reads.
MOST_CHART_ROWS = 30_000
#: The rows that one tag has in one database besides one for each day: at most one for each hour of
#: two days, for each minute of the last two hours, and for what came late.
RECENT_ROWS_OF_TAG = 50 + 125 + 7
_SHOWN_OUTCOMES = ("done", "failed", "retried", "cancelled")


class PeriodRuns(NamedTuple):
    """The runs of all tags by step."""

    points: Sequence[SeriesPoint]
    #: The number of tags that were read, if all of them have more than `MOST_CHART_ROWS` rows.
    cut_to: int | None = None

    def by_tag(self) -> dict[str, dict[int, RunTotals]]:
        """Return the totals of each tag by the number of the step."""
        steps: dict[str, dict[int, RunTotals]] = {}
        for number, point in enumerate(self.points):
            for tag, total in point.tags.items():
                steps.setdefault(tag, {})[number] = total
        return steps


@dataclass
class Runs:
    """The runs of one period, of all tags or of one."""

    step: str
    has_runs: bool = False
    total: RunTotals = field(default_factory=lambda: RunTotals.total([]))
    p50: str = "–"
    p99: str = "–"
    longest: str = "–"
    summary: str = ""
    lateness: Markup | str = ""
    throughput: Markup | str = ""
    #: Only of one tag.
    duration: Markup | str = ""
    problem: str | None = None
    cut_to: int | None = None


def due_chart(due: DueSoon, now: datetime, zone: tzinfo) -> Markup:
    """Return the bars of the tasks that are due in each of the next minutes."""
    starts = [now.astimezone(zone) + n * BAR for n in range(len(due.counts))]
    return Markup(stacked_bars(starts, BAR, [Series("due", "due", due.counts)]))


def chosen_period() -> str:
    """Return the period in the address of this request."""
    period = request.args.get("period", "hour")
    return period if period in PERIODS else "hour"


def runs_of(name: str, zone: tzinfo, tag: str | None = None) -> Runs:
    """Return the runs of a period; a database that does not answer is part of the result."""
    try:
        found = read_runs(name) if tag is None else PeriodRuns(_read_tag(name, tag))
    except StoreError as error:
        return Runs(PERIODS[name].step, problem=f"The statistics cannot be read: {error}")
    runs = _runs(PERIODS[name], found, zone)
    if tag is not None:
        step = parse_duration(runs.step)
        runs.duration = Markup(duration_chart(found.points, step, zone))
    return runs


def read_runs(name: str) -> PeriodRuns:
    """Return the runs of all tags in a period, which all viewers share for some time."""
    return state().history.get(("runs", name), PERIODS[name].kept_s, lambda: _read_all(name))


def _read_all(name: str) -> PeriodRuns:
    period, delays = PERIODS[name], state().delays
    tags = _busiest_tags(period) if period.has_row_limit else None
    points = delays.statistics.series(since=period.since, step=period.step, tags=tags)
    return PeriodRuns(points, None if tags is None else len(tags))


def _busiest_tags(period: ChartPeriod) -> list[str] | None:
    """Return the tags with the most runs in the last week; None if all tags can be read."""
    wiring = runtime_of(state().delays)
    now, shards = wiring.clock.now(), wiring.shards
    since = now - parse_duration(period.since)
    if count_rows(shards, since, now, MOST_CHART_ROWS + 1) <= MOST_CHART_ROWS:
        return None
    started = {
        tag: sum(total.started for total in steps.values())
        for tag, steps in read_runs("week").by_tag().items()
    }
    rows_of_tag = parse_duration(period.since).days + RECENT_ROWS_OF_TAG
    most = max(MOST_CHART_ROWS // (rows_of_tag * len(shards)), 1)
    return sorted(started, key=lambda tag: (-started[tag], tag))[:most]


def _read_tag(name: str, tag: str) -> Sequence[SeriesPoint]:
    period, shared = PERIODS[name], state()

    def read() -> Sequence[SeriesPoint]:
        return shared.delays.statistics.series(since=period.since, step=period.step, tags=[tag])

    return shared.history.get(("runs", name, tag), period.kept_s, read)


def _runs(period: ChartPeriod, found: PeriodRuns, zone: tzinfo) -> Runs:
    points, step = found.points, parse_duration(period.step)
    total = RunTotals.total(point.total for point in points)
    counts = {outcome: getattr(total, outcome) for outcome in _SHOWN_OUTCOMES}
    words = [f"{count:,} {outcome}" for outcome, count in counts.items() if count]
    return Runs(
        period.step,
        has_runs=any(counts.values()),
        total=total,
        p50=show_measured(total.lateness_quantile(0.5)),
        p99=show_measured(total.lateness_quantile(0.99)),
        longest=show_measured(total.lateness_max_s if total.started else None),
        summary=", ".join(words) or "no runs",
        lateness=Markup(lateness_chart(points, step, zone)),
        throughput=Markup(throughput_chart(points, step, zone)),
        cut_to=found.cut_to,
    )
