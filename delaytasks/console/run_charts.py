"""The charts of lateness and throughput, from the statistics that the workers write."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from delaytasks.console.requests import state
from delaytasks.core.durations import show_measured
from delaytasks.core.errors import StoreError
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
_OUTCOME_COLOURS = (
    ("done", "--good"),
    ("failed", "--bad"),
    ("retried", "--warn"),
    ("cancelled", "--ink-soft"),
)


@dataclass
class Runs:
    """What the page shows of one period; `lateness` and `throughput` are for the script."""

    step: str
    has_runs: bool = False
    done: int = 0
    p50: str = "–"
    p99: str = "–"
    summary: str = ""
    lateness: dict[str, Any] = field(default_factory=dict)
    throughput: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None


def runs_of(name: str) -> Runs:
    """Return the runs of a period; a database that does not answer is part of the result."""
    period, shared = PERIODS[name], state()
    try:
        return shared.cache.get(("runs", name), period.kept_s, lambda: _read(period))
    except StoreError as error:
        return Runs(period.step, problem=f"The statistics cannot be read: {error}")


def _read(period: ChartPeriod) -> Runs:
    statistics = state().delays.statistics
    points = statistics.series(since=period.since, step=period.step)
    total = RunTotals.total(point.total for point in points)
    counts = {outcome: getattr(total, outcome) for outcome, _ in _OUTCOME_COLOURS}
    words = [f"{count:,} {outcome}" for outcome, count in counts.items() if count]
    return Runs(
        period.step,
        has_runs=any(counts.values()),
        done=total.done,
        p50=show_measured(total.lateness_quantile(0.5)),
        p99=show_measured(total.lateness_quantile(0.99)),
        summary=", ".join(words) or "no runs",
        lateness=_lateness(points),
        throughput=_throughput(points),
    )


def _lateness(points: list[SeriesPoint]) -> dict[str, Any]:
    def values(share: float) -> list[float | None]:
        found = (point.total.lateness_quantile(share) for point in points)
        return [None if seconds is None else round(max(seconds, 0.0), 4) for seconds in found]

    return _chart(
        points,
        {"label": "p99", "colour": "--warn", "values": values(0.99)},
        {"label": "p50", "colour": "--accent", "values": values(0.5), "fill": True},
    )


def _throughput(points: list[SeriesPoint]) -> dict[str, Any]:
    return _chart(
        points,
        *(
            {
                "label": outcome,
                "colour": colour,
                "values": [getattr(point.total, outcome) for point in points],
                "fill": outcome == "done",
            }
            for outcome, colour in _OUTCOME_COLOURS
        ),
    )


def _chart(points: list[SeriesPoint], *series: dict[str, Any]) -> dict[str, Any]:
    return {"x": [int(point.start.timestamp()) for point in points], "series": series}
