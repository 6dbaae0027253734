"""Bounded queries for people: counts, live and failed tasks, changes, and facts for `why`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Select, and_, func, literal, null, select, text

from delaytasks.db.bulk_moves import Bulk
from delaytasks.db.database import Database
from delaytasks.db.leases import lease_is_over
from delaytasks.db.policy_rows import is_entry_of
from delaytasks.db.row_lists import by_id, listed
from delaytasks.db.rows import COLUMNS, task_of
from delaytasks.db.schema import BODY, Schema
from delaytasks.db.searching import (
    conditions,
    distinct_values,
    estimate_rows,
    first_page,
    has_status,
    levels_of,
    queues_after,
)
from delaytasks.db.store import Store
from delaytasks.db.sweep_queries import OverdueRows
from delaytasks.db.types import db_now_plus, for_database
from delaytasks.model.body import MARK_LENGTH, NO_NAME, PREFIX, marks_of, name_in, names_of
from delaytasks.model.clock import Clock, from_us
from delaytasks.model.filters import Filter
from delaytasks.model.ids import MAX_ID, first_id
from delaytasks.model.inputs import show_duration
from delaytasks.model.moves import LIVE, Status
from delaytasks.model.task import DelayedTask, Level, Pending, UntrustedInput
from delaytasks.model.why import AuditFacts, Facts, ScheduleFacts, TransportFacts
from delaytasks.settings import Settings

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
        query = select(func.count()).where(lease_is_over(self._t))
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
        for rows in self._bulk.having(LIVE, [t.tag, mark, t.expected_time, t.id], *needs):
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


# -- Gathers the facts that decide why a task has not run (`model/why.py`) -------------------------


_NO_ERRORS = TransportFacts()
#: A waitlist is counted up to this number.
MOST_WAITLIST_COUNTED = 10_000
#: Bulk operations that may have cancelled a task: those that ran at that time.
MOST_OPERATIONS = 5
#: The ids of a minute: a cancel and its log entry have the times of the clocks of two machines.
IDS_AROUND = first_id(from_us(60_000_000)) - first_id(from_us(0))
#: The key of a task that a recurring schedule has made: its name and the time of the occurrence.
_RECURRING_KEY = re.compile(r"(.+)@[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+Z")


class FactReader:
    """Counts rows by status, queue and tag."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._db, self._schema = store.database, store.schema
        self._settings = settings

    def of(self, task: DelayedTask, transport: TransportFacts = _NO_ERRORS) -> Facts:
        """Return the facts that `why` needs about the task.

        Each is read from an index, except for the operation that has cancelled the task.
        """
        settings = self._settings
        now, offset_s = self._now()
        policies = self._store.policies.of(task.tag, task.queue)
        limited = any(policy.has_limits for policy in policies)
        swept = [s.at for s in Stats(self._db, self._schema).sweeps(settings.sweep_partitions)]
        last = min((at for at in swept if at is not None), default=None)
        is_in_waitlist = task.status is Status.HELD and self._is_in_waitlist(task)
        return Facts(
            task,
            now,
            offset_s,
            self._store.workers.registered(now, settings.silent_s),
            policies,
            is_in_waitlist=is_in_waitlist,
            waitlist_tasks=self._waitlist_tasks(task) if is_in_waitlist else 0,
            running=self._running_tasks(task.tag) if limited else 0,
            running_of_key=self._running_tasks(task.tag, task.limit_key)
            if limited and task.limit_key
            else 0,
            swept_s=None if last is None else (now - last).total_seconds(),
            grace_s=settings.grace_s,
            self_sweep_s=settings.self_sweep_s,
            namespace=settings.namespace,
            keys=names_of(settings.encryption_keys),
            schedule=self._schedule(task),
            cancelled_by=self._cancelled_by(task) if task.status is Status.CANCELLED else None,
            transport=transport,
        )

    def _now(self) -> tuple[datetime, float]:
        """Return the time of the database, and how far the clock of this machine is ahead of it."""
        clock = Clock(lambda _: self._store.tasks.now())
        now = clock.certain_now()
        return now, clock.offset_s

    def _is_in_waitlist(self, task: DelayedTask) -> bool:
        waitlist = self._schema.waitlists
        query = select(waitlist.c.task_id).where(is_entry_of(waitlist, task)).limit(1)
        return bool(self._db.rows(query))

    def _waitlist_tasks(self, task: DelayedTask) -> int:
        w = self._schema.waitlists.c
        mine = select(w.task_id).where(w.queue == task.queue, w.tag == task.tag)
        first = mine.limit(MOST_WAITLIST_COUNTED).subquery()
        query = select(func.count()).select_from(first)
        return self._db.autocommitted(lambda c: int(c.execute(query).scalar_one()))

    def _schedule(self, task: DelayedTask) -> ScheduleFacts | None:
        match = _RECURRING_KEY.fullmatch(task.key or "")
        if match is None:
            return None
        r = self._schema.recurring.c
        columns = r.name, r.timing, r.is_paused, r.next_at
        rows = self._db.rows(select(*columns).where(r.name == match[1], r.tag == task.tag))
        return ScheduleFacts(*rows[0]) if rows else None

    def _cancelled_by(self, task: DelayedTask) -> AuditFacts | None:
        """Return the log entry of the action that has cancelled the task."""
        if task.update_time is None:
            return None
        return self._cancelled_alone(task, task.update_time) or self._cancelled_with_others(
            task, task.update_time
        )

    def _cancelled_alone(self, task: DelayedTask, at: datetime) -> AuditFacts | None:
        """Return the entry of a cancel of this task, which a person made in the console.

        The ids of the entries contain their times, so the primary key leads to those of that time.
        """
        a, near = self._schema.audit.c, min(first_id(at), MAX_ID - IDS_AROUND)
        is_near = a.id >= near - IDS_AROUND, a.id < near + IDS_AROUND
        is_cancel = a.action == "cancel_task", a.changed > 0
        is_mine = a.filter.contains(f'"id":"{task.id}"', autoescape=True)
        query = select(a.id, a.actor).where(*is_near, *is_cancel, is_mine)
        rows = self._db.rows(query.order_by(a.id.desc()).limit(1))
        return AuditFacts(*rows[0]) if rows else None

    def _cancelled_with_others(self, task: DelayedTask, at: datetime) -> AuditFacts | None:
        """Return the bulk operation that has cancelled the task.

        No index leads to it, so only the steps of the operations of that time are read.
        """
        a, step = self._schema.audit.c, self._schema.audit_steps.c
        has_run_then = a.started_at <= at, (a.finished_at.is_(None)) | (a.finished_at >= at)
        operations = select(a.id, a.actor).where(a.action == "cancel", *has_run_then)
        newest = operations.order_by(a.id.desc()).limit(MOST_OPERATIONS)
        has_moved = step.moved.contains(f"[{task.id},{task.version}]", autoescape=True)
        for id, actor in self._db.rows(newest):
            mine = select(step.step).where(step.audit_id == id, has_moved).limit(1)
            if self._db.rows(mine):
                return AuditFacts(id, actor)
        return None

    def _running_tasks(self, tag: str, key: str | None = None) -> int:
        t = self._schema.tasks
        query = select(func.count()).where(has_status(t, Status.RUNNING), t.c.tag == tag)
        if key is not None:
            query = query.where(t.c.limit_key == key)
        return self._db.autocommitted(lambda c: int(c.execute(query).scalar_one()))


