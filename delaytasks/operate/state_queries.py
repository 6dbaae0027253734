"""Bounded queries for people: counts, live and failed tasks, changes, and facts for `why`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import ColumnElement, Connection, Select, and_, case, func, null, select, text

from delaytasks.db.database import Database
from delaytasks.db.schema import Schema, by_id, listed
from delaytasks.db.store import Store
from delaytasks.db.sweep_queries import is_abandoned, is_late
from delaytasks.db.task_rows import distinct_values, first_page, has_status, levels_of
from delaytasks.db.types import db_now_plus, for_database, is_past, once
from delaytasks.model.filters import Filter
from delaytasks.model.moves import Status
from delaytasks.model.text import DEFER_MAX_S, DEFERRALS
from delaytasks.settings import Settings

T = TypeVar("T")
#: Up to this number, rows are counted exactly.
MAX_COUNTED = 1_000_000
READ_ONLY = "it is read-only, as a standby or a demoted primary is: no task can change"
NO_STANDBY = "it replicates synchronously, and no synchronous standby is connected"


class SweepState(NamedTuple):
    """The last sweep of a sweep partition; without times if there was none."""

    partition: int
    is_late: bool = True
    at: datetime | None = None
    age_s: float | None = None
    armed_until: datetime | None = None


class Count(NamedTuple):
    rows: int
    is_estimate: bool = False


class Stats:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._t = schema.tasks
        self._s = schema.sweeps

    def counts(self, most: int = MAX_COUNTED) -> dict[Status, Count]:
        """Return the number of rows of each status.

        In a table of more than `most` rows, larger numbers and that of DONE are the planner's
        estimates.
        """
        return self._db.autocommitted(lambda connection: self._counts(connection, most))

    def _counts(self, connection: Connection, most: int) -> dict[Status, Count]:
        t = self._t
        if estimate_rows(connection, select(t.c.id)) <= most:
            query = select(t.c.status, func.count()).group_by(t.c.status)
            found = {status: Count(rows) for status, rows in connection.execute(query)}
            return {status: found.get(int(status), Count(0)) for status in Status}
        return {status: self._count(connection, status, most) for status in Status}

    def _count(self, connection: Connection, status: Status, most: int) -> Count:
        t = self._t
        rows = select(t.c.id).where(has_status(t, status))
        if status is Status.DONE:  # it has no index
            return Count(estimate_rows(connection, rows), is_estimate=True)
        first = rows.limit(most + 1).subquery()
        counted = connection.scalar(select(func.count()).select_from(first)) or 0
        if counted <= most:
            return Count(counted)
        return Count(max(counted, estimate_rows(connection, rows)), is_estimate=True)

    def expired_leases(self) -> int:
        """Count RUNNING rows whose lease is over. The next sweep recovers them."""
        query = select(func.count()).where(is_abandoned(self._t))
        return self._db.autocommitted(lambda c: int(c.execute(query).scalar_one()))

    def sweeps(self, settings: Settings, now: datetime) -> list[SweepState]:
        """Return the last sweep of each sweep partition, with or without a broker."""
        s, partitions = self._s.c, settings.sweep_partitions
        mine = s.sweep_partitions.in_([partitions, -partitions])
        query = select(s.sweep_partition, s.swept_at, s.armed_until).where(mine)
        found = {}
        for partition, at, armed_until in self._db.rows(query.order_by(s.swept_at)):
            age_s = max((now - at).total_seconds(), 0.0)
            is_late = age_s > settings.self_sweep_s
            found[partition] = SweepState(partition, is_late, at, age_s, armed_until)
        return [found.get(n, SweepState(n)) for n in range(partitions)]

    def server(self) -> str:
        """Return the database's kind and version."""

        def version(connection: Connection) -> str:
            numbers = connection.dialect.server_version_info or ()
            return f"{connection.dialect.name} {'.'.join(map(str, numbers))}".strip()

        return self._db.autocommitted(version)


