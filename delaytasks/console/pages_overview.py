"""The overview, failures, queues, workers, and the forecast."""

from __future__ import annotations

import math
from datetime import timedelta

from flask import abort, render_template, request
from markupsafe import Markup

from delaytasks.console.charts import Series, stacked_bars, with_legend
from delaytasks.console.pages_tags import shown_runs
from delaytasks.console.pages_tasks import possible_actions
from delaytasks.console.queries import BAR, Searches, count_due, count_queues
from delaytasks.console.requests import SNAPSHOT_S, number_of, page, runtime, state
from delaytasks.console.shown import day_and_time, viewer_zone
from delaytasks.model.clock import from_us
from delaytasks.model.errors import InvalidInputError
from delaytasks.model.task import Page
from delaytasks.operate.forecast import HOUR_S, Forecast, busiest, headline
from delaytasks.operate.searches import SearchTimeoutError
from delaytasks.operate.state import DeploymentState
from delaytasks.operate.verdict import Problem, verdict_of
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


@page("/")
def overview() -> str:
    found, cache, zone = state().snapshot(), state().cache, viewer_zone()
    due = cache.get("due", SNAPSHOT_S, lambda: count_due(runtime().store, found.now))
    starts = [found.now.astimezone(zone) + n * BAR for n in range(len(due.counts))]
    statistics, registry = state().delays.statistics, runtime().registry
    return render_template(
        "overview.html",
        s=found,
        now=found.now,
        verdict=verdict_of(found, zone, _ahead(found)),
        shown_by=SHOWN_BY,
        due=due,
        due_chart=stacked_bars(starts, BAR, [Series("due", "due", due.counts)]),
        runs=shown_runs(),
        on_time=cache.get("on_time", SHARES_S, lambda: gather_on_time(statistics, registry)),
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


@page("/workers")
def workers() -> str:
    found = state().snapshot()
    return render_template("lists.html", page="workers", rows=found.workers, s=found, now=found.now)


@page("/queues")
def queues() -> str:
    found, delays = state().snapshot(), state().delays
    counted = state().cache.get("queues", QUEUES_S, lambda: count_queues(delays, found.alive))
    paused = {policy.name for policy in found.paused if policy.kind == "queue"}
    return render_template(
        "lists.html", page="queues", rows=counted, paused_queues=paused, s=found, now=found.now
    )


@page("/failures")
def failures() -> str:
    found = state().snapshot()
    return render_template("lists.html", page="failures", rows=found.groups, s=found, now=found.now)


@page("/failures/<name>")
def failure(name: str) -> str:
    found = state().snapshot()
    group = next((group for group in found.groups if group.name == name), None) or abort(404)
    tasks, problem = Page([], None), ""
    try:
        find = Searches(state().delays).find
        tasks = find(**group.filters, limit=SHOWN_FAILURES, newest_first=True)
    except SearchTimeoutError as error:
        problem = str(error)
    return render_template(
        "failure.html",
        group=group,
        tasks=tasks.tasks,
        actions=possible_actions(group.filters["status"]),
        problem=problem,
        now=found.now,
    )


# -- the forecast ---------------------------------------------------------------------------------


#: Seconds for which all viewers see the same forecast, and the hours in the table.
FORECAST_S, HOURS_SHOWN = 60.0, 12
FORECAST_DAYS = {"day": 1, "week": 7, "month": 30}


@page("/forecast")
def forecast() -> str:
    period, typed = request.args.get("period", "week"), request.args.get("processes", "").strip()
    period, processes = period if period in FORECAST_DAYS else "week", number_of(typed)
    if typed and processes is None:
        raise InvalidInputError(f"processes is a number, not {typed!r:.40}", "processes")
    found = state().cache.get(
        ("forecast", period, processes),
        FORECAST_S,
        lambda: state().delays.forecast(FORECAST_DAYS[period], processes=processes),
    )
    due, busy = _charts(found)
    return render_template(
        "forecast.html",
        period=period,
        periods=list(FORECAST_DAYS),
        processes=processes,
        f=found,
        headline=headline(found, day_and_time),
        hours=busiest(found, HOURS_SHOWN),
        an_hour=timedelta(seconds=HOUR_S),
        due=due,
        busy=busy,
    )


def _charts(found: Forecast) -> list[Markup]:
    """Return charts of the tasks that are due in each hour, and of the time that they need."""
    first = int(found.made_at.timestamp() // HOUR_S)
    end = math.ceil(found.until.timestamp() / HOUR_S)
    starts = [from_us(number * HOUR_S * 1_000_000) for number in range(first, end)]
    known = {hour.start: hour for hour in found.hours}
    hours = [known.get(start) for start in starts]
    # The largest tag has a colour of its own.
    tag = found.tags[0].tag if found.tags else ""
    largest = [hour.due_by_tag.get(tag, 0) if hour else 0 for hour in hours]
    others = [hour.due - hour.due_by_tag.get(tag, 0) if hour else 0 for hour in hours]
    due = [Series(tag, "due", largest)] if tag else []
    due.append(Series("other tags", "other", others))
    percent = [round(100 * hour.utilization) if hour else 0 for hour in hours]
    busy = [
        Series("% of the hour", "done", [each if each <= 100 else 0 for each in percent]),
        Series("more than the hour", "failed", [each if each > 100 else 0 for each in percent]),
    ]
    local, length = [start.astimezone(viewer_zone()) for start in starts], timedelta(seconds=HOUR_S)
    return [with_legend(parts, stacked_bars(local, length, parts)) for parts in (due, busy)]
