"""The pages of tasks: searches, the list, one task, actions on many tasks, the audit table."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

from flask import abort, flash, redirect, render_template, request, url_for
from werkzeug.datastructures import MultiDict
from werkzeug.wrappers import Response

from delaytasks.console.requests import (
    action,
    given,
    now,
    number_of,
    page,
    record,
    record_as,
    runtime,
    state,
    viewer,
)
from delaytasks.console.shown import local_text, viewer_zone
from delaytasks.console.viewers import Role
from delaytasks.model.clock import MAX_ID, monotonic
from delaytasks.model.errors import DelayTaskError, InvalidInputError
from delaytasks.model.filters import Filters, check_ids
from delaytasks.model.inputs import check_id, parse_duration, parse_instant, parse_past
from delaytasks.model.moves import MOVES, Status, moves_from
from delaytasks.model.task import DelayedTask, Page
from delaytasks.model.text import one_line
from delaytasks.operate.bulk_calls import BulkResult
from delaytasks.operate.searches import SearchTimeoutError, error_filter, find_by_error
from delaytasks.operate.single_tasks import find_tasks
from delaytasks.operate.why import why
from delaytasks.runtime import Runtime

logger = logging.getLogger(__name__)

# -- searches -------------------------------------------------------------------------------------


#: Seconds after which a search ends.
SEARCH_S = 5.0
#: The least limit of a search that continues an earlier one.
LEAST_SEARCH_S = 0.1


class Searches:
    """Reads pages of tasks. All pages together end after `SEARCH_S` seconds."""

    def __init__(self) -> None:
        self._began = monotonic()

    def find(
        self, *, limit: int, cursor: str | None = None, newest_first: bool = False, **filters: Any
    ) -> Page:
        """Return a page like `DelayTasks.find`, or raise `SearchTimeoutError`."""
        left_s = max(SEARCH_S - (monotonic() - self._began), LEAST_SEARCH_S)
        where = cast("Filters", filters)
        return find_tasks(runtime(), where, cursor, limit, newest_first, None, left_s)


TASKS_PER_PAGE = 50
_TEXTS = ("tag", "key", "key_prefix", "queue", "meta", "error")
_INSTANTS = ("since", "until", "created_since", "created_until")


@dataclass(frozen=True)
class TaskQuery:
    """The filters of the page of tasks and of bulk actions.

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
    cursor: str | None = None

    @classmethod
    def read(cls, given: MultiDict[str, str]) -> TaskQuery:
        """Read the filters; raise an `InvalidInputError` if one is wrong."""
        # Browsers send the line ends of a pattern as CR LF.
        texts = {name: given.get(name, "").replace("\r\n", "\n") for name in (*_TEXTS, *_INSTANTS)}
        found: dict[str, Any] = {name: text.strip() for name, text in texts.items()}
        found |= {name: list(filter(None, given.getlist(name))) for name in ("status", "ids")}
        typed = {name: value for name, value in found.items() if value}
        filters = dict(typed)
        for name in typed.keys() & set(_INSTANTS):
            filters[name] = parse_past(typed[name], now(), name, viewer_zone())
        if "meta" in typed:
            filters["meta"] = _meta_of(typed["meta"])
        if "error" in typed:
            filters["error"] = error_filter(typed["error"])
        if "ids" in typed:
            check_ids(typed["ids"])
        if given.get("order") == "oldest":
            typed["order"] = "oldest"
        return cls(typed, filters, given.get("cursor") or None)

    def page(self) -> tuple[Page, int]:
        """Return a page of tasks, and how many tasks were searched for the error text."""
        find, where, newest_first = Searches().find, dict(self.filters), "order" not in self.typed
        if "error" in where:
            error = where.pop("error")
            return find_by_error(find, where, error, self.cursor, newest_first, TASKS_PER_PAGE)
        paging: dict[str, Any] = {
            "cursor": self.cursor,
            "newest_first": newest_first,
            "limit": TASKS_PER_PAGE,
        }
        return find(**paging, **where), 0


def _meta_of(text: str) -> dict[str, str]:
    pairs = {}
    for each in text.split(","):
        name, sign, value = each.partition("=")
        if not sign:
            raise InvalidInputError(f"{each!r:.40} is not a pair: write name=value", "meta")
        pairs[name.strip()] = value.strip()
    return pairs


# -- the list, and one task -----------------------------------------------------------------------


