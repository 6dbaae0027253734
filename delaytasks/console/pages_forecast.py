"""Forecasts of the due tasks, and of the processes that they need."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import NamedTuple

from flask import Flask, render_template, request
from markupsafe import Markup

from delaytasks.console.requests import requires, state
from delaytasks.console.shown import day_and_time, viewer_zone
from delaytasks.console.task_filters import number_of
from delaytasks.console.viewers import Role
from delaytasks.core.clock import from_us
from delaytasks.core.errors import InvalidInputError
from delaytasks.forecast import HOUR_S, Forecast, busiest, headline
from delaytasks.statistics.charts import Series, legend, stacked_bars

#: Seconds for which all viewers see the same forecast.
FORECAST_S = 60.0
#: The hours in the table.
HOURS_SHOWN = 12
FORECAST_DAYS = {"day": 1, "week": 7, "month": 30}


class ForecastQuery(NamedTuple):
    """The fields of the form."""

    period: str
    processes: int | None


def install(app: Flask) -> None:
    app.add_url_rule("/forecast", view_func=forecast)


@requires(Role.VIEW)
def forecast() -> str:
    query, shared = _query(), state()
    found = shared.cache.get(
        ("forecast", query),
        FORECAST_S,
        lambda: shared.delays.forecast(FORECAST_DAYS[query.period], processes=query.processes),
    )
    return render_template(
        "forecast.html",
        page="forecast",
        query=query,
        periods=list(FORECAST_DAYS),
        f=found,
        headline=headline(found, day_and_time),
        hours=busiest(found, HOURS_SHOWN),
        an_hour=timedelta(seconds=HOUR_S),
        charts=_charts(found),
        now=found.made_at,
    )


def _query() -> ForecastQuery:
    period, typed = request.args.get("period"), request.args.get("processes", "").strip()
    processes = number_of(typed)
    if typed and processes is None:
        raise InvalidInputError(f"processes is a number, not {typed!r:.40}")
    return ForecastQuery(period if period in FORECAST_DAYS else "week", processes)


def _charts(found: Forecast) -> dict[str, Markup]:
    known, zone = {hour.start: hour for hour in found.hours}, viewer_zone()
    first = int(found.made_at.timestamp() // HOUR_S)
    end = math.ceil(found.until.timestamp() / HOUR_S)
    starts = [from_us(number * HOUR_S * 1_000_000) for number in range(first, end)]
    hours = [known.get(start) for start in starts]
    # The largest tag has a colour of its own.
    tags = [tag.tag for tag in found.tags[:1]]
    largest = [
        0 if hour is None else sum(hour.due_by_tag.get(t, 0) for t in tags) for hour in hours
    ]
    others = [0 if hour is None else hour.due for hour in hours]
    due = [
        *(Series(tag, "due", largest) for tag in tags),
        Series("other tags", "other", [a - b for a, b in zip(others, largest, strict=True)]),
    ]
    percent = [0 if hour is None else round(100 * hour.utilization) for hour in hours]
    busy = [
        Series("% of the hour", "done", [each if each <= 100 else 0 for each in percent]),
        Series("more than the hour", "failed", [each if each > 100 else 0 for each in percent]),
    ]
    local, length = [start.astimezone(zone) for start in starts], timedelta(seconds=HOUR_S)
    return {
        name: Markup(legend(parts) + stacked_bars(local, length, parts))
        for name, parts in (("due", due), ("busy", busy))
    }
