"""The forms of operations, and the function that performs what a form asks for.

`OFFERS` has the operations that the console offers. The fields of a form are the parameters of its
operation, as the table in `operate/operations.py` has them. One function, `perform`, answers all
forms: it changes one task, a policy or a schedule and leads back to the page, or it starts an
operation on many tasks in a thread and leads to its log entry.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from flask import flash, redirect, request, url_for
from werkzeug.datastructures import MultiDict
from werkzeug.wrappers import Response

from delaytasks.console.requests import Role, back, given, now, record, route, state, viewer
from delaytasks.console.shown import local_text, viewer_zone
from delaytasks.model.errors import DelayTaskError, InvalidInputError, TaskNotFoundError
from delaytasks.model.filters import check_ids
from delaytasks.model.inputs import check_id
from delaytasks.model.moves import MOVES, Status
from delaytasks.model.policies import Policy
from delaytasks.model.task import CancelResult, DelayedTask
from delaytasks.operate.operations import ACTOR, FILTERS, INSTANT, OPERATIONS, Operation, Parameter
from delaytasks.operate.task_calls import BulkResult, error_filter
from delaytasks.operate.texts import parse_past

logger = logging.getLogger(__name__)


class Offer(NamedTuple):
    """How the console offers an operation."""

    role: Role
    #: The text of its button, and the class of its style.
    word: str
    style: str = ""
    #: The question before it. The name of the changed object replaces the braces.
    question: str = ""


OFFERS = {
    "rerun": Offer(Role.OPERATE, "Run again", "primary"),
    "cancel": Offer(
        Role.OPERATE, "Cancel", "danger", "Cancel {}? It will not run. You can run it again later."
    ),
    "reschedule": Offer(Role.OPERATE, "Reschedule"),
    "pause": Offer(
        Role.OPERATE, "Pause", question="Pause {}? Its tasks are held until you resume it."
    ),
    "resume": Offer(Role.OPERATE, "Resume"),
    "limit": Offer(Role.ADMIN, "Set these limits"),
    "recurring run": Offer(Role.OPERATE, "Run now"),
    "recurring set": Offer(Role.ADMIN, "Store"),
    "recurring remove": Offer(
        Role.ADMIN, "Remove", question="Remove {}? Its waiting tasks are cancelled."
    ),
}


# -- values ---------------------------------------------------------------------------------------


def texts_of(form: MultiDict[str, str], name: str) -> list[str]:
    """Return what was typed into the fields of a name, without empty ones."""
    # Browsers send the line ends of a text as CR LF.
    texts = (text.replace("\r\n", "\n").strip() for text in form.getlist(name))
    return [text for text in texts if text]


def values_of(parameters: Iterable[Parameter], form: MultiDict[str, str]) -> dict[str, Any]:
    """Return the typed values by the names of the parameters, without those left empty."""
    values, zone = dict[str, Any](), viewer_zone()
    for each in parameters:
        text = "\n".join(texts_of(form, each.name))
        if text and each.kind is INSTANT and each in FILTERS:
            values[each.name] = parse_past(text, now(), each.name, zone)
        elif text:
            values[each.name] = each.parse(text, zone)
        elif each.is_required:
            raise InvalidInputError(f"the {each.name} is missing", each.name)
    return values


@dataclass(frozen=True)
class TaskQuery:
    """The filters of the page of tasks and of operations on many tasks.

    Attributes
    ----------
    typed
        The values as they were typed, for the form and the addresses of other pages. The error is
        a part of the error text, or a pattern in which `*` stands for any text.
    filters
        The same as the filters of `find`.
    """

    typed: dict[str, Any]
    filters: dict[str, Any]

    @classmethod
    def read(cls, form: MultiDict[str, str]) -> TaskQuery:
        """Read the filters; raise an `InvalidInputError` if one is wrong."""
        filters = values_of(FILTERS, form)
        typed = {each.name: texts_of(form, each.name) for each in FILTERS if each.name in filters}
        if "error" in filters:
            filters["error"] = error_filter(filters["error"])
        if "ids" in filters:
            check_ids(filters["ids"])
        return cls(typed, filters)


# -- one task, a policy, a schedule ---------------------------------------------------------------


def perform(operation: Operation) -> Response:
    """Do what a form asks for, and write its log entry."""
    if operation.bulk is not None and "id" not in request.form:
        return _perform_on_many(operation)
    try:
        sentence, is_refused = _perform_on_one(operation), False
    except (DelayTaskError, TypeError, ValueError) as problem:
        sentence, is_refused = str(problem), True
    record(operation.name, given(), is_refused=is_refused)
    flash(sentence, "bad" if is_refused else "good")
    state().cache.forget()
    return back()


def _perform_on_one(operation: Operation) -> str:
    """Return a sentence for the viewer."""
    values = values_of(operation.parameters, request.form)
    if operation.name == "recurring set":
        _check_new_schedule(values["name"])
    if operation.name == "limit" and not values.keys() - {"tag", "queue"}:
        raise InvalidInputError("no limit was named, so nothing was changed", "concurrency")
    if "id" in request.form:
        values["task"] = check_id(request.form["id"])
    if ACTOR in operation.parameters:
        values["actor"] = viewer().name
    result, done, more = operation.call(state().delays, **values), operation.done or "changed", ""
    match result:
        case CancelResult(error=error) if error is not None:
            raise error
        case CancelResult():
            what, done = "task", "asked to stop" if result.is_requested else done
        case DelayedTask():
            what, more = "task", f", and is due at {local_text(result.due)}"
        case Policy():
            what = f"{result.kind} {result.name}"
        case _:
            what = f"schedule {result.name}"
    # The notice stays on a page that follows the task.
    return f"The {what} was {done} at {now().astimezone(viewer_zone()):%H:%M:%S %Z}{more}."


def _check_new_schedule(name: str) -> None:
    """Refuse to replace a schedule: the form does not show what is stored."""
    try:
        state().delays.recurring.get(name)
    except TaskNotFoundError:
        return
    problem = f"there is a schedule {name} already: remove it, or use delaytasks recurring set"
    raise InvalidInputError(problem, "name")


# -- many tasks -----------------------------------------------------------------------------------


#: Seconds for which a viewer waits until the tasks are found, and the log entry is written.
BEGIN_S = 2.0


def sources_of(name: str) -> set[str]:
    """Return the statuses of the tasks that an operation on many changes."""
    return {status.name for status in MOVES[name].sources}


def possible_operations(statuses: Collection[str] = ()) -> dict[str, str]:
    """Return the operations on many tasks that change tasks of one of these statuses, with their
    words. Without statuses, the tasks may have any."""
    chosen = set(statuses) or {status.name for status in Status}
    many = (name for name in OFFERS if OPERATIONS[name].bulk and chosen & sources_of(name))
    return {name: OFFERS[name].word for name in many}


def chosen_tasks(name: str, form: MultiDict[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the filters of an operation as the methods of `bulk` take them, and the statuses in
    which tasks can move."""
    filters = TaskQuery.read(form).filters
    if not filters:
        raise InvalidInputError(
            "select some tasks or choose a filter first, so that not all tasks are changed", "ids"
        )
    sources, is_explicit = sources_of(name), "status" in filters
    if name == "rerun":  # CANCELLED tasks only if the viewer has chosen them
        is_explicit |= "ids" in filters
        sources = sources if is_explicit else {"FAILED"}
    movable = sorted(sources & set(filters.get("status", sources)))
    if not movable:
        names = ", ".join(sorted(sources))
        raise InvalidInputError(f"{OFFERS[name].word} is for tasks that are {names}", "status")
    if is_explicit:
        filters["status"] = movable
    return filters, movable


