"""What the pages read from the database: counts, searches with a time limit, and the filters of
the page of tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from typing import Any, NamedTuple, cast

from sqlalchemy import Connection, func, literal, select
from werkzeug.datastructures import MultiDict

from delaytasks.client import DelayTasks
from delaytasks.db.searching import distinct_values, first_page, has_status
from delaytasks.db.store import Store
from delaytasks.model.clock import monotonic
from delaytasks.model.errors import InvalidInputError, StoreError
from delaytasks.model.filters import Filter, Filters, check_ids
from delaytasks.model.inputs import ALL_QUEUES, parse_past
from delaytasks.model.moves import Status
from delaytasks.model.task import Page
from delaytasks.model.workers import RegisteredWorker
from delaytasks.operate.searches import error_filter, find_by_error
from delaytasks.operate.single_tasks import find_tasks
from delaytasks.operate.state_queries import OverdueRows
from delaytasks.runtime import runtime_of

#: Due tasks that one call reads at most.
MOST_DUE = 5_000
#: Queues whose waiting tasks are counted, and the most that are counted in each.
MOST_QUEUES, MOST_COUNTED = 100, 10_000


class QueueCounts(NamedTuple):
    """The tasks of a queue, counted up to `MOST_COUNTED` each."""

    name: str
    waiting: int
    overdue: int
    running: int
    held: int
    #: The due time of the oldest of the overdue tasks that were counted.
    oldest: datetime | None


class ConsoleQueries:
    """Reads what the pages show."""

    def __init__(self, store: Store) -> None:
        self._db = store.database
        self._t = store.schema.tasks
        self._overdue = OverdueRows(store.database, store.schema)

    def due_between(self, since: datetime, until: datetime) -> list[datetime]:
        """Return the due times of waiting tasks in a range, at most the first `MOST_DUE`."""
        t = self._t.c
        query = select(t.expected_time, t.id).where(
            t.expected_time >= since, t.expected_time < until
        )
        waiting = Filter(status=frozenset({Status.NOT_COMPLETE}))
        rows = self._db.autocommitted(lambda c: first_page(c, query, self._t, waiting, MOST_DUE))
        return [row[0] for row in rows]

    def queues(self, named: Sequence[str], late_s: float) -> list[QueueCounts]:
        """Count the live tasks of the queues in `named` and of those that have live tasks.

        Tasks that are late by more than `late_s` are overdue.
        """
        return self._db.autocommitted(lambda c: self._queues(c, named, late_s))

    def _queues(self, on: Connection, named: Sequence[str], late_s: float) -> list[QueueCounts]:
        t, names = self._t, set(named)
        for status in (Status.NOT_COMPLETE, Status.RUNNING, Status.HELD):
            for queue in distinct_values(on, t.c.queue, has_status(t, status)):
                if len(names) >= MOST_QUEUES:
                    break
                names.add(queue)

        def count(queue: str, status: Status) -> int:
            rows = select(literal(1)).where(has_status(t, status), t.c.queue == queue)
            some = rows.limit(MOST_COUNTED).subquery()
            return int(on.execute(select(func.count()).select_from(some)).scalar_one())

        overdue = self._overdue.count_of_queues(on, sorted(names), late_s, MOST_COUNTED)
        return [
            QueueCounts(
                queue,
                count(queue, Status.NOT_COMPLETE),
                overdue[queue].tasks,
                count(queue, Status.RUNNING),
                count(queue, Status.HELD),
                overdue[queue].oldest,
            )
            for queue in sorted(names)
        ]


#: The bars of the histogram of due times, and the time of each.
BARS, BAR = 30, timedelta(minutes=1)


@dataclass(frozen=True)
class DueSoon:
    """Waiting tasks that are due in each of the next minutes."""

    counts: Sequence[int]
    #: Whether more tasks are due than were counted.
    is_cut: bool


def count_due(delays: DelayTasks, now: datetime) -> DueSoon:
    """Count what is due soon; nothing if the database does not answer."""
    counts = [0] * BARS
    try:
        due = ConsoleQueries(runtime_of(delays).store).due_between(now, now + BARS * BAR)
    except StoreError:
        return DueSoon(counts, False)  # the state of the deployment has the error
    for at in due:
        counts[min((at - now) // BAR, BARS - 1)] += 1
    return DueSoon(counts, len(due) >= MOST_DUE)


def count_queues(delays: DelayTasks, workers: Sequence[RegisteredWorker]) -> list[QueueCounts]:
    """Return the queues that have live tasks, workers or a pause."""
    served = {queue for worker in workers for queue in worker.queues if queue != ALL_QUEUES}
    found = ConsoleQueries(runtime_of(delays).store).queues(
        sorted({delays.settings.default_queue, *served}), delays.settings.grace_s
    )
    return sorted(found, key=lambda each: each.name)


#: Seconds after which a search ends.
SEARCH_S = 5.0
#: The least limit of a search that continues an earlier one.
LEAST_SEARCH_S = 0.1


class Searches:
    """Reads pages of tasks. All pages together end after `SEARCH_S` seconds."""

    def __init__(self, delays: DelayTasks) -> None:
        self._runtime = runtime_of(delays)
        self._began = monotonic()

    def find(
        self, *, limit: int, cursor: str | None = None, newest_first: bool = False, **filters: Any
    ) -> Page:
        """Return a page like `DelayTasks.find`, or raise `SearchTimeoutError`."""
        left_s = max(SEARCH_S - (monotonic() - self._began), LEAST_SEARCH_S)
        return find_tasks(
            self._runtime, cast("Filters", filters), cursor, limit, newest_first, None, left_s
        )


TASKS_PER_PAGE = 50
_TEXTS = ("tag", "key", "key_prefix", "queue")
_INSTANT_FILTERS = ("since", "until", "created_since", "created_until")
#: Raise the error of a wrong pattern, or of a wrong id.
_TYPED_CHECKS: dict[str, Callable[[Any], object]] = {"error": error_filter, "ids": check_ids}


@dataclass(frozen=True)
class TaskQuery:
    """The filters of `find`, and what the console adds to them."""

    filters: dict[str, Any]
    #: A part of the error text, or a pattern in which `*` stands for any text.
    error: str
    cursor: str | None
    is_oldest_first: bool
    #: The values as they were typed, for the form and the addresses of other pages.
    typed: dict[str, Any]

    @property
    def has_filters(self) -> bool:
        return bool(self.filters or self.error)


def query_of(given: MultiDict[str, str], now: datetime, zone: tzinfo) -> TaskQuery:
    """Read the filters; raise an `InvalidInputError` if one is wrong."""
    typed: dict[str, Any] = {}
    filters: dict[str, Any] = {}
    for name in (*_TEXTS, *_INSTANT_FILTERS, "meta", "error"):
        # Browsers send the line ends of a pattern as CR LF.
        if text := given.get(name, "").replace("\r\n", "\n").strip():
            typed[name] = text
    filters.update((name, typed[name]) for name in _TEXTS if name in typed)
    for name in _INSTANT_FILTERS:
        if name in typed:
            filters[name] = parse_past(typed[name], now, name, zone)
    typed |= _lists(given)
    filters |= _lists(given)
    for name, check in _TYPED_CHECKS.items():
        if name in typed:
            check(typed[name])
    if "meta" in typed:
        filters["meta"] = _meta_of(typed["meta"])
    is_oldest_first = given.get("order") == "oldest"
    if is_oldest_first:
        typed["order"] = "oldest"
    cursor = given.get("cursor") or None
    return TaskQuery(filters, typed.get("error", ""), cursor, is_oldest_first, typed)


def _lists(given: MultiDict[str, str]) -> dict[str, list[str]]:
    """Return the filters that may have several values."""
    found = {name: list(filter(None, given.getlist(name))) for name in ("status", "ids")}
    return {name: values for name, values in found.items() if values}


def number_of(text: str) -> int | None:
    """Return the number that a request contains, or None if it is none or a far too large one."""
    # `int` refuses some texts that `isdigit` accepts, such as a superscript, and very long ones.
    is_number = text.isascii() and text.isdigit() and len(text) <= 20
    return int(text) if is_number else None


def _meta_of(text: str) -> dict[str, str]:
    pairs = {}
    for each in text.split(","):
        name, sign, value = each.partition("=")
        if not sign:
            raise InvalidInputError(f"{each!r:.40} is not a pair: write name=value", "meta")
        pairs[name.strip()] = value.strip()
    return pairs


def read_page(delays: DelayTasks, query: TaskQuery) -> tuple[Page, int]:
    """Return a page of tasks, and how many tasks were searched for the error text."""
    newest_first, searches = not query.is_oldest_first, Searches(delays)
    if not query.error:
        page = searches.find(
            **query.filters, cursor=query.cursor, limit=TASKS_PER_PAGE, newest_first=newest_first
        )
        return page, 0
    return find_by_error(
        searches.find, query.filters, query.error, query.cursor, newest_first, TASKS_PER_PAGE
    )
