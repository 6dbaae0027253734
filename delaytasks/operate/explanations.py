"""Explains tasks to people: why one has not run, what changes now, and a search by error."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from delaytasks.broker.link import broker_error
from delaytasks.db.store import Store
from delaytasks.model.errors import StoreUnavailableError
from delaytasks.model.filters import Filter, check_error
from delaytasks.model.moves import Status
from delaytasks.model.task import DelayedTask, Page, id_of
from delaytasks.model.why import Explanation, Reason, TransportFacts, why
from delaytasks.operate.single_tasks import TaskReference, find_id, name_of
from delaytasks.operate.state_queries import (
    LATELY_S,
    ChangeReader,
    FactReader,
    FoundChanges,
    SearchTimeoutError,
)

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime


class Explanations:
    """Gathers the facts about a task from its database, the broker and the timer."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._settings = runtime.settings

    def of(self, task: object, tag: str | None = None, key: str | None = None) -> Explanation:
        """Explain a task that is named by its id, by an earlier read, or by its tag and key.

        The task is read again. An unavailable database is itself the explanation.

        Raises
        ------
        TaskNotFoundError
            If there is no such task, or it was purged.
        """
        name = name_of(task, tag, key)
        try:
            store = self._runtime.store
            found = store.tasks.read(find_id(store, name, None))
            facts = FactReader(store, self._settings).of(found, self._transport(found))
        except StoreUnavailableError as error:
            return Explanation(_id_in(name), None, [_unreachable(error)])
        return Explanation(found.id, found, why(facts))

    def _transport(self, task: DelayedTask) -> TransportFacts:
        """Ask broker and timer, if the task waits for them now."""
        if not self._settings.uses_broker or not self._is_due_soon(task):
            return TransportFacts()
        queue = self._runtime.publisher.queue(task.queue)
        error = broker_error(self._runtime.celery, queue, self._settings.publish_limit_s)
        return TransportFacts(error, self._timer_error(task.queue))

    def _is_due_soon(self, task: DelayedTask) -> bool:
        if task.status is not Status.NOT_COMPLETE:
            return False
        horizon_s, clock = self._settings.horizon_s, self._runtime.clock
        wait_s = (task.expected_time - clock.now()).total_seconds()
        return horizon_s is None or wait_s <= horizon_s

    def _timer_error(self, queue: str) -> str | None:
        redis_timer = self._runtime.redis_timer
        if redis_timer is None or redis_timer.counts([queue]) is not None:
            return None
        return f"no answer within {self._settings.publish_limit_s:g} s"


def _id_in(name: TaskReference) -> int | None:
    return None if isinstance(name, tuple) else id_of(name)


def _unreachable(error: StoreUnavailableError) -> Reason:
    return Reason(
        "unreachable",
        f"The database cannot be read, so the task waits at least until it can: {error}.",
        "Bring the database back; workers continue by themselves.",
        {"error": str(error)},
    )


# -- Follows the changes of tasks, for `delaytasks list --follow` ---------------------------------


#: Versions that are remembered, to show each change once.
MOST_KNOWN = 20_000
#: Live tasks of which each read asks again, the last ones that changed.
MOST_SEEN = 500
#: A read looks back further than the last one, since transactions may be open for some time.
OVERLAP_S = 10.0


class Follower:
    """Reads the changes of the tasks that match a filter."""

    def __init__(self, store: Store, where: Filter) -> None:
        self._store = store
        self._where = where
        self._changes: ChangeReader | None = None
        self._read_at: datetime | None = None
        #: The last version of each task, the last change last.
        self._known: OrderedDict[int, int] = OrderedDict()
        self._live: OrderedDict[int, None] = OrderedDict()

    def read(self) -> FoundChanges:
        """Return the changes since the last read, the oldest first; at first, of the last minute.

        Raises
        ------
        StoreError
            If the database does not answer.
        """
        store = self._store
        if self._changes is None:
            self._changes = ChangeReader(store.database, store.schema, self._where)
        now = self._changes.now()
        back_s = LATELY_S if self._read_at is None else OVERLAP_S
        since = (self._read_at or now) - timedelta(seconds=back_s)
        found = self._changes.read(since, now, self._live)
        self._read_at = now
        new = [task for task in found.tasks if self._is_new(task)]
        return found._replace(tasks=sorted(new, key=changed_at))

    def _is_new(self, task: DelayedTask) -> bool:
        """Remember the version of a task. Return whether its change is to be shown."""
        if self._known.get(task.id) == task.version:
            return False
        self._known[task.id] = task.version
        self._known.move_to_end(task.id)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        self._live.pop(task.id, None)
        if not task.is_finished:
            self._live[task.id] = None
            if len(self._live) > MOST_SEEN:
                self._live.popitem(last=False)
        wanted = self._where.status
        return wanted is None or Status(task.status) in wanted


def changed_at(task: DelayedTask) -> datetime:
    return task.update_time or task.create_time or task.expected_time


# -- error search ---------------------------------------------------------------------------------

# Finds tasks by the text of their error. There is no index of errors, so that one call searches a
# bounded number of tasks, and the next page continues there.


#: Pages of 200 tasks that one call searches for an error text.
SEARCHED_PAGES, SEARCHED_SIZE = 5, 200


def find_by_error(
    find: Callable[..., Page],
    filters: Mapping[str, Any],
    text: str,
    cursor: str | None,
    newest_first: bool,
    enough: int,
) -> tuple[Page, int]:
    """Return a page of tasks whose error contains `text`, and how many tasks were searched.

    Parameters
    ----------
    find
        `DelayTasks.find`.
    filters
        Its filters. Without a status, FAILED tasks are searched.
    text
        A part of the error text, or a pattern in which `*` stands for any text.
    cursor, newest_first
        See `DelayTasks.find`.
    enough
        The number of tasks at which the search ends.
    """
    filters = {"status": [Status.FAILED], **filters}
    found: list[DelayedTask] = []
    searched, matches = 0, error_matcher(text)
    for _ in range(SEARCHED_PAGES):
        try:
            page = find(**filters, cursor=cursor, limit=SEARCHED_SIZE, newest_first=newest_first)
        except SearchTimeoutError:
            if not searched:
                raise
            break  # the next page continues at the cursor
        searched, cursor = searched + len(page), page.cursor
        found += (task for task in page if matches(task.error or ""))
        if cursor is None or len(found) >= enough:
            break
    return Page(found, cursor), searched


def error_filter(text: str) -> str:
    """Return the filter `error` of `find` for a text that a person typed: a part, or a pattern."""
    return check_error(text if "*" in text else f"*{text}*")


def error_matcher(text: str) -> Callable[[str], bool]:
    """Return a function that compares an error text with the pattern, as `find` does."""
    # Not a regular expression, which takes minutes for some patterns and stops all other threads.
    first, *middle, last = error_filter(text).lower().split("*")

    def matches(error: str) -> bool:
        error = error.lower()
        if not error.startswith(first):
            return False
        at = len(first)
        for part in middle:
            found = error.find(part, at)
            if found < 0:
                return False
            at = found + len(part)
        return len(error) - len(last) >= at and error.endswith(last)

    return matches
