"""The overview, failures, queues, workers, and the forecast."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any, NamedTuple

from flask import Flask, abort, render_template, request
from markupsafe import Markup

from delaytasks.client import DelayTasks
from delaytasks.console.charts import Series, legend, stacked_bars
from delaytasks.console.pages_tags import PERIODS, chosen_period, due_chart, runs_of
from delaytasks.console.pages_tasks import possible_actions
from delaytasks.console.queries import Searches, count_due, count_queues, number_of
from delaytasks.console.requests import SNAPSHOT_S, requires, state
from delaytasks.console.shown import day_and_time, viewer_zone
from delaytasks.console.viewers import Role
from delaytasks.model.clock import from_us
from delaytasks.model.errors import InvalidInputError
from delaytasks.model.task import Page
from delaytasks.operate.forecast import HOUR_S, Forecast, busiest, headline
from delaytasks.operate.searches import SearchTimeoutError
from delaytasks.operate.state import DeploymentState, FailedNow
from delaytasks.operate.verdict import Problem, verdict_of
from delaytasks.runtime import runtime_of
from delaytasks.statistics.reading import gather_on_time

#: Seconds for which all viewers see the same counts of queues, and the same shares on time.
QUEUES_S, SHARES_S = 5.0, 60.0
#: What the links after the sentences of the verdict show, by the page to which they lead.
SHOWN_BY = {
    "failure": "these failures",
    "failures": "all failures",
    "forecast": "the forecast",
    "overview": "the health",
    "policies": "the policies",
    "tasks": "the tasks",
    "workers": "the workers",
}
#: Tasks that the page of a group shows.
SHOWN_FAILURES = 50


def install(app: Flask) -> None:
    app.add_url_rule("/", view_func=overview)
    app.add_url_rule("/workers", view_func=workers)
    app.add_url_rule("/queues", view_func=queues)
    app.add_url_rule("/failures", view_func=failures)
    app.add_url_rule("/failures/<name>", view_func=failure)
    app.add_url_rule("/forecast", view_func=forecast)


@requires(Role.VIEW)
def overview() -> str:
    found, shared = state().snapshot(), state()
    due = shared.cache.get("due", SNAPSHOT_S, lambda: count_due(shared.delays, found.now))
    on_time = shared.cache.get("on_time", SHARES_S, lambda: _on_time(shared.delays))
    period = chosen_period()
    return render_template(
        "overview.html",
        page="overview",
        s=found,
        now=found.now,
        verdict=verdict_of(found, viewer_zone(), _ahead(found)),
        shown_by=SHOWN_BY,
        due=due,
        due_chart=due_chart(due, found.now, viewer_zone()),
        period=period,
        periods=list(PERIODS),
        runs=runs_of(period, viewer_zone()),
        on_time=on_time,
    )


def _ahead(found: DeploymentState) -> list[Problem]:
    """Return a problem if an hour of the last forecast does not fit."""
    if found.is_down or not found.alive:
        return []  # the forecast would be that of assumed processes
    recent = state().forecast.get()
    full = None if recent is None else recent[0].first_full
    if recent is None or full is None or (found.overdue and full.start <= found.now):
        return []  # the overdue tasks are the peak
    text = f"A peak is ahead. {headline(recent[0], day_and_time)}"
    return [Problem("warning", text, "forecast")]


def _on_time(delays: DelayTasks) -> list[dict[str, Any]]:
    return gather_on_time(delays.statistics, runtime_of(delays).registry)


@requires(Role.VIEW)
def workers() -> str:
    found = state().snapshot()
    return render_template("workers.html", page="workers", s=found, now=found.now)


@requires(Role.VIEW)
def queues() -> str:
    found, shared = state().snapshot(), state()
    counted = shared.cache.get("queues", QUEUES_S, lambda: count_queues(shared.delays, found.alive))
    paused = {policy.name for policy in found.paused if policy.kind == "queue"}
    return render_template(
        "queues.html", page="queues", queues=counted, paused=paused, s=found, now=found.now
    )


@requires(Role.VIEW)
def failures() -> str:
    found = state().snapshot()
    return render_template("failures.html", page="failures", s=found, now=found.now)


def group_of(name: str) -> FailedNow:
    """Return the group of failures, or answer 404."""
    found = next((group for group in state().snapshot().groups if group.name == name), None)
    if found is None:
        abort(404)
    return found


@requires(Role.VIEW)
def failure(name: str) -> str:
    found, group = state().snapshot(), group_of(name)
    page, problem = Page([], None), ""
    try:
        searches = Searches(state().delays)
        page = searches.find(**group.filters, limit=SHOWN_FAILURES, newest_first=True)
    except SearchTimeoutError as error:
        problem = str(error)
    return render_template(
        "failure.html",
        page="failures",
        group=group,
        tasks=page.tasks,
        actions=possible_actions(group.filters["status"]),
        problem=problem,
        s=found,
        now=found.now,
    )


#: Seconds for which all viewers see the same forecast.
FORECAST_S = 60.0
#: The hours in the table.
HOURS_SHOWN = 12
FORECAST_DAYS = {"day": 1, "week": 7, "month": 30}


class ForecastQuery(NamedTuple):
    """The fields of the form."""

    period: str
    processes: int | None


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
        raise InvalidInputError(f"processes is a number, not {typed!r:.40}", "processes")
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