@page("/tasks")
def tasks() -> str | Response:
    if id := request.args.get("id", "").strip():
        return redirect(url_for("task", id=check_id(id)), 303)
    problem, found, searched, query = None, Page([], None), 0, TaskQuery({}, {})
    try:
        query = TaskQuery.read(request.args)
        if "meta" in query.filters and viewer().role < Role.OPERATE:
            raise InvalidInputError(
                "your role does not show meta, so it cannot search by meta", "meta"
            )
        found, searched = query.page()
    except (InvalidInputError, SearchTimeoutError) as error:
        problem = str(error)
    return render_template(
        "tasks.html",
        query=query,
        found=found,
        searched=searched,
        problem=problem,
        statuses=[status.name for status in Status],
        now=now(),
        actions=possible_actions(query.filters.get("status", ())),
        bulk_filters={name: value for name, value in query.typed.items() if name != "order"},
    )


@page("/tasks/<id>")
def task(id: str) -> str:
    delays = state().delays
    found = delays.get(check_id(id))
    reasons, at = why(runtime(), found), now()
    attempts = delays.get(found, attempts=True).attempts
    schedules = (reason.name for reason in reasons if reason.code == "recurring")
    return render_template(
        "task.html",
        task=found,
        attempts=attempts,
        schedule=next(schedules, None),
        # The console does not know how its viewers call the command line.
        reasons=[(r.sentence, "" if ": delaytasks " in r.remedy else r.remedy) for r in reasons],
        moves=set(moves_from(found.status)),
        now=at,
    )


# -- actions on one task --------------------------------------------------------------------------


def _time_of_day() -> str:
    """Return the time for a notice, which stays on a page that follows the task."""
    return f"{now().astimezone(viewer_zone()):%H:%M:%S %Z}"


def _version() -> int | None:
    """Return the version that the viewer saw, so that a task that moved meanwhile is left alone."""
    return number_of(request.form.get("version", ""))


@action("/tasks/<id>/cancel", Role.OPERATE)
def cancel_task(id: str) -> str:
    is_running = request.form.get("running") == "1"
    result = state().delays.cancel(check_id(id), version=_version(), running=is_running)
    if result.error is not None:
        raise result.error
    done = "asked to stop" if result.is_requested else "cancelled"
    return f"The task was {done} at {_time_of_day()}."


@action("/tasks/<id>/rerun", Role.OPERATE)
def rerun_task(id: str) -> str:
    state().delays.rerun(check_id(id), version=_version())
    return f"The task was scheduled again at {_time_of_day()}."


@action("/tasks/<id>/run", Role.OPERATE)
def run_task(id: str) -> str:
    state().delays.reschedule(check_id(id), 0, version=_version())
    return f"The task was made due at {_time_of_day()}."


@action("/tasks/<id>/reschedule", Role.OPERATE)
def reschedule_task(id: str) -> str:
    text, to = request.form.get("to", "").strip(), dict[str, Any]()
    try:
        to["delay"] = parse_duration(text)
    except InvalidInputError:
        to["at"] = parse_instant(text, zone=viewer_zone())
    moved = state().delays.reschedule(check_id(id), **to, version=_version())
    return f"The task was rescheduled at {_time_of_day()}, to {local_text(moved.due)}."


# -- actions on many tasks: count and confirm -----------------------------------------------------


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


def possible_actions(statuses: Collection[str] = ()) -> dict[str, str]:
    """Return the names and words of the actions that change tasks of one of these statuses.

    Without statuses, the tasks may have any.
    """
    chosen = set(statuses) or {status.name for status in Status}
    return {name: action.word for name, action in ACTIONS.items() if chosen & action.sources}


def _chosen(given: MultiDict[str, str]) -> tuple[str, dict[str, Any], list[str]]:
    """Return the action that a viewer has chosen, its filters as the methods of `bulk` take them,
    and the statuses in which tasks can move."""
    name = given.get("action", "")
    chosen = ACTIONS.get(name) or abort(404)
    filters = TaskQuery.read(given).filters
    if not filters:
        raise InvalidInputError(
            "select some tasks or choose a filter first, so that not all tasks are changed", "ids"
        )
    sources, is_explicit = chosen.sources, "status" in filters
    if name == "rerun":  # CANCELLED tasks only if the viewer has chosen them
        is_explicit |= "ids" in filters
        sources = sources if is_explicit else {"FAILED"}
    movable = sorted(sources & set(filters.get("status", sources)))
    if not movable:
        names = ", ".join(sorted(sources))
        raise InvalidInputError(f"{chosen.word} is for tasks that are {names}", "status")
    if is_explicit:
        filters["status"] = movable
    return name, filters, movable


