"""Forecasts of the due tasks, and of their lateness with these or other workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from flask import Flask, render_template, request
from markupsafe import Markup

from delaytasks.client import DelayTasks
from delaytasks.console.requests import requires, state
from delaytasks.console.shown import day_and_time, viewer_zone
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
from delaytasks.statistics.charts import Series, legend, lines, stacked_bars

#: Seconds for which all viewers see the same forecast.
FORECAST_S = 60.0
#: The table has the latest and the largest steps.
PEAKS_SHOWN = 12


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


def _charts(found: Forecast) -> dict[str, Markup]:
    steps, length = _all_steps(found), timedelta(seconds=found.step_s)
    starts = [start for start, _ in steps]
    tags = [tag.tag for tag in found.tags[:1]]
    due = [
        *(Series(tag, "due", [_of_tag(step, tag) for _, step in steps]) for tag in tags),
        Series("other tags", "other", [_of_others(step, tags) for _, step in steps]),
    ]
    late = [
        Series("these workers", "p99", [step.late_s if step else 0.0 for _, step in steps]),
        Series("twice as many", "p50", [step.late_s_doubled if step else 0.0 for _, step in steps]),
    ]
    return {
        "due": Markup(legend(due) + stacked_bars(starts, length, due)),
        "late": Markup(legend(late) + lines(starts, length, late, ON_TIME_S)),
    }


def _of_tag(step: ForecastStep | None, tag: str) -> int:
    return 0 if step is None else step.due_by_tag.get(tag, 0)


def _of_others(step: ForecastStep | None, tags: Sequence[str]) -> int:
    return 0 if step is None else step.due - sum(_of_tag(step, tag) for tag in tags)


def _all_steps(found: Forecast) -> list[tuple[datetime, ForecastStep | None]]:
    """Return the starts of all steps; a forecast leaves out those without tasks."""
    known, zone = {step.start: step for step in found.steps}, viewer_zone()
    first = int(found.made_at.timestamp() // found.step_s)
    end = math.ceil(found.until.timestamp() / found.step_s)
    starts = [from_us(round(number * found.step_s * 1e6)) for number in range(first, end)]
    return [(start.astimezone(zone), known.get(start)) for start in starts]