#: Queries whose first value says whether the server is a standby, whether it replicates
#: synchronously, and whether a synchronous standby is connected. A role without pg_monitor sees
#: NULL for the state of each standby.
_POSTGRESQL_ROLE = (
    "SELECT current_setting('transaction_read_only') = 'on'",
    "SELECT current_setting('synchronous_standby_names') <> ''",
    "SELECT 1 FROM pg_stat_replication WHERE COALESCE(sync_state, 'sync') IN ('sync', 'quorum')",
)
_MYSQL_ROLE = (
    "SELECT @@global.read_only",
    "SHOW GLOBAL VARIABLES WHERE variable_name IN "
    "('rpl_semi_sync_master_enabled', 'rpl_semi_sync_source_enabled') AND value = 'ON'",
    "SHOW GLOBAL STATUS WHERE variable_name IN "
    "('Rpl_semi_sync_master_clients', 'Rpl_semi_sync_source_clients') AND value <> '0'",
)


def server_problem(database: Database) -> str | None:
    """Return what is wrong with the role of the server: `READ_ONLY`, `NO_STANDBY` or None."""
    queries: Sequence[str] = for_database(
        database.backend, postgresql=_POSTGRESQL_ROLE, mysql=_MYSQL_ROLE, sqlite=()
    )

    def read(connection: Connection) -> list[bool]:
        return [bool(connection.execute(text(query)).scalar()) for query in queries]

    match database.autocommitted(read):
        case [True, *_]:
            return READ_ONLY
        case [_, True, False]:
            return NO_STANDBY
    return None


class Running(NamedTuple):
    """The running tasks of a tag, and when the first of them began."""

    tag: str
    tasks: int
    since: datetime


#: Tags in the answer to what occupies the processes.
MOST_RUNNING_TAGS = 3


def running_by_tag(store: Store) -> list[Running]:
    """Return the tags with the most running tasks. A few rows for each process are read."""
    t = store.schema.tasks
    query = select(t.c.tag, func.count(), func.min(t.c.execution_time))
    query = query.where(has_status(t, Status.RUNNING), t.c.execution_time.is_not(None))
    query = query.group_by(t.c.tag).order_by(func.count().desc()).limit(MOST_RUNNING_TAGS)
    return [Running(*row) for row in store.database.rows(query)]


# -- Reads the FAILED tasks that were due last, and tasks that failed runs were counted for -------


#: The most tasks that `failed_rows` reads, and the most queues: each costs a query.
MOST_FAILED, MOST_FAILED_QUEUES = 500, 100


class FailedRow(NamedTuple):
    """A task that has failed, without its body."""

    id: int
    tag: str
    queue: str
    due: datetime
    failed_at: datetime | None
    error: str | None
    status: int = Status.FAILED


def failed_rows(database: Database, schema: Schema) -> list[FailedRow]:
    """Return the FAILED tasks that were due last, at most `MOST_FAILED` of the first queues."""
    where = Filter(status=frozenset({Status.FAILED}))
    query = select(*_columns(schema))
    rows = database.autocommitted(
        lambda c: first_page(
            c, query, schema.tasks, where, MOST_FAILED, True, most_queues=MOST_FAILED_QUEUES
        )
    )
    return list(map(_row, rows))


def has_all_failed(rows: Collection[FailedRow]) -> bool:
    """Return whether these are all FAILED tasks, and neither rows nor queues were left out."""
    queues = {row.queue for row in rows}
    return len(rows) < MOST_FAILED and len(queues) < MOST_FAILED_QUEUES


def rows_of(database: Database, schema: Schema, ids: Iterable[int]) -> list[FailedRow]:
    """Return the tasks with these ids that exist, whatever their status is."""
    wanted = sorted(set(ids))
    if not wanted:
        return []
    t = schema.tasks
    # The range lets the planner leave out partitions.
    where = (listed(database, t.c.id, "ids"), t.c.id.between(wanted[0], wanted[-1]))
    query = by_id(select(*_columns(schema)).where(*where), t)
    rows = database.autocommitted(lambda c: c.execute(query, {"ids": wanted}).all())
    return list(map(_row, rows))