# -- Reads the rows that matter now: running, overdue, due soon, held, and ended lately -----------

# Each part of a read looks at a bounded number of rows through an index, so the cost does not grow
# with the table.


#: The rows that each part of a read looks at.
MOST_LIVE_ROWS = 5_000
#: Queues among which waiting rows are looked for.
MOST_LIVE_QUEUES = 100
#: "Soon" and "lately" are a minute.
LIVE_PERIOD = timedelta(minutes=1)
_COLUMNS = "queue tag worker status expected_time due_time execution_time update_time runs".split()


class LiveRow(NamedTuple):
    queue: str
    tag: str
    worker: str | None
    status: Status
    expected_time: datetime
    due_time: datetime | None
    execution_time: datetime | None
    update_time: datetime
    runs: int

    @property
    def due(self) -> datetime:
        return self.due_time or self.expected_time


class Live(NamedTuple):
    """The rows at one time."""

    now: datetime
    running: Sequence[LiveRow]
    #: Overdue rows, and rows that are due within a minute.
    waiting: Sequence[LiveRow]
    held: Sequence[LiveRow]
    #: Rows that were due, and ended, within the last minute.
    ended: Sequence[LiveRow]
    #: Whether a part has more rows than it looked at.
    is_capped: bool


class LiveRows:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._t = t = schema.tasks
        self._overdue = OverdueRows(database, schema)
        self._select = select(*(t.c[name] for name in _COLUMNS))

    def read(self, late_s: float) -> Live:
        """Read the rows. Those that are late by more than `late_s` are overdue."""
        now = self._db.now()
        return self._db.autocommitted(lambda connection: self._read(connection, now, late_s))

    def _read(self, connection: Connection, now: datetime, late_s: float) -> Live:
        t = self._t.c
        running = self._rows(connection, has_status(self._t, Status.RUNNING))
        held = self._rows(connection, has_status(self._t, Status.HELD))
        waiting: list[LiveRow] = []
        is_capped = False
        for level in self._levels(connection):
            found = self._rows(
                connection, *self._due(level, now + LIVE_PERIOD), order=t.expected_time
            )
            is_capped |= len(found) >= MOST_LIVE_ROWS
            waiting += found
        # Overdue rows that a worker has deferred for longer than a minute.
        is_later = t.expected_time > now + LIVE_PERIOD
        waiting += self._rows(connection, self._overdue.deferred(late_s), is_later)
        lately = t.expected_time > now - LIVE_PERIOD, t.expected_time <= now
        due = self._rows(connection, *lately, order=t.expected_time.desc())
        is_capped |= any(len(part) >= MOST_LIVE_ROWS for part in (running, held, due))
        has_ended = {Status.DONE, Status.FAILED, Status.CANCELLED}
        ended = [row for row in due if row.status in has_ended]
        return Live(now, running, waiting, held, ended, is_capped)

    def _levels(self, connection: Connection) -> Iterator[Level]:
        for queue in queues_after(connection, self._t, Status.NOT_COMPLETE, None, MOST_LIVE_QUEUES):
            yield from levels_of(connection, self._t, Status.NOT_COMPLETE, queue)

    def _due(self, level: Level, until: datetime) -> Sequence[ColumnElement[bool]]:
        t = self._t.c
        return (
            has_status(self._t, Status.NOT_COMPLETE),
            t.queue == level.queue,
            t.priority == level.priority,
            t.expected_time <= until,
        )

    def _rows(
        self, connection: Connection, *where: ColumnElement[bool], order: Any = None
    ) -> list[LiveRow]:
        query: Select[Any] = self._select.where(*where).limit(MOST_LIVE_ROWS)
        if order is not None:
            query = query.order_by(order)
        found = connection.execute(query)
        return [LiveRow._make((*row[:3], Status(row[3]), *row[4:])) for row in found]


