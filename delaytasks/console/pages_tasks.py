"""The list of tasks, one task, and the actions on one task."""

from __future__ import annotations

from typing import Any

from flask import Flask, redirect, render_template, request, url_for
from werkzeug.wrappers import Response

from delaytasks.client import DelayTasks
from delaytasks.console.actions import act
from delaytasks.console.pages_many import possible_actions
from delaytasks.console.requests import requires, state, viewer
from delaytasks.console.shown import viewer_zone
from delaytasks.console.task_filters import instant_of, number_of, query_of, read_page
from delaytasks.console.timeline import timeline_of
from delaytasks.console.viewers import Role
from delaytasks.core.durations import parse_duration
from delaytasks.core.errors import (
    InvalidDelayError,
    InvalidInputError,
    InvalidQueryError,
    SearchTimeoutError,
)
from delaytasks.core.ids import check_id
from delaytasks.core.page import Page
from delaytasks.core.reasons import Reason
from delaytasks.core.states import Status, moves_from
from delaytasks.core.trace_meta import trace_id_of
from delaytasks.runtime import runtime_of


def install(app: Flask) -> None:
    app.add_url_rule("/tasks", view_func=tasks)
    app.add_url_rule("/tasks/<id>", view_func=task)
    for view in (cancel_task, rerun_task, reschedule_task, run_task_now):
        name = view.__name__.removesuffix("_task").removesuffix("_task_now")
        app.add_url_rule(f"/tasks/<id>/{name}", view_func=view, methods=["POST"])


@requires(Role.VIEW)
def tasks() -> str | Response:
    given = request.args.get("id", "").strip()
    if number_of(given) is not None:
        return redirect(url_for("task", id=given), 303)
    delays, now = state().delays, runtime_of(state().delays).clock.now()
    problem, page, searched = None, Page([], None), 0
    query = query_of(request.args.__class__(), now, viewer_zone())
    try:
        query = query_of(request.args, now, viewer_zone())
        if "meta" in query.filters and viewer().role < Role.OPERATE:
            raise InvalidQueryError("your role does not show meta, so it cannot search by meta")
        page, searched = read_page(delays, query)
    except (InvalidInputError, SearchTimeoutError) as error:
        problem = str(error)
    return render_template(
        "tasks.html",
        page="tasks",
        query=query,
        found=page,
        searched=searched,
        problem=problem,
        statuses=[status.name for status in Status],
        now=now,
        actions=possible_actions(query.filters.get("status", ())),
        bulk_filters={name: value for name, value in query.typed.items() if name != "order"},
    )


@requires(Role.VIEW)
def task(id: str) -> str:
    delays = state().delays
    found = delays.get(check_id(id))
    explanation = runtime_of(delays).explanations.of(found)
    # The explanation reads the task again. The page shows the row that the reasons are about.
    found, reasons = explanation.task or found, explanation.reasons
    now = runtime_of(delays).clock.now()
    attempts = delays.attempts(found)
    schedules = (reason.facts["name"] for reason in reasons if reason.code == "recurring")
    # The trace is a part of the meta, which the role may not show.
    trace = trace_id_of(found.meta) if viewer().role >= Role.OPERATE else None
    return render_template(
        "task.html",
        page="tasks",
        task=found,
        attempts=attempts,
        events=timeline_of(found, attempts, now, next(schedules, None), trace),
        reasons=[(reason.sentence, _remedy(reason)) for reason in reasons],
        moves=set(moves_from(found.status)),
        now=now,
    )


def _remedy(reason: Reason) -> str:
    """Return the remedy of a reason, unless it is a command.

    The console does not know how its viewers call the command line, and has buttons and pages
    instead.
    """
    return "" if ": delaytasks " in reason.remedy else reason.remedy


# -- actions --------------------------------------------------------------------------------------


def _on_task(name: str, id: str, do: Any, **more: Any) -> Response:
    return act(name, {"id": id, **more}, lambda: do(state().delays, check_id(id)))


def _time_of_day() -> str:
    """Return the time for a notice, which stays on a page that follows the task."""
    now = runtime_of(state().delays).clock.now()
    return f"{now.astimezone(viewer_zone()):%H:%M:%S %Z}"


def _version() -> int | None:
    """Return the version that the viewer saw, so that a task that moved meanwhile is left alone."""
    return number_of(request.form.get("version", ""))


@requires(Role.OPERATE)
def cancel_task(id: str) -> Response:
    is_running = request.form.get("running") == "1"

    def do(delays: DelayTasks, number: int) -> str:
        result = delays.cancel(number, version=_version(), running=is_running, strict=True)
        done = "asked to stop" if result.is_requested else "cancelled"
        return f"The task was {done} at {_time_of_day()}."

    return _on_task("cancel_task", id, do)


@requires(Role.OPERATE)
def rerun_task(id: str) -> Response:
    def do(delays: DelayTasks, number: int) -> str:
        delays.rerun(number, version=_version())
        return f"The task was scheduled again at {_time_of_day()}."

    return _on_task("rerun_task", id, do)


@requires(Role.OPERATE)
def run_task_now(id: str) -> Response:
    def do(delays: DelayTasks, number: int) -> str:
        delays.reschedule(number, 0, version=_version())
        return f"The task was made due at {_time_of_day()}."

    return _on_task("run_task", id, do)


@requires(Role.OPERATE)
def reschedule_task(id: str) -> Response:
    text = request.form.get("when", "").strip()

    def do(delays: DelayTasks, number: int) -> str:
        try:
            moved = delays.reschedule(number, parse_duration(text), version=_version())
        except InvalidDelayError:
            at = instant_of(text, runtime_of(delays).clock.now(), viewer_zone())
            moved = delays.reschedule(number, at=at, version=_version())
        due = f"{moved.due.astimezone(viewer_zone()):%Y-%m-%d %H:%M:%S %Z}"
        return f"The task was rescheduled at {_time_of_day()}, to {due}."

    return _on_task("reschedule_task", id, do, to=text)