def _columns(schema: Schema) -> list[Any]:
    t = schema.tasks.c
    return [
        *(t.expected_time, t.id, t.tag, t.queue, t.due_time, t.update_time),
        *(t.error_stack, t.status),
    ]


def _row(r: Any) -> FailedRow:
    return FailedRow(r[1], r[2], r[3], r[4] or r[0], r[5], r[6], r[7])


# -- estimates ------------------------------------------------------------------------------------

# The planner's estimate of how many rows a query returns. Its cost does not grow with the rows.


def estimate_rows(connection: Connection, query: Select[Any]) -> int:
    """Return the estimate. SQLite has no estimates and returns 0: its tables are small enough to
    count."""
    dialect = connection.dialect
    read = for_database(
        dialect.name, postgresql=_postgresql_estimate, mysql=_mysql_estimate, sqlite=None
    )
    if read is None:
        return 0
    sql = str(query.compile(dialect=dialect, compile_kwargs={"literal_binds": True}))
    return read(connection, sql)


def _postgresql_estimate(connection: Connection, sql: str) -> int:
    plan = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {sql}").scalar_one()
    return int(plan[0]["Plan"]["Plan Rows"])


def _mysql_estimate(connection: Connection, sql: str) -> int:
    return int(connection.exec_driver_sql(f"EXPLAIN {sql}").mappings().one()["rows"] or 0)


# -- Finds the overdue tasks. This is the only definition of the word in SQL ----------------------

# A waiting task is overdue if it is late by more than the grace period. A task that a worker has
# deferred keeps its due time in `due_time`, while its next try is at `expected_time`. It is
# overdue, too, although no sweep and no claim look for it yet. A deferral is not longer than
# `DEFER_MAX_S`, which bounds the rows to read.


#: Rows that one call counts. A larger number is a minimum.
MAX_OVERDUE_COUNTED = 1_000_000
#: Queues in which overdue tasks are counted, and priorities of each.
MAX_OVERDUE_QUEUES = 1_000
#: Queues that are compared with those that workers serve.
MAX_OTHER_QUEUES = 20


class OverdueGroup(NamedTuple):
    """Overdue tasks of one queue and tag."""

    queue: str
    tag: str
    #: Why a worker has deferred them (`operate/why.py` has the codes); None if no worker has.
    cause: str | None
    tasks: int
    oldest: datetime


class OverdueCount(NamedTuple):
    """Tasks that should have begun."""

    tasks: int
    oldest: datetime | None