def _counted(filters: dict[str, Any]) -> tuple[int, bool, list[DelayedTask]]:
    """Return the number of tasks, whether there may be more, and some of them."""
    count, cursor, examples = 0, None, list[DelayedTask]()
    searches = Searches()
    while count < MOST_MATCHES_COUNTED:
        try:
            found = searches.find(**filters, cursor=cursor, limit=COUNT_PAGE)
        except SearchTimeoutError:
            if not count:
                raise
            break
        count, cursor = count + len(found), found.cursor
        examples = examples or list(found)[:EXAMPLE_TASKS]
        if cursor is None:
            return count, False, examples
    return count, True, examples


@page("/bulk", Role.OPERATE)
def bulk() -> str:
    name, filters, movable = _chosen(request.args)
    count, has_more, examples = _counted({**filters, "status": movable})
    given = {name: list(filter(None, values)) for name, values in request.args.lists()}
    return render_template(
        "bulk.html",
        action=name,
        word=ACTIONS[name].word,
        count=count,
        has_more=has_more,
        examples=examples,
        kept={name: values for name, values in given.items() if values and name != "action"},
        selected=len(set(filters.get("ids", ()))),
        now=now(),
    )


# -- actions on many tasks: run and stop ----------------------------------------------------------


#: Seconds for which a viewer waits until the tasks are found, and the log entry is written.
BEGIN_S = 2.0


@page("/bulk", Role.OPERATE, "POST")
def start_bulk() -> Response:
    name, filters, _ = _chosen(request.form)
    bulk = state().delays.bulk
    delay = parse_duration(request.form.get("delay", "").strip() or "0")
    changes: dict[str, Callable[..., BulkResult]] = {
        "cancel": bulk.cancel,
        "reschedule": partial(bulk.reschedule, delay),
        "spread": partial(bulk.reschedule, jitter=delay),
        "rerun": partial(bulk.rerun, delay),
    }
    return _start(partial(changes[name], **filters))


@page("/audit/<id>/rerun", Role.OPERATE, "POST")
def rerun_entry(id: str) -> Response:
    """Run the tasks again that an operation has cancelled."""
    return _start(partial(state().delays.bulk.rerun, entry=check_id(id)))


def _start(change: Callable[..., BulkResult]) -> Response:
    """Start a bulk operation in a thread, and lead to its log entry."""
    shared, actor, stop, begun = state(), viewer().name, threading.Event(), Future[int]()

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
            shared.forget()

    record_failure = partial(_record_failure, actor, runtime(), request.endpoint or "", given())
    _start_thread(shared.threads, work)
    try:
        return redirect(url_for("entry", id=begun.result(BEGIN_S)), 303)
    except FutureTimeoutError:
        begun.add_done_callback(record_failure)
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


def _record_failure(
    actor: str, of: Runtime, action: str, what: dict[str, Any], begun: Future[int]
) -> None:
    """Write a log entry if an operation failed before it had one: nobody waits for its error."""
    error = begun.exception()
    if error is not None:
        record_as(actor, of, action, {**what, "error": one_line(str(error))}, is_refused=True)


@page("/audit/<id>")
def entry(id: str) -> str:
    """The page of a log entry, which follows a bulk operation wherever it runs."""
    found = runtime().store.bulk.audit.get(check_id(id)) or abort(404)
    word = ACTIONS[found.action].word if found.action in ACTIONS else found.action
    is_ours = found.id in state().stops  # until its end is seen in all numbers
    return render_template("bulk.html", entry=found, word=word, is_ours=is_ours, now=now())


@page("/audit/<id>/stop", Role.OPERATE, "POST")
def stop_bulk(id: str) -> Response:
    stop = state().stops.get(check_id(id))
    if stop is None:
        flash("It has ended, or another process of the console does it.", "bad")
    else:
        stop.set()
    record("stop_bulk", {"entry": id}, is_refused=stop is None)
    return redirect(url_for("entry", id=id), 303)


# -- audit ----------------------------------------------------------------------------------------


AUDIT_ENTRIES = 200


@page("/audit")
def audit() -> str:
    log, before = state().delays.bulk.log, number_of(request.args.get("before", ""))
    before = None if before is None else min(max(before, 1), MAX_ID)
    entries = state().cache.get(
        ("audit", before), 2.0, lambda: log(limit=AUDIT_ENTRIES + 1, before=before)
    )
    shown = entries[:AUDIT_ENTRIES]
    following = shown[-1].id if len(entries) > AUDIT_ENTRIES else None
    return render_template("lists.html", page="audit", rows=shown, following=following, now=now())
