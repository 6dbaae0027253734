"""Bounded queries for people: counts, live and failed tasks, changes, and facts for `why`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import ColumnElement, Connection, Select, and_, case, func, null, select, text

from delaytasks.db.bulk_moves import Bulk
from delaytasks.db.database import Database
from delaytasks.db.schema import BODY, Schema, by_id, listed
from delaytasks.db.searching import distinct_values, first_page, has_status, levels_of
from delaytasks.db.sweep_queries import is_abandoned, is_late
from delaytasks.db.types import db_now_plus, for_database, is_past, once
from delaytasks.model.body import MARK_LENGTH, NO_NAME, PREFIX, marks_of, name_in
from delaytasks.model.filters import Filter
from delaytasks.model.inputs import show_duration
from delaytasks.model.moves import LIVE, Status
from delaytasks.model.text import DEFER_MAX_S, DEFERRALS

T = TypeVar("T")
#: A lease that ends after this number of lease periods cannot be ours.
LONG_LEASES = 100
#: Up to this number, rows are counted exactly.
MAX_COUNTED = 1_000_000


#: Queries whose first value says whether the server is a standby, whether it replicates
#: synchronously, and whether a synchronous standby is connected. A role without pg_monitor sees
#: NULL for the state of each standby.
_POSTGRESQL_ROLE = (
    "SELECT pg_is_in_recovery()",
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


class Swept(NamedTuple):
    """The last sweep of one sweep partition; no time if it was never swept."""

    sweep_partition: int
    at: datetime | None
    armed_until: datetime | None

    def age_s(self, now: datetime) -> float | None:
        return None if self.at is None else max((now - self.at).total_seconds(), 0.0)

    def is_late(self, now: datetime, limit_s: float) -> bool:
        """Return whether no sweep has run for `limit_s` seconds."""
        age_s = self.age_s(now)
        return age_s is None or age_s > limit_s


class Pending(NamedTuple):
    """The unfinished tasks of one tag."""

    tag: str
    tasks: int
    first_due: datetime
    queues: tuple[str, ...] = ()


class UntrustedInput(NamedTuple):
    """Rows of one tag that another program wrote, and that no worker can claim."""

    tag: str
    tasks: int
    first_due: datetime
    #: The first and the last id.
    ids: tuple[int, int]
    problem: str


class Count(NamedTuple):
    rows: int
    is_estimate: bool = False


class Stats:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._t = schema.tasks
        self._s = schema.sweeps
        self._cipher = schema.cipher
        self._bulk = Bulk(database, schema)

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

    def pending(self) -> list[Pending]:
        """Return the tags that have tasks yet to run."""
        t = self._t
        first_due = func.min(func.coalesce(t.c.due_time, t.c.expected_time))
        query = select(t.c.tag, t.c.queue, func.count(), first_due).where(self._is_live())
        found: dict[str, Pending] = {}
        query = query.group_by(t.c.tag, t.c.queue).order_by(t.c.tag, t.c.queue)
        for tag, queue, tasks, due in self._all(query):
            seen = found.get(tag, Pending(tag, 0, due))
            found[tag] = Pending(
                tag, seen.tasks + tasks, min(seen.first_due, due), (*seen.queues, queue)
            )
        return list(found.values())

    def bodies(self, tag: str) -> Iterator[tuple[int, str, datetime, str | None]]:
        """Yield (id, body, due, headers) of a tag's live tasks."""
        t = self._t
        query = select(t.c.id, t.c.message_body, t.c.expected_time, t.c.headers).where(
            self._is_live(), t.c.tag == tag
        )
        for id, body, *others in self._all(query.order_by(t.c.expected_time)):
            if self._cipher is not None:
                body = self._cipher.read(body, BODY, id, tag)
            yield id, body, *others

    def strange(self, max_delay_s: float, lease_s: float) -> Iterator[UntrustedInput]:
        """Yield live rows that no worker will take."""
        t = self._t
        waits, runs = t.c.status == int(Status.NOT_COMPLETE), t.c.status == int(Status.RUNNING)
        is_far = t.c.expected_time > db_now_plus(max_delay_s)
        problems = {
            f"due later than {show_duration(max_delay_s)} from now": and_(waits, is_far),
            "RUNNING, with a longer lease than any worker sets": and_(
                runs, t.c.lease_until > db_now_plus(LONG_LEASES * lease_s)
            ),
        }
        grouped = select(
            t.c.tag, func.count(), func.min(t.c.expected_time), func.min(t.c.id), func.max(t.c.id)
        )
        for problem, is_so in problems.items():
            query = grouped.where(is_so).group_by(t.c.tag).order_by(t.c.tag)
            for tag, tasks, first_due, first, last in self._all(query):
                yield UntrustedInput(tag, tasks, first_due, (first, last), problem)
        yield from self._without_key()

    def _without_key(self) -> Iterator[UntrustedInput]:
        """Yield live rows that no key here can decrypt, window by window: no statement reads all
        bodies."""
        t = self._t.c
        marks = [] if self._cipher is None else marks_of(self._cipher.names)
        mark = func.substr(t.message_body, 1, MARK_LENGTH + 1)
        needs = [
            func.substr(t.message_body, 1, len(PREFIX)) == PREFIX,
            *([mark.not_in(marks)] if marks else []),
        ]
        found: dict[tuple[str, str], UntrustedInput] = {}
        for rows in self._bulk.windows(LIVE, [t.tag, mark, t.expected_time, t.id], *needs):
            for tag, begin, due, id in rows:
                name = name_in(begin)
                one = UntrustedInput(tag, 1, due, (id, id), _why(name))
                seen = found.get((tag, name))
                found[tag, name] = one if seen is None else _both(seen, one)
        yield from (found[each] for each in sorted(found))

    def _all(self, query: Select[Any]) -> Iterator[Any]:
        """Yield the rows of a query that reads all tasks, and so may take minutes."""
        for rows in self._db.stream(query, size=1000, may_take_long=True):
            yield from rows

    def _is_live(self) -> ColumnElement[bool]:
        return self._t.c.status.in_([int(status) for status in LIVE])

    def sweeps(self, sweep_partitions: int) -> list[Swept]:
        """Return the last sweep of each sweep partition, with or without a broker."""
        s = self._s
        mine = s.c.sweep_partitions.in_([sweep_partitions, -sweep_partitions])
        columns = s.c.sweep_partition, s.c.swept_at, s.c.armed_until
        rows = self._db.rows(select(*columns).where(mine).order_by(s.c.swept_at))
        found = {row[0]: Swept(*row) for row in rows}
        return [found.get(n, Swept(n, None, None)) for n in range(sweep_partitions)]

    def standby_problem(self) -> str | None:
        """Return what is wrong with the server's role in a replication, for `check`."""
        queries: Sequence[str] = for_database(
            self._db.backend, postgresql=_POSTGRESQL_ROLE, mysql=_MYSQL_ROLE, sqlite=()
        )

        def read(connection: Connection) -> list[bool]:
            return [bool(connection.execute(text(query)).scalar()) for query in queries]

        match self._db.autocommitted(read):
            case [True, *_]:
                return "it is a standby, which accepts no tasks"
            case [_, True, False]:
                return "it replicates synchronously, and no synchronous standby is connected"
        return None

    def server(self) -> str:
        """Return the database's kind and version."""

        def version(connection: Connection) -> str:
            numbers = connection.dialect.server_version_info or ()
            return f"{connection.dialect.name} {'.'.join(map(str, numbers))}".strip()

        return self._db.autocommitted(version)


def _why(name: str) -> str:
    if name == NO_NAME:
        return f"begins with {PREFIX} and names no key: no process can read it"
    return f"encrypted with key {name}, which delaytasks_encryption_keys does not have here"


def _both(a: UntrustedInput, b: UntrustedInput) -> UntrustedInput:
    ids = *a.ids, *b.ids
    due = min(a.first_due, b.first_due)
    return a._replace(tasks=a.tasks + b.tasks, first_due=due, ids=(min(ids), max(ids)))


# -- Reads the FAILED tasks that were due last, and tasks that failed runs were counted for -------


#: The most tasks that `failed_rows` reads.
MOST_FAILED = 500


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
    """Return the FAILED tasks that were due last, at most `MOST_FAILED`."""
    where = Filter(status=frozenset({Status.FAILED}))
    query = select(*_columns(schema))
    rows = database.autocommitted(
        lambda c: first_page(c, query, schema.tasks, where, MOST_FAILED, True)
    )
    return list(map(_row, rows))


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
        codes = [(t.c.error_stack.startswith(begin), code) for begin, code in DEFERRALS.items()]
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