def _perform_on_many(operation: Operation) -> Response:
    """Start a bulk operation in a thread, and lead to its log entry."""
    values = values_of((*operation.fields, *operation.only_bulk), request.form)
    if "entry" not in values:
        values |= chosen_tasks(operation.name, request.form)[0]
    shared, actor, stop, begun = state(), viewer().name, threading.Event(), Future[int]()
    assert operation.bulk is not None
    change: Callable[..., BulkResult] = partial(operation.bulk, shared.delays, **values)

    def report(result: BulkResult) -> None:
        if not begun.done():
            shared.stops[result.runs[0]] = stop
            begun.set_result(result.runs[0])
        if stop.is_set():
            raise KeyboardInterrupt  # the log entry is "stopped", as after Ctrl-C

    def work() -> None:
        try:
            report(change(actor=actor, on_progress=report))
        except KeyboardInterrupt:
            logger.info("console: a bulk operation of %s was stopped", actor)
        except Exception as error:
            logger.exception("console: a bulk operation of %s failed", actor)
            if not begun.done():
                begun.set_exception(error)
        finally:
            shared.threads.release()
            shared.cache.forget()

    _start_thread(shared.threads, work)
    try:
        return redirect(url_for("entry", id=begun.result(BEGIN_S)), 303)
    except FutureTimeoutError:
        flash("The tasks are being found. Their entry appears here when some are changed.", "good")
        return redirect(url_for("audit"), 303)


def _start_thread(places: threading.Semaphore, work: Callable[[], None]) -> None:
    """Start a thread, whose work gives its place back."""
    if not places.acquire(blocking=False):
        raise DelayTaskError("several bulk actions are running: wait until one has ended")
    try:
        threading.Thread(target=work, name="console bulk", daemon=True).start()
    except BaseException:  # the process can have no more threads
        places.release()
        raise


for _name, _offer in OFFERS.items():
    _add = route(f"/do/{_name.replace(' ', '-')}", role=_offer.role, action=_name)
    _add(partial(perform, OPERATIONS[_name]))


@route("/audit/<entry>/stop", role=Role.OPERATE, action="stop_bulk")
def stop_bulk(entry: str) -> Response:
    """Stop an operation on many tasks that this process does."""
    stop = state().stops.get(check_id(entry))
    if stop is None:
        flash("It has ended, or another process of the console does it.", "bad")
    else:
        stop.set()
    record("stop_bulk", {"entry": entry}, is_refused=stop is None)
    return redirect(url_for("entry", id=entry), 303)
