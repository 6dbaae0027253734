"""Finds tasks for people, at a bounded cost: in limited time, by their changes, or the failed ones.

Some filters have no index, and would read the whole table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar, cast

from sqlalchemy import Connection, Select, and_, event, exc, literal, null, select

from delaytasks.db.database import Database
from delaytasks.db.engines import TIMED_OUT
from delaytasks.db.schema import COLUMNS, Schema, by_id, listed
from delaytasks.db.statements import task_of
from delaytasks.db.store import Store
from delaytasks.db.task_rows import conditions, first_page, has_status
from delaytasks.model.clock import first_id, monotonic
from delaytasks.model.errors import StoreError
from delaytasks.model.filters import Filter, check_error
from delaytasks.model.moves import Status
from delaytasks.model.task import DelayedTask

T = TypeVar("T")


# -- Ends a search that takes too long: some filters have no index, and read the whole table ------


class SearchTimeoutError(StoreError):
    """A search took too long. Narrow its filter, for example by a status."""


#: For the servers, 0 is no limit.
LEAST_LIMIT_S = 0.001
#: SQLite asks whether to go on each time it has executed this number of its instructions.
SQLITE_INSTRUCTIONS = 10_000


def limited_search(database: Database, work: Callable[[Any], T], limit_s: float) -> T:
    """Run a search of one or more statements.

    Each statement ends after `limit_s` seconds, and no statement begins later.

    Raises
    ------
    SearchTimeoutError
        If the search has reached the limit.
    """
    limit_s = max(limit_s, LEAST_LIMIT_S)

    def limited(connection: Connection) -> T:
        deadline = monotonic() + limit_s

        def check(*_: Any) -> None:
            if monotonic() > deadline:
                raise _timeout(limit_s)

        event.listen(connection, "before_cursor_execute", check)
        try:
            return work(connection)
        except exc.DBAPIError as error:
            if TIMED_OUT.caused(error.orig):
                raise _timeout(limit_s) from error
            raise
        finally:
            # The statement that resets the limit of the connection follows.
            event.remove(connection, "before_cursor_execute", check)

    return database.repeat(limited, partial(_limited, database, limit_s))


def _timeout(limit_s: float) -> SearchTimeoutError:
    return SearchTimeoutError(
        f"the search took longer than {limit_s:.1f} s: narrow its filter, for example by a status, "
        "a queue or a range of times"
    )


@contextmanager
def _limited(database: Database, limit_s: float) -> Iterator[Connection]:
    """Yield a connection whose statements end after `limit_s` seconds."""
    if database.backend == "postgresql":
        with database.begin() as connection:
            # It ends with the transaction, so that no pooled connection keeps it.
            connection.exec_driver_sql(f"SET LOCAL statement_timeout = {round(limit_s * 1000)}")
            yield connection
        return
    with database.auto.connect() as connection, database.bounded(connection):
        if database.backend == "sqlite":
            deadline, driver = monotonic() + limit_s, cast(Any, connection.connection)
            set_handler = driver.driver_connection.set_progress_handler
            set_handler(lambda: monotonic() > deadline, SQLITE_INSTRUCTIONS)
            reset: Callable[[], object] = partial(set_handler, None, 0)
        else:
            name, value = "max_execution_time", f"{limit_s * 1000:.0f}"
            if getattr(connection.dialect, "is_mariadb", False):
                name, value = "max_statement_time", f"{limit_s:.3f}"
            connection.exec_driver_sql(f"SET SESSION {name} = {value}")
            reset = partial(connection.exec_driver_sql, f"SET SESSION {name} = DEFAULT")
        try:
            yield connection
        finally:
            if not connection.invalidated:
                reset()


def error_filter(text: str) -> str:
    """Return the filter `error` of `find` for a text that a person typed: a part, or a pattern."""
    return check_error(text if "*" in text else f"*{text}*")


# -- Tasks without their bodies and results, which may be large ------------------------------------


#: The most tasks that `failed_tasks` reads, and the most queues: each costs a query.
MOST_FAILED, MOST_FAILED_QUEUES = 500, 100


def _without_bodies(schema: Schema) -> Select[Any]:
    without: dict[str, Any] = {"message_body": literal(""), "result": null()}
    names = ((name, without.get(name, schema.tasks.c[name])) for name in COLUMNS)
    return select(*(column.label(name) for name, column in names))


def failed_tasks(store: Store) -> list[DelayedTask]:
    """Return the FAILED tasks that were due last, at most `MOST_FAILED` of the first queues."""
    query, where = _without_bodies(store.schema), Filter(status=frozenset({Status.FAILED}))
    limits = MOST_FAILED, True, MOST_FAILED_QUEUES
    rows = store.database.autocommitted(
        lambda on: first_page(on, query, store.schema.tasks, where, *limits)
    )
    return [task_of(row, store.schema) for row in rows]


def tasks_of_ids(store: Store, ids: Iterable[int]) -> list[DelayedTask]:
    """Return the tasks with these ids that exist, whatever their status is."""
    wanted, t = sorted(set(ids)), store.schema.tasks
    if not wanted:
        return []
    # The range lets the planner leave out partitions. An order of due times could make MySQL read
    # the index of all past rows.
    where = (listed(store.database, t.c.id, "ids"), t.c.id.between(wanted[0], wanted[-1]))
    query = by_id(_without_bodies(store.schema).where(*where), t)
    rows = store.database.autocommitted(lambda on: on.execute(query, {"ids": wanted}).all())
    return [task_of(row, store.schema) for row in rows]


# -- Follow the changes of tasks, at a cost that does not grow with the table ----------------------

# No index leads to the time of a change, since each move would have to maintain it. Therefore the
# rows are found where changes happen: among the newest ids, among the rows that were due lately,
# among those that run, and among those that were seen before.


#: The rows that each part of a read looks at.
MOST_CHANGES = 1000
#: Rows that were due for a longer time are found only while they run, or if they were seen before.
LATELY_S = 60.0
#: Rows that are due a little later may run soon.
SOON_S = 1.0
#: A read looks back further than the last one, since transactions may be open for some time.
OVERLAP_S = 10.0
#: Versions that are remembered, to show each change once.
MOST_KNOWN = 20_000
#: Live tasks of which each read asks again, the last ones that changed.
MOST_SEEN = 500


class FoundChanges(NamedTuple):
    """The changed rows, without their bodies and results."""

    tasks: Sequence[DelayedTask]
    #: Whether there may be more changes than the read has looked at.
    is_incomplete: bool


class Follower:
    """Reads the changes of the tasks that match a filter, for `delaytasks list --follow`."""

    def __init__(self, store: Store, where: Filter) -> None:
        self._db, self._schema, self._where = store.database, store.schema, where
        self._t = t = store.schema.tasks
        wanted = listed(self._db, t.c.id, "ids"), *conditions(t, where, self._db.can)
        self._rows = _without_bodies(self._schema).where(*wanted)
        self._read_at: datetime | None = None
        #: The version of each task, and whether it was live then, the last one that was seen last.
        self._known: dict[int, tuple[int, bool]] = {}

    def read(self) -> FoundChanges:
        """Return the changes since the last read, the oldest first; at first, of the last minute.

        Raises
        ------
        StoreError
            If the database does not answer.
        """
        now = self._db.now()
        back_s = LATELY_S if self._read_at is None else OVERLAP_S
        since = (self._read_at or now) - timedelta(seconds=back_s)
        tasks, is_incomplete = self._db.autocommitted(lambda c: self._changed(c, since, now))
        self._read_at = now
        new = [task for task in tasks if self._is_new(task)]
        return FoundChanges(sorted(new, key=changed_at), is_incomplete)

    def _changed(
        self, connection: Connection, since: datetime, now: datetime
    ) -> tuple[list[DelayedTask], bool]:
        live = (id for id, (_, is_live) in reversed(self._known.items()) if is_live)
        ids, is_incomplete = set(islice(live, MOST_SEEN)), False
        for part in self._parts(since, now):
            found = connection.execute(part.limit(MOST_CHANGES)).scalars().all()
            is_incomplete |= len(found) == MOST_CHANGES
            ids.update(found)
        changed = self._rows.where(self._t.c.update_time >= since)
        rows = connection.execute(changed, {"ids": list(ids)})
        return [task_of(row, self._schema) for row in rows], is_incomplete

    def _parts(self, since: datetime, now: datetime) -> Sequence[Select[Any]]:
        """Return queries for the ids of rows that may have changed. Each uses an index."""
        t = self._t.c
        if self._where.key is not None:
            mine = select(t.id).where(t.task_key == self._where.key)
            return [mine.order_by(t.expected_time.desc())]
        lately, soon = now - timedelta(seconds=LATELY_S), now + timedelta(seconds=SOON_S)
        is_due = and_(t.expected_time > lately, t.expected_time <= soon)
        return [
            select(t.id).where(t.id >= first_id(since)).order_by(t.id.desc()),
            select(t.id).where(is_due).order_by(t.expected_time.desc()),
            select(t.id).where(has_status(self._t, Status.RUNNING)),
        ]

    def _is_new(self, task: DelayedTask) -> bool:
        """Remember the version of a task. Return whether its change is to be shown."""
        version, _ = self._known.pop(task.id, (None, False))
        self._known[task.id] = task.version, not task.is_finished
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        if version == task.version:
            return False
        wanted = self._where.status
        return wanted is None or Status(task.status) in wanted


def changed_at(task: DelayedTask) -> datetime:
    return task.update_time or task.create_time or task.expected_time
