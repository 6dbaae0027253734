"""The pages of tasks: the list, one task, actions on many tasks, and the audit table."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from flask import Flask, abort, redirect, render_template, request, url_for
from werkzeug.wrappers import Response

from delaytasks.client import DelayTasks
from delaytasks.console.queries import Searches, TaskQuery, number_of, query_of, read_page
from delaytasks.console.requests import (
    BulkRunState,
    ReportProgress,
    act,
    new_run_id,
    record,
    requires,
    state,
    viewer,
)
from delaytasks.console.shown import timeline_of, viewer_zone
from delaytasks.console.viewers import Role
from delaytasks.model.errors import DelayTaskError, InvalidInputError
from delaytasks.model.inputs import check_id, parse_duration, parse_instant
from delaytasks.model.moves import MOVES, Status, moves_from
from delaytasks.model.task import DelayedTask, Page
from delaytasks.operate.bulk_calls import BulkResult
from delaytasks.operate.explanations import Explanations
from delaytasks.operate.searches import SearchTimeoutError, error_filter, error_matcher
from delaytasks.operate.why import Reason
from delaytasks.runtime import runtime_of


def install(app: Flask) -> None:
    app.add_url_rule("/bulk", view_func=bulk)
    app.add_url_rule("/bulk", view_func=start_bulk, methods=["POST"])
    app.add_url_rule("/bulk/<id>", view_func=bulk_run)
    app.add_url_rule("/bulk/<id>/stop", view_func=stop_bulk, methods=["POST"])
    app.add_url_rule("/audit", view_func=audit)
    app.add_url_rule("/audit/<id>/rerun", view_func=rerun_entry, methods=["POST"])
    app.add_url_rule("/tasks", view_func=tasks)
    app.add_url_rule("/tasks/<id>", view_func=task)
    for view in (cancel_task, rerun_task, reschedule_task, run_task_now):
        name = view.__name__.removesuffix("_task").removesuffix("_task_now")
        app.add_url_rule(f"/tasks/<id>/{name}", view_func=view, methods=["POST"])


class BulkAction(NamedTuple):
    """An action on many tasks, and the move of each of them."""

    word: str
    move: str

    @property
    def sources(self) -> set[str]:
        """The statuses of the tasks that it changes."""
        return {status.name for status in MOVES[self.move].sources}


ACTIONS = {
    "rerun": BulkAction("Run again", "rerun"),
    "cancel": BulkAction("Cancel", "cancel"),
    "reschedule": BulkAction("Reschedule", "reschedule"),
    "spread": BulkAction("Spread", "reschedule"),
}
#: Tasks that are counted before a viewer confirms, in pages of this size: they contain the bodies.
MOST_MATCHES_COUNTED, COUNT_PAGE = 5_000, 100
#: Tasks that are shown as examples.
EXAMPLE_TASKS = 10
AUDIT_ENTRIES = 200


# -- count and confirm ----------------------------------------------------------------------------


def _query(given: Any) -> TaskQuery:
    """Return the filters of a bulk action; raise `InvalidInputError` if there are none."""
    query = query_of(given, runtime_of(state().delays).clock.now(), viewer_zone())
    if not query.has_filters:
        raise InvalidInputError(
            "select some tasks or choose a filter first, so that not all tasks are changed", "ids"
        )
    return query


def possible_actions(statuses: Collection[str] = ()) -> dict[str, str]:
    """Return the names and words of the actions that change tasks of one of these statuses.

    Without statuses, the tasks may have any.
    """
    chosen = set(statuses) or {status.name for status in Status}
    return {name: action.word for name, action in ACTIONS.items() if chosen & action.sources}


def _statuses(action: str, query: TaskQuery) -> list[str]:
    """Return the chosen statuses in which tasks can move; raise `InvalidInputError` if none can.

    A rerun takes CANCELLED tasks only if the viewer has chosen this status or selected the tasks.
    """
    sources = ACTIONS[action].sources
    if action == "rerun" and not query.filters.keys() & {"status", "ids"}:
        sources = {"FAILED"}
    wanted = sources & set(query.filters.get("status", sources))
    if not wanted:
        names = ", ".join(sorted(sources))
        raise InvalidInputError(f"{ACTIONS[action].word} is for tasks that are {names}", "status")
    return sorted(wanted)


def _filters(action: str, query: TaskQuery) -> dict[str, Any]:
    """Return the filters as the methods of `bulk` take them."""
    filters = dict(query.filters)
    if query.error:
        filters["error"] = error_filter(query.error)
    if "status" in filters or (action == "rerun" and "ids" in filters):
        filters["status"] = _statuses(action, query)
    return filters


def _counted(action: str, query: TaskQuery) -> tuple[int, bool, list[DelayedTask]]:
    """Return the number of tasks that can move, whether there may be more, and some of them.

    A bounded number of tasks is read, also if only few of them have the error text.
    """
    matches = error_matcher(query.error) if query.error else (lambda error: True)
    count, read, cursor, examples = 0, 0, None, list[DelayedTask]()
    searched = {**query.filters, "status": _statuses(action, query)}
    searches = Searches(state().delays)
    while read < MOST_MATCHES_COUNTED:
        try:
            page = searches.find(**searched, cursor=cursor, limit=COUNT_PAGE)
        except SearchTimeoutError:
            if not read:
                raise
            break
        found = [task for task in page if matches(task.error or "")]
        count, read, cursor = count + len(found), read + len(page), page.cursor
        examples = (examples + found)[:EXAMPLE_TASKS]
        if cursor is None:
            return count, False, examples
    return count, True, examples


@requires(Role.OPERATE)
def bulk() -> str:
    action = request.args.get("action", "")
    if action not in ACTIONS:
        abort(404)
    query = _query(request.args)
    count, has_more, examples = _counted(action, query)
    given = {name: list(filter(None, values)) for name, values in request.args.lists()}
    kept = {name: values for name, values in given.items() if values and name != "action"}
    return render_template(
        "bulk.html",
        page="tasks",
        action=action,
        word=ACTIONS[action].word,
        count=count,
        has_more=has_more,
        examples=examples,
        kept=kept,
        selected=len(set(query.filters.get("ids", ()))),
        now=runtime_of(state().delays).clock.now(),
    )


# -- run ------------------------------------------------------------------------------------------


@requires(Role.OPERATE)
def start_bulk() -> Response:
    action = request.form.get("action", "")
    if action not in ACTIONS:
        abort(404)
    filters = _filters(action, _query(request.form))
    delays, actor = state().delays, viewer().name
    delay = parse_duration(request.form.get("delay", "").strip() or "0")

    def work(report: ReportProgress) -> BulkResult:
        options: dict[str, Any] = {**filters, "actor": actor, "on_progress": report}
        if action == "cancel":
            return delays.bulk.cancel(**options)
        if action == "reschedule":
            return delays.bulk.reschedule(delay, **options)
        if action == "spread":
            return delays.bulk.reschedule(jitter=delay, **options)
        return delays.bulk.rerun(delay, **options)

    expected = number_of(request.form.get("expected") or "0")
    if expected is None:
        raise InvalidInputError("the number of expected tasks is not a number", "expected")
    return _start(action, filters, expected, work)


def _start(
    action: str,
    filters: dict[str, Any],
    expected: int,
    work: Callable[[ReportProgress], BulkResult],
) -> Response:
    run = BulkRunState(new_run_id(), action, viewer().name, filters, expected)
    if not state().runs.start(run, work):
        raise DelayTaskError("several bulk actions are running: wait until one has ended")
    state().cache.forget()
    return redirect(url_for("bulk_run", id=run.id), 303)


def _run_of(id: str) -> BulkRunState:
    run = state().runs.get(id)
    if run is None:
        abort(404, "This process does not know the run. The audit table has its result.")
    return run


@requires(Role.OPERATE)
def bulk_run(id: str) -> str:
    run = _run_of(id)
    word = ACTIONS[run.action].word if run.action in ACTIONS else run.action
    return render_template("bulk_run.html", page="tasks", run=run, word=word)


@requires(Role.OPERATE)
def stop_bulk(id: str) -> Response:
    run = _run_of(id)
    has_ended = run.state != "running"
    run.stop.set()
    entries = () if run.result is None else run.result.runs
    what = {"action": run.action, "started by": run.actor, "entry": ", ".join(map(str, entries))}
    record("stop_bulk", what, is_refused=has_ended)
    return redirect(url_for("bulk_run", id=id), 303)


# -- audit ----------------------------------------------------------------------------------------


@requires(Role.VIEW)
def audit() -> str:
    delays, before = state().delays, number_of(request.args.get("before", ""))
    entries = state().cache.get(
        ("audit", before), 2.0, lambda: delays.bulk.log(limit=AUDIT_ENTRIES + 1, before=before)
    )
    shown = entries[:AUDIT_ENTRIES]
    return render_template(
        "audit.html",
        page="audit",
        entries=shown,
        more=shown[-1].id if len(entries) > AUDIT_ENTRIES else None,
        now=runtime_of(delays).clock.now(),
    )


@requires(Role.OPERATE)
def rerun_entry(id: str) -> Response:
    """Run the tasks again that an operation has cancelled."""
    if number_of(id) is None:
        abort(404)
    delays, actor = state().delays, viewer().name

    def work(report: ReportProgress) -> BulkResult:
        return delays.bulk.rerun(entry=id, actor=actor, on_progress=report)

    return _start("rerun", {"entry": id}, 0, work)


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
            raise InvalidInputError(
                "your role does not show meta, so it cannot search by meta", "meta"
            )
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
    explanation = Explanations(runtime_of(delays)).of(found)
    # The explanation reads the task again. The page shows the row that the reasons are about.
    found, reasons = explanation.task or found, explanation.reasons
    now = runtime_of(delays).clock.now()
    attempts = delays.get(found, attempts=True).attempts
    schedules = (reason.facts["name"] for reason in reasons if reason.code == "recurring")
    # The trace is a part of the meta, which the role may not show.
    trace = _trace_id_of(found.meta) if viewer().role >= Role.OPERATE else None
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


#: The pairs of meta with the trace: the W3C Trace Context, and that of Sentry.
_TRACE_PAIRS = {
    "traceparent": re.compile("[0-9a-f]{2}-([0-9a-f]{32})-.*"),
    "sentry-trace": re.compile("([0-9a-f]{32})-.*"),
}


def _trace_id_of(meta: Mapping[str, str]) -> str | None:
    """Return the id of the trace of the call that scheduled a task, or None without a trace."""
    for name, pattern in _TRACE_PAIRS.items():
        found = pattern.fullmatch(meta.get(name, ""))
        if found is not None:
            return found[1]
    return None


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
        result = delays.cancel(number, version=_version(), running=is_running)
        if result.error is not None:
            raise result.error
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
        to: dict[str, Any]
        try:
            to = {"delay": parse_duration(text)}
        except InvalidInputError:
            to = {"at": parse_instant(text, zone=viewer_zone())}
        moved = delays.reschedule(number, **to, version=_version())
        due = f"{moved.due.astimezone(viewer_zone()):%Y-%m-%d %H:%M:%S %Z}"
        return f"The task was rescheduled at {_time_of_day()}, to {due}."

    return _on_task("reschedule_task", id, do, to=text)
