"""Finds tasks for people, at a bounded cost: in limited time, or by their changes.

Some filters have no index, and would read the whole table.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import ColumnElement, Connection, Select, and_, event, exc, literal, null, select

from delaytasks.db.database import Database
from delaytasks.db.engines import TIMED_OUT
from delaytasks.db.schema import COLUMNS, listed
from delaytasks.db.statements import task_of
from delaytasks.db.store import Store
from delaytasks.db.task_rows import conditions, has_status
from delaytasks.db.types import for_database
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
    connect = for_database(database.backend, postgresql=_postgresql, mysql=_mysql, sqlite=_sqlite)

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

    return database.repeat(limited, partial(connect, database, limit_s))


def _timeout(limit_s: float) -> SearchTimeoutError:
    return SearchTimeoutError(
        f"the search took longer than {limit_s:.1f} s: narrow its filter, for example by a status, "
        "a queue or a range of times"
    )


@contextmanager
def _postgresql(database: Database, limit_s: float) -> Iterator[Connection]:
    with database.begin() as connection:
        # It ends with the transaction, so that no pooled connection keeps it.
        connection.exec_driver_sql(f"SET LOCAL statement_timeout = {round(limit_s * 1000)}")
        yield connection


@contextmanager
def _mysql(database: Database, limit_s: float) -> Iterator[Connection]:
    with database.auto.connect() as connection, database.bounded(connection):
        is_mariadb = getattr(connection.dialect, "is_mariadb", False)
        limit = (
            f"max_statement_time = {limit_s:.3f}"
            if is_mariadb
            else f"max_execution_time = {round(limit_s * 1000)}"
        )
        connection.exec_driver_sql(f"SET SESSION {limit}")
        try:
            yield connection
        finally:
            if not connection.invalidated:
                name = limit.partition(" ")[0]
                connection.exec_driver_sql(f"SET SESSION {name} = DEFAULT")


@contextmanager
def _sqlite(database: Database, limit_s: float) -> Iterator[Connection]:
    with database.auto.connect() as connection:
        driver_connection: Any = connection.connection.driver_connection
        deadline = monotonic() + limit_s
        driver_connection.set_progress_handler(lambda: monotonic() > deadline, SQLITE_INSTRUCTIONS)
        try:
            yield connection
        finally:
            driver_connection.set_progress_handler(None, 0)


def error_filter(text: str) -> str:
    """Return the filter `error` of `find` for a text that a person typed: a part, or a pattern."""
    return check_error(text if "*" in text else f"*{text}*")


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
        without = {"message_body": literal(""), "result": null()}
        columns: list[ColumnElement[Any]] = [
            without[name].label(name) if name in without else t.c[name] for name in COLUMNS
        ]
        wanted = listed(self._db, t.c.id, "ids"), *conditions(t, where, self._db.can)
        self._rows = select(*columns).where(*wanted)
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
        ids, is_incomplete = set(self._live), False
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