class OverdueRows:
    """Reads the overdue tasks."""

    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._t = schema.tasks

    def count(self, late_s: float, most: int = MAX_OVERDUE_COUNTED) -> OverdueCount:
        """Count up to `most` tasks that are late by more than `late_s`."""

        def work(on: Connection) -> OverdueCount:
            found, left = list(self._deferred(on, late_s, most).values()), most
            queues = distinct_values(on, self._t.c.queue, has_status(self._t, Status.NOT_COMPLETE))
            for queue in islice(queues, MAX_OVERDUE_QUEUES):
                for tasks, first in self._of_levels(on, queue, late_s, left):
                    found.append((tasks, first))
                    left -= tasks
            return _together(found, most)

        return self._db.autocommitted(work)

    def count_of_queues(
        self, on: Connection, queues: list[str], late_s: float, most: int
    ) -> dict[str, OverdueCount]:
        """Count up to `most` overdue tasks of each of these queues, with the oldest of them."""
        deferred, found = self._deferred(on, late_s, most), dict[str, OverdueCount]()
        for queue in queues:
            parts = list(self._of_levels(on, queue, late_s, most))
            if queue in deferred:
                parts.append(deferred[queue])
            found[queue] = _together(parts, most)
        return found

    def other_queues(self, known: Collection[str], late_s: float) -> list[str]:
        """Return queues with tasks that are late by more than `late_s`, except those in `known`.

        At most `MAX_OTHER_QUEUES` other queues are looked at, the first ones by name.
        """

        def read(on: Connection) -> list[str]:
            queues = distinct_values(on, self._t.c.queue, has_status(self._t, Status.NOT_COMPLETE))
            others = islice((queue for queue in queues if queue not in known), MAX_OTHER_QUEUES)
            found = self.count_of_queues(on, list(others), late_s, most=1)
            return [queue for queue, late in found.items() if late.tasks]

        return self._db.autocommitted(read)

    def _of_levels(
        self, on: Connection, queue: str, late_s: float, most: int
    ) -> Iterator[tuple[int, datetime]]:
        """Yield the number and the first due time of the late tasks of each priority.

        The index has the due times in order within a queue and a priority. Without them, all
        waiting rows would be read.
        """
        t, status = self._t, Status.NOT_COMPLETE
        for level in levels_of(on, t, status, queue):
            if most <= 0:
                return
            late = (
                select(self._due.label("due"))
                .where(is_late(t, level, late_s))
                .order_by(t.c.expected_time)
                .limit(most)
                .subquery()
            )
            tasks, first = on.execute(select(func.count(), func.min(late.c.due))).one()
            if tasks:
                yield tasks, first
            most -= tasks

    def _deferred(
        self, on: Connection, late_s: float, most: int
    ) -> dict[str, tuple[int, datetime]]:
        """Return the number and the first due time of the late tasks whose next try is not late, by
        queue.

        Up to `most` tasks with their next try within the longest deferral are read.
        """
        t = self._t.c
        near = (
            select(t.queue, t.due_time)
            .where(self._is_tried_soon(late_s))
            .order_by(t.expected_time)
            .limit(most)
            .subquery()
        )
        query = (
            select(near.c.queue, func.count(), func.min(near.c.due_time))
            .where(near.c.due_time <= once(db_now_plus(-late_s)))
            .group_by(near.c.queue)
        )
        return {queue: (tasks, first) for queue, tasks, first in on.execute(query)}

    def _is_tried_soon(self, late_s: float) -> ColumnElement[bool]:
        t = self._t.c
        return and_(
            has_status(self._t, Status.NOT_COMPLETE),
            t.expected_time > once(db_now_plus(-late_s)),
            t.expected_time <= once(db_now_plus(DEFER_MAX_S)),
        )

    @property
    def _due(self) -> ColumnElement[datetime]:
        return func.coalesce(self._t.c.due_time, self._t.c.expected_time)

    def deferred(self, late_s: float) -> ColumnElement[bool]:
        """Return the condition for late tasks whose next try is not late."""
        is_late = self._t.c.due_time <= once(db_now_plus(-late_s))
        return and_(self._is_tried_soon(late_s), is_late)

    def groups(self, late_s: float, most: int) -> list[OverdueGroup]:
        """Return the largest groups of overdue tasks, by queue, tag and cause of the deferral."""
        t, found = self._t, list[OverdueGroup]()
        is_late = and_(
            has_status(t, Status.NOT_COMPLETE), is_past(t.c.expected_time, db_now_plus(-late_s))
        )
        codes = [(t.c.error_stack.startswith(begin), code) for code, begin in DEFERRALS.items()]
        cause = case(*codes, else_="deferred")
        for where, why in ((is_late, null()), (self.deferred(late_s), cause)):
            tasks = func.count().label("tasks")
            rows = select(t.c.queue, t.c.tag, why.label("cause"), self._due.label("due"))
            c = rows.where(where).subquery().c
            query = select(c.queue, c.tag, c.cause, tasks, func.min(c.due))
            query = query.group_by(c.queue, c.tag, c.cause).order_by(tasks.desc()).limit(most)
            found += [OverdueGroup(*row) for row in self._db.rows(query)]
        return sorted(found, key=lambda group: -group.tasks)[:most]


def _together(parts: Sequence[tuple[int, datetime]], most: int) -> OverdueCount:
    tasks = sum(tasks for tasks, _ in parts)
    return OverdueCount(min(tasks, most), min((first for _, first in parts), default=None))