# -- Counts the unfinished tasks of each tag, among a bounded number of rows ----------------------


#: The rows of each status that are read in each queue, and the queues.
MOST_TAG_ROWS, MOST_TAG_QUEUES = 1_000, 100


class LiveTags(NamedTuple):
    """The number of unfinished tasks of each tag."""

    tasks: dict[str, int]
    #: Whether there are rows that were not read, so that each number is a minimum.
    is_capped: bool


def live_tags(connection: Connection, schema: Schema) -> LiveTags:
    """Count the first rows of each queue. Each statement reads a bounded part of an index."""
    found: Counter[str] = Counter()
    is_capped = False
    for status in sorted(LIVE):
        queues = distinct_values(connection, schema.tasks.c.queue, has_status(schema.tasks, status))
        for number, queue in enumerate(islice(queues, MOST_TAG_QUEUES + 1)):
            tags = [] if number == MOST_TAG_QUEUES else _tags(connection, schema, status, queue)
            is_capped = is_capped or number == MOST_TAG_QUEUES or len(tags) > MOST_TAG_ROWS
            found.update(tags[:MOST_TAG_ROWS])
    return LiveTags(dict(sorted(found.items())), is_capped)


def _tags(connection: Connection, schema: Schema, status: Status, queue: str) -> list[str]:
    """Return the tags of the first rows of a queue, and of one more if there are more."""
    t = schema.tasks
    query = select(t.c.tag).where(has_status(t, status), t.c.queue == queue)
    # The order of the index: otherwise PostgreSQL may read the whole table to find the rows.
    query = query.order_by(t.c.priority, t.c.expected_time).limit(MOST_TAG_ROWS + 1)
    return list(connection.scalars(query))


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


