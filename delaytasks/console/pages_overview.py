"""The overview, the workers, the queues and the failures."""

from __future__ import annotations

from typing import Any

from flask import Flask, abort, render_template

from delaytasks.client import DelayTasks
from delaytasks.console.counts import count_due, count_queues
from delaytasks.console.pages_many import possible_actions
from delaytasks.console.requests import SNAPSHOT_S, requires, state
from delaytasks.console.run_charts import PERIODS, chosen_period, due_chart, runs_of
from delaytasks.console.searches import Searches
from delaytasks.console.shown import day_and_time, viewer_zone
from delaytasks.console.viewers import Role
from delaytasks.core.errors import SearchTimeoutError
from delaytasks.core.page import Page
from delaytasks.forecast import headline
from delaytasks.operations.failed_now import FailedNow
from delaytasks.operations.problems import Problem
from delaytasks.operations.state import DeploymentState
from delaytasks.operations.verdict import verdict_of
from delaytasks.runtime import runtime_of
from delaytasks.statistics.on_time import gather_on_time

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
