"""The overview, queues, workers, failures, and the forecast."""

from __future__ import annotations

import math
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

from flask import abort, request
from markupsafe import Markup
from sqlalchemy import select

from delaytasks.console.charts import Series, stacked_bars, with_legend
from delaytasks.console.forms import possible_operations
from delaytasks.console.pages_tags import shown_runs
from delaytasks.console.pages_tasks import Searches
from delaytasks.console.requests import SNAPSHOT_S, number_of, runtime, state
from delaytasks.console.shown import day_and_time, viewer_zone
from delaytasks.db.store import Store
from delaytasks.db.task_rows import first_page
from delaytasks.model.clock import from_us
from delaytasks.model.errors import InvalidInputError, StoreError
from delaytasks.model.filters import Filter
from delaytasks.model.moves import Status
from delaytasks.model.task import Page
from delaytasks.operate.forecast import HOUR_S, Forecast, busiest, headline
from delaytasks.operate.health import Problem, verdict_of
from delaytasks.operate.searches import SearchTimeoutError
from delaytasks.operate.state import DeploymentState, snapshot
from delaytasks.operate.statistics import gather_on_time

# -- the overview --------------------------------------------------------------------------------


#: Seconds for which all viewers see the same counts of queues, and the same shares on time.
QUEUES_S, SHARES_S = 5.0, 60.0
#: The share of tasks that should be on time.
ON_TIME_TARGET = 0.99


def overview() -> dict[str, Any]:
    found, cache, zone = state().snapshot(), state().cache, viewer_zone()
    due = cache.get("due", SNAPSHOT_S, lambda: count_due(runtime().store, found.now))
    starts = [found.now.astimezone(zone) + n * BAR for n in range(BARS)]
    statistics, registry = state().delays.statistics, runtime().registry
    return {
        "s": found,
        "now": found.now,
        "settings": state().delays.settings,
        "database_url": runtime().store.database.shown_url,
        "verdict": verdict_of(found, zone, _ahead(found)),
        "due": due,
        "is_due_cut": sum(due) >= MOST_DUE,
        "due_chart": stacked_bars(starts, BAR, [Series("due", "due", due)]),
        "runs": shown_runs(),
        "on_time": cache.get("on_time", SHARES_S, lambda: gather_on_time(statistics, registry)),
        "on_time_target": ON_TIME_TARGET,
    }


def _ahead(found: DeploymentState) -> list[Problem]:
    """Return a problem if an hour of the last forecast does not fit."""
    if found.error is not None or not found.alive:
        return []  # the forecast would be that of assumed processes
    recent = state().forecast.get()
    full = None if recent is None else recent[0].first_full
    if recent is None or full is None or (found.overdue and full.start <= found.now):
        return []  # the overdue tasks are the peak
    text = f"A peak is ahead. {headline(recent[0], day_and_time)}"
    return [Problem("warning", text, "forecast")]


#: The bars of the histogram of due times, the time of each, and what is read at most.
BARS, BAR, MOST_DUE, MOST_QUEUES = 30, timedelta(minutes=1), 5_000, 100


def count_due(store: Store, now: datetime) -> list[int]:
    """Count the waiting tasks that are due in each of the next minutes.

    At most `MOST_DUE` of `MOST_QUEUES` queues are read, and none if the database does not answer.
    """
    table, counts = store.schema.tasks, [0] * BARS
    t, waiting = table.c, Filter(status=frozenset({Status.NOT_COMPLETE}))
    soon = t.expected_time >= now, t.expected_time < now + BARS * BAR
    query = select(t.expected_time, t.id).where(*soon)
    with suppress(StoreError):  # the state of the deployment has the error
        for at, _ in store.database.autocommitted(
            lambda c: first_page(c, query, table, waiting, MOST_DUE, most_queues=MOST_QUEUES)
        ):
            counts[min((at - now) // BAR, BARS - 1)] += 1
    return counts


# -- queues and workers ---------------------------------------------------------------------------


def queues() -> dict[str, Any]:
    found, store, settings = state().snapshot(), runtime().store, state().delays.settings
    live = state().cache.get("queues", QUEUES_S, lambda: snapshot(store, settings, found))
    return {"rows": live.queues, "is_capped": live.is_capped, "s": found, "now": found.now}


def workers() -> dict[str, Any]:
    found = state().snapshot()
    return {"s": found, "now": found.now}


# -- failures ------------------------------------------------------------------------------------


#: Tasks that the page of a group shows.
SHOWN_FAILURES = 50


def failures() -> dict[str, Any]:
    found = state().snapshot()
    return {"rows": found.groups, "s": found, "now": found.now}


def failure(name: str) -> dict[str, Any]:
    found = state().snapshot()
    group = next((group for group in found.groups if group.name == name), None) or abort(404)
    tasks, problem = Page([], None), ""
    try:
        find = Searches().find
        tasks = find(**group.filters, limit=SHOWN_FAILURES, newest_first=True)
    except SearchTimeoutError as error:
        problem = str(error)
    return {
        "group": group,
        "found": tasks,
        "actions": possible_operations(group.filters["status"]),
        "problem": problem,
        "s": found,
        "now": found.now,
    }


# -- the forecast ---------------------------------------------------------------------------------


#: Seconds for which all viewers see the same forecast, and the hours in the table.
FORECAST_S, HOURS_SHOWN = 60.0, 12
FORECAST_DAYS = {"day": 1, "week": 7, "month": 30}


def forecast() -> dict[str, Any]:
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
    return {
        "period": period,
        "periods": list(FORECAST_DAYS),
        "processes": processes,
        "f": found,
        "headline": headline(found, day_and_time),
        "hours": busiest(found, HOURS_SHOWN),
        "an_hour": timedelta(seconds=HOUR_S),
        "due": due,
        "busy": busy,
    }


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
