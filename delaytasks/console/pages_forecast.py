"""Forecasts of the due tasks, and of their lateness with these or other workers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from flask import Flask, render_template, request
from markupsafe import Markup

from delaytasks.client import DelayTasks
from delaytasks.console.charts import histogram
from delaytasks.console.requests import requires, state
from delaytasks.console.shown import day_and_time
from delaytasks.console.task_filters import number_of
from delaytasks.console.viewers import Role
from delaytasks.core.clock import from_us
from delaytasks.core.durations import parse_duration
from delaytasks.core.errors import InvalidInputError
from delaytasks.forecast.result import Forecast, ForecastStep
from delaytasks.forecast.sentences import (
    ON_TIME_S,
    most_important,
    pool_sentence,
    worst_sentence,
)

#: Seconds for which all viewers see the same forecast.
FORECAST_S = 60.0
#: The table has the latest and the largest steps.
PEAKS_SHOWN = 12
#: The chart of the lateness is in minutes if it has larger values.
MINUTES_FROM_S = 300.0


class ForecastPeriod(NamedTuple):
    days: float
    step: str


FORECAST_PERIODS = {
    "day": ForecastPeriod(1, "10m"),
    "week": ForecastPeriod(7, "1h"),
    "month": ForecastPeriod(30, "6h"),
}


class ForecastLine(NamedTuple):
    """A sentence, and whether it is good, a warning or bad."""

    level: str
    text: str


class ForecastQuery(NamedTuple):
    """The fields of the form."""

    period: str
    tag: str | None
    workers: int | None
    processes: int | None
    target: str


@dataclass(frozen=True)
class ForecastCharts:
    """The charts; `due` and `lateness` are for the script, and `bars` are shown without it."""

    bars: Markup
    due: dict[str, Any]
    lateness: dict[str, Any]
    #: The unit of the lateness.
    unit: str


def install(app: Flask) -> None:
    app.add_url_rule("/forecast", view_func=forecast)


@requires(Role.VIEW)
def forecast() -> str:
    query, shared = _query(), state()
    found = shared.cache.get(
        ("forecast", query), FORECAST_S, lambda: _compute(shared.delays, query)
    )
    return render_template(
        "forecast.html",
        page="forecast",
        query=query,
        periods=list(FORECAST_PERIODS),
        f=found,
        headline=_headline(found, query.period),
        lines=_lines(found),
        steps=most_important(found.steps, PEAKS_SHOWN),
        step_length=timedelta(seconds=found.step_s),
        charts=_charts(found),
        on_time_s=ON_TIME_S,
        now=found.made_at,
    )


def _query() -> ForecastQuery:
    period = request.args.get("period", "week")
    return ForecastQuery(
        period if period in FORECAST_PERIODS else "week",
        request.args.get("tag", "").strip() or None,
        _count("workers"),
        _count("processes"),
        request.args.get("target", "").strip() or "1m",
    )


def _count(name: str) -> int | None:
    text = request.args.get(name, "").strip()
    count = number_of(text)
    if text and count is None:
        raise InvalidInputError(f"{name} is a number, not {text!r:.40}")
    return count


def _compute(delays: DelayTasks, query: ForecastQuery) -> Forecast:
    days, step = FORECAST_PERIODS[query.period]
    return delays.forecast(
        days,
        tag=query.tag,
        workers=query.workers,
        processes=query.processes,
        target=parse_duration(query.target),
        step=step,
    )


# -- in words -------------------------------------------------------------------------------------


def _headline(found: Forecast, period: str) -> ForecastLine:
    worst = found.worst
    if worst is None:
        return ForecastLine("good", f"Nothing becomes due in the next {period}.")
    if worst.late_s is None:
        at = day_and_time(worst.start)
        return ForecastLine("bad", f"{at}: some of {worst.due:,} tasks never start.")
    if worst.late_s < ON_TIME_S:
        return ForecastLine("good", f"On time: all that becomes due in the next {period}.")
    level = "warn" if worst.late_s > found.target_s else "good"
    return ForecastLine(level, f"From {worst_sentence(found, day_and_time)}.")


def _lines(found: Forecast) -> list[ForecastLine]:
    """Return sentences about the workers of each group of queues, and about assumptions."""
    lines: list[ForecastLine] = []
    for pool in found.pools:
        is_late = (pool.late_s or 0.0) > found.target_s
        level = "bad" if not pool.workers else "warn" if is_late else "good"
        sentence = pool_sentence(pool, found.target_s)
        lines.append(ForecastLine(level, f"{sentence[0].upper()}{sentence[1:]}."))
    lines += (ForecastLine("warn", note) for note in found.notes)
    if found.missing:
        numbers = ", ".join(map(str, found.missing))
        lines.append(ForecastLine("bad", f"Databases that do not answer are left out: {numbers}."))
    return lines


# -- charts ---------------------------------------------------------------------------------------


def _charts(found: Forecast) -> ForecastCharts:
    steps = _all_steps(found)
    starts = [start for start, _ in steps]
    values = [step.due if step else 0 for _, step in steps]
    bars = histogram(
        values,
        [f"{day_and_time(at)}: {due:,}" for at, due in zip(starts, values, strict=True)],
        list(map(day_and_time, starts)),
        f"Tasks that become due, at most {max(values):,} in one step",
    )
    late = [step.late_s if step else 0.0 for _, step in steps]
    late_doubled = [step.late_s_doubled if step else 0.0 for _, step in steps]
    is_long = max((each for each in late if each), default=0.0) > MINUTES_FROM_S
    unit_s = 60.0 if is_long else 1.0

    def shown(seconds: list[float | None]) -> list[float | None]:
        return [None if each is None else round(each / unit_s, 2) for each in seconds]

    x = [int(start.timestamp()) for start in starts]
    due = [
        _series("due", "--accent", values, True),
        _series("not started", "--warn", [step.backlog if step else 0 for _, step in steps]),
    ]
    lateness = [
        _series("these workers", "--warn", shown(late), True),
        _series("twice as many", "--accent", shown(late_doubled)),
    ]
    return ForecastCharts(
        bars,
        {"x": x, "series": due},
        {"x": x, "series": lateness},
        " min" if is_long else " s",
    )


def _all_steps(found: Forecast) -> list[tuple[datetime, ForecastStep | None]]:
    """Return the starts of all steps; a forecast leaves out those without tasks."""
    known = {step.start: step for step in found.steps}
    first = int(found.made_at.timestamp() // found.step_s)
    end = math.ceil(found.until.timestamp() / found.step_s)
    starts = [from_us(round(number * found.step_s * 1e6)) for number in range(first, end)]
    return [(start, known.get(start)) for start in starts]


def _series(label: str, colour: str, values: Any, fill: bool = False) -> dict[str, Any]:
    return {"label": label, "colour": colour, "values": values, "fill": fill}
