"""The pages of tasks: the list, one task, the question and the progress of many, the audit."""

from __future__ import annotations

from typing import Any, cast

from flask import abort, redirect, request, url_for
from werkzeug.wrappers import Response

from delaytasks.console.forms import OFFERS, TaskQuery, chosen_tasks, possible_operations
from delaytasks.console.requests import number_of, runtime, state, viewer
from delaytasks.console.viewers import Role
from delaytasks.model.clock import MAX_ID, monotonic
from delaytasks.model.errors import InvalidInputError
from delaytasks.model.filters import Filters
from delaytasks.model.inputs import check_id
from delaytasks.model.moves import Status, moves_from
from delaytasks.model.task import DelayedTask, Page
from delaytasks.operate.searches import SearchTimeoutError
from delaytasks.operate.task_calls import find_tasks
from delaytasks.operate.why import why

# -- the list, and one task -----------------------------------------------------------------------


#: Seconds after which a search ends, and the least limit of a search that continues an earlier one.
SEARCH_S, LEAST_SEARCH_S = 5.0, 0.1
TASKS_PER_PAGE = 50


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


def tasks() -> dict[str, Any] | Response:
    if id := request.args.get("id", "").strip():
        return redirect(url_for("task", id=check_id(id)), 303)
    problem, found, query = None, Page([], None), TaskQuery({}, {})
    cursor, is_oldest_first = request.args.get("cursor"), request.args.get("order") == "oldest"
    try:
        query = TaskQuery.read(request.args)
        if "meta" in query.filters and viewer().role < Role.OPERATE:
            raise InvalidInputError(
                "your role does not show meta, so it cannot search by meta", "meta"
            )
        where, is_newest_first = dict(query.filters), not is_oldest_first
        if "error" in where:  # it has no index, but FAILED tasks are few
            where.setdefault("status", Status.FAILED)
        found = Searches().find(
            **where, cursor=cursor or None, newest_first=is_newest_first, limit=TASKS_PER_PAGE
        )
    except (InvalidInputError, SearchTimeoutError) as error:
        problem = str(error)
    return {
        "query": query,
        "order": {"order": "oldest"} if is_oldest_first else {},
        "cursor": cursor,
        "found": found,
        "problem": problem,
        "statuses": [status.name for status in Status],
        "actions": possible_operations(query.filters.get("status", ())),
    }


def task(id: str) -> dict[str, Any]:
    delays = state().delays
    found = delays.get(check_id(id))
    reasons = why(runtime(), found)
    schedules = (reason.name for reason in reasons if reason.code == "recurring")
    return {
        "task": found,
        "attempts": delays.get(found, attempts=True).attempts,
        "schedule": next(schedules, None),
        # The console does not know how its viewers call the command line.
        "reasons": [(r.sentence, "" if ": delaytasks " in r.remedy else r.remedy) for r in reasons],
        "moves": set(moves_from(found.status)),
    }


# -- many tasks, and the audit table --------------------------------------------------------------


#: Tasks that are counted before a viewer confirms, in pages of this size: they contain the bodies.
MOST_MATCHES_COUNTED, COUNT_PAGE = 5_000, 100
#: Tasks that are shown as examples, and entries on a page of the audit table.
EXAMPLE_TASKS, AUDIT_ENTRIES = 10, 200


def bulk() -> dict[str, Any]:
    """Count the tasks that an operation would change, before the viewer confirms it."""
    name = request.args.get("action", "")
    if name not in possible_operations():
        abort(404)
    filters, movable = chosen_tasks(name, request.args)
    count, has_more, examples = _counted({**filters, "status": movable})
    return {
        "action": name,
        "word": OFFERS[name].word,
        "count": count,
        "has_more": has_more,
        "examples": examples,
        "kept": TaskQuery.read(request.args).typed,
        "selected": len(set(filters.get("ids", ()))),
        "values": request.args,
    }


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


def entry(id: str) -> dict[str, Any]:
    """The page of a log entry, which follows a bulk operation wherever it runs."""
    found = runtime().store.bulk.audit.get(check_id(id)) or abort(404)
    word = OFFERS[found.action].word if found.action in OFFERS else found.action
    is_ours = found.id in state().stops  # until its end is seen in all numbers
    return {"entry": found, "word": word, "is_ours": is_ours}


def audit() -> dict[str, Any]:
    log, before = state().delays.bulk.log, number_of(request.args.get("before", ""))
    before = None if before is None else min(max(before, 1), MAX_ID)
    entries = state().cache.get(
        ("audit", before), 2.0, lambda: log(limit=AUDIT_ENTRIES + 1, before=before)
    )
    shown = entries[:AUDIT_ENTRIES]
    return {"rows": shown, "following": shown[-1].id if len(entries) > AUDIT_ENTRIES else None}