# -- Reads the rows that have changed lately, at a cost that does not grow with the table ---------

# No index leads to the time of a change, since each move would have to maintain it. Therefore the
# rows are found where changes happen: among the newest ids, among the rows that were due lately,
# among those that run, and among those that the caller has seen before.


#: The rows that each part of a read looks at.
MOST_CHANGES = 1000
#: Rows that were due for a longer time are found only while they run, or if they were seen before.
LATELY_S = 60.0
#: Rows that are due a little later may run soon.
SOON_S = 1.0


class FoundChanges(NamedTuple):
    """The changed rows, without their bodies and results."""

    tasks: Sequence[DelayedTask]
    #: Whether there may be more changes than the read has looked at.
    is_incomplete: bool


class ChangeReader:
    def __init__(self, database: Database, schema: Schema, where: Filter) -> None:
        self._db = database
        self._schema = schema
        self._t = t = schema.tasks
        without = {"message_body": literal(""), "result": null()}
        read: list[ColumnElement[Any]] = [
            without[name].label(name) if name in without else t.c[name] for name in COLUMNS
        ]
        wanted = listed(database, t.c.id, "ids"), *conditions(t, where, database.can)
        self._rows = select(*read).where(*wanted)
        self._key = where.key

    def now(self) -> datetime:
        return self._db.now()

    def read(self, since: datetime, now: datetime, seen: Iterable[int]) -> FoundChanges:
        """Return the rows that have changed since then, of the rows `seen` and of all others."""

        def work(connection: Connection) -> FoundChanges:
            ids, is_incomplete = set(seen), False
            for part in self._parts(since, now):
                found = connection.execute(part.limit(MOST_CHANGES)).scalars().all()
                is_incomplete |= len(found) == MOST_CHANGES
                ids.update(found)
            rows = connection.execute(
                self._rows.where(self._t.c.update_time >= since), {"ids": list(ids)}
            ).all()
            return FoundChanges([task_of(row, self._schema) for row in rows], is_incomplete)

        return self._db.autocommitted(work)

    def _parts(self, since: datetime, now: datetime) -> Sequence[Select[Any]]:
        """Return queries for the ids of rows that may have changed. Each uses an index."""
        t = self._t.c
        if self._key is not None:
            mine = select(t.id).where(t.task_key == self._key)
            return [mine.order_by(t.expected_time.desc())]
        lately, soon = now - timedelta(seconds=LATELY_S), now + timedelta(seconds=SOON_S)
        is_due = and_(t.expected_time > lately, t.expected_time <= soon)
        return [
            select(t.id).where(t.id >= first_id(since)).order_by(t.id.desc()),
            select(t.id).where(is_due).order_by(t.expected_time.desc()),
            select(t.id).where(has_status(self._t, Status.RUNNING)),
        ]
