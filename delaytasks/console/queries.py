"""What the pages read from the database: counts, searches with a time limit, and the filters of
the page of tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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

# -- what is due soon -----------------------------------------------------------------------------


#: The bars of the histogram of due times, the time of each, and the tasks that are read at most.
BARS, BAR, MOST_DUE = 30, timedelta(minutes=1), 5_000


class DueSoon(NamedTuple):
    """Waiting tasks that are due in each of the next minutes."""

    counts: Sequence[int]
    #: Whether more tasks are due than were counted.
    is_cut: bool


def count_due(store: Store, now: datetime) -> DueSoon:
    """Count what is due soon; nothing if the database does not answer."""
    table, counts = store.schema.tasks, [0] * BARS
    t, waiting = table.c, Filter(status=frozenset({Status.NOT_COMPLETE}))
    soon = t.expected_time >= now, t.expected_time < now + BARS * BAR
    query = select(t.expected_time, t.id).where(*soon)
    try:
        due = store.database.autocommitted(lambda c: first_page(c, query, table, waiting, MOST_DUE))
    except StoreError:
        return DueSoon(counts, False)  # the state of the deployment has the error
    for at, _ in due:
        counts[min((at - now) // BAR, BARS - 1)] += 1
    return DueSoon(counts, len(due) >= MOST_DUE)


# -- queues ---------------------------------------------------------------------------------------


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


def count_queues(delays: DelayTasks, workers: Sequence[RegisteredWorker]) -> list[QueueCounts]:
    """Return the live tasks of the queues that have live tasks or workers, and of the default."""
    store, settings = runtime_of(delays).store, delays.settings
    served = {queue for worker in workers for queue in worker.queues if queue != ALL_QUEUES}
    names = {settings.default_queue, *served}
    return store.database.autocommitted(lambda c: list(_queues(c, store, names, settings.grace_s)))


def _queues(on: Connection, store: Store, names: set[str], late_s: float) -> Iterator[QueueCounts]:
    t, live = store.schema.tasks, (Status.NOT_COMPLETE, Status.RUNNING, Status.HELD)
    for status in live:
        for queue in distinct_values(on, t.c.queue, has_status(t, status)):
            if len(names) >= MOST_QUEUES:
                break
            names.add(queue)

    def count(queue: str, status: Status) -> int:
        rows = select(literal(1)).where(has_status(t, status), t.c.queue == queue)
        some = rows.limit(MOST_COUNTED).subquery()
        return int(on.execute(select(func.count()).select_from(some)).scalar_one())

    queues, overdue_rows = sorted(names), OverdueRows(store.database, store.schema)
    overdue = overdue_rows.count_of_queues(on, queues, late_s, MOST_COUNTED)
    for name in queues:
        waiting, running, held = (count(name, status) for status in live)
        late = overdue[name]
        yield QueueCounts(name, waiting, late.tasks, running, held, late.oldest)


# -- searches -------------------------------------------------------------------------------------


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
_INSTANTS = ("since", "until", "created_since", "created_until")
#: Raise the error of a wrong pattern, or of a wrong id.
_CHECKS: dict[str, Callable[[Any], object]] = {"error": error_filter, "ids": check_ids}


@dataclass(frozen=True)
class TaskQuery:
    """The filters of the page of tasks and of bulk actions.

    Attributes
    ----------
    typed
        The values as they were typed, for the form and the addresses of other pages. The error is
        a part of the error text, or a pattern in which `*` stands for any text.
    filters
        The filters of `find`, without the error.
    """

    typed: dict[str, Any]
    filters: dict[str, Any]
    cursor: str | None = None

    @property
    def error(self) -> str:
        return str(self.typed.get("error", ""))

    @property
    def has_filters(self) -> bool:
        return bool(self.filters or self.error)

    @classmethod
    def read(cls, given: MultiDict[str, str], now: datetime, zone: tzinfo) -> TaskQuery:
        """Read the filters; raise an `InvalidInputError` if one is wrong."""
        typed: dict[str, Any] = {}
        for name in (*_TEXTS, *_INSTANTS, "meta", "error"):
            # Browsers send the line ends of a pattern as CR LF.
            typed[name] = given.get(name, "").replace("\r\n", "\n").strip()
        for name in ("status", "ids"):
            typed[name] = list(filter(None, given.getlist(name)))
        typed = {name: value for name, value in typed.items() if value}
        for name in _CHECKS.keys() & typed.keys():
            _CHECKS[name](typed[name])
        filters = {name: value for name, value in typed.items() if name != "error"}
        for name in filters.keys() & set(_INSTANTS):
            filters[name] = parse_past(typed[name], now, name, zone)
        if "meta" in typed:
            filters["meta"] = _meta_of(typed["meta"])
        if given.get("order") == "oldest":
            typed["order"] = "oldest"
        return cls(typed, filters, given.get("cursor") or None)

    def page(self, delays: DelayTasks) -> tuple[Page, int]:
        """Return a page of tasks, and how many tasks were searched for the error text."""
        find, newest_first = Searches(delays).find, "order" not in self.typed
        if self.error:
            return find_by_error(
                find, self.filters, self.error, self.cursor, newest_first, TASKS_PER_PAGE
            )
        where = {"cursor": self.cursor, "newest_first": newest_first, **self.filters}
        return find(limit=TASKS_PER_PAGE, **where), 0


def _meta_of(text: str) -> dict[str, str]:
    pairs = {}
    for each in text.split(","):
        name, sign, value = each.partition("=")
        if not sign:
            raise InvalidInputError(f"{each!r:.40} is not a pair: write name=value", "meta")
        pairs[name.strip()] = value.strip()
    return pairs
