"""What a sweep reads and writes: which rows are overdue, near or abandoned, and which schedules are
due."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Table,
    and_,
    case,
    delete,
    exc,
    exists,
    func,
    insert,
    not_,
    null,
    select,
    update,
)

from delaytasks.db.bulk_moves import Audit
from delaytasks.db.database import Database
from delaytasks.db.leases import is_abandoned, recover_rows
from delaytasks.db.policy_rows import is_paused
from delaytasks.db.rows import check_row_count
from delaytasks.db.schema import Schema
from delaytasks.db.searching import (
    distinct_values,
    has_status,
    levels_of,
    queue_levels,
    queues_after,
    waits_between,
)
from delaytasks.db.settlements import Attempts
from delaytasks.db.task_keys import TaskKeys
from delaytasks.db.types import db_now, db_now_plus, is_narrow, is_past, once, unindexed
from delaytasks.db.worker_table import EXPIRED_PER_SWEEP
from delaytasks.model.clock import to_us
from delaytasks.model.moves import FINISHED, Status
from delaytasks.model.policies import NO_POLICIES, Policies
from delaytasks.model.task import Entry, Level, OverdueGroup, QueuePlace, Recovered
from delaytasks.model.text import DEFER_MAX_S, DEFERRALS

#: Spreads ids over the sweep partitions, since the ids of one producer differ mostly in their low
#: bits.
_PARTITION_PRIME = 1_000_003


class SweepQueries:
    def __init__(self, database: Database, schema: Schema, timer: str) -> None:
        self._db = database
        self._schema = schema
        self._timer = timer
        self._t = schema.tasks
        self._s = schema.sweeps

    def begin_sweep(
        self, sweep_partition: int, sweep_partitions: int, at_least_s: float
    ) -> datetime | None:
        """Begin a sweep of one sweep partition.

        Returns up to which due time rows were armed, or None if another process has just swept. Any
        number of processes may ask: the row's lock lets one sweep.
        """
        s = self._s
        stored = self._stored_count(sweep_partitions)
        mine = and_(s.c.sweep_partition == sweep_partition, s.c.sweep_partitions == stored)

        def work(on: Any) -> datetime | None:
            row = on.execute(select(s).where(mine).with_for_update()).first()
            now: datetime = on.execute(select(db_now())).scalar_one()
            armed_until, values = now, {"swept_at": now, "timer": self._timer}
            if row is None:
                key = {"sweep_partition": sweep_partition, "sweep_partitions": stored}
                on.execute(insert(s).values(**key, **values, armed_until=now))
                return now
            is_set_back = row.swept_at > now  # or a server took over whose clock is behind
            if not is_set_back and row.swept_at > now - timedelta(seconds=at_least_s):
                return None
            # Our workers do not receive what another timer keeps, so rows are armed again.
            if not is_set_back and row.timer == self._timer:
                armed_until = row.armed_until
            change = update(s).where(mine).values(**values, armed_until=armed_until)
            check_row_count(on.execute(change).rowcount, 1, f"sweep partition {sweep_partition}")
            return armed_until

        try:
            return self._db.transaction(work)
        except Exception as error:
            if isinstance(error.__cause__, exc.IntegrityError):
                return None  # another process made the first sweep
            raise

    def mark_armed(
        self, sweep_partition: int, sweep_partitions: int, since: datetime, until: datetime
    ) -> None:
        """Record that rows are armed until `until`, unless `forget_armed` was called meanwhile."""
        s = self._s
        # No row matches after `forget_armed`, and then the next sweep arms again.
        change = update(s).where(
            s.c.sweep_partition == sweep_partition,
            s.c.sweep_partitions == self._stored_count(sweep_partitions),
            s.c.armed_until == since,
        )
        self._db.autocommitted(lambda c: c.execute(change.values(armed_until=until)))

    def forget_armed(self) -> None:
        """Let the next sweeps arm again, since a worker or a broker may have lost what was
        armed."""
        s = self._s
        forget = update(s).where(s.c.armed_until > db_now()).values(armed_until=db_now())
        self._db.autocommitted(lambda c: c.execute(forget))

    def stale_sweep_partitions(self, sweep_partitions: int, age_s: float) -> list[int]:
        """Return the sweep partitions that were not swept for `age_s` seconds."""
        s = self._s
        # A sweep in the future was made with a clock that has been corrected since.
        lately = and_(s.c.swept_at > db_now_plus(-age_s), s.c.swept_at <= db_now())
        fresh = select(s.c.sweep_partition).where(
            s.c.sweep_partitions == self._stored_count(sweep_partitions), lately
        )
        swept = {row[0] for row in self._db.rows(fresh)}
        return sorted(set(range(sweep_partitions)) - swept)

    def _stored_count(self, sweep_partitions: int) -> int:
        """Return the number of sweep partitions as the rows of sweeps store it.

        Without a broker (`timer="direct"`) it is negative. A sweep records up to when rows are
        armed, and a sweep without a broker arms nothing for workers with one. Therefore each of the
        two kinds needs rows of its own, and the key of a row is the partition and this number.
        """
        return -sweep_partitions if self._timer == "direct" else sweep_partitions

    def due_between(
        self,
        since: datetime,
        until: datetime,
        sweep_partition: int,
        sweep_partitions: int,
        policies: Policies = NO_POLICIES,
    ) -> Iterator[list[Entry]]:
        """Yield waiting rows due in (since, until] that are not paused, by due time, in batches."""
        query = self._due_between(since, until, policies)
        if sweep_partitions > 1:
            query = query.where(
                (self._t.c.id % _PARTITION_PRIME) % sweep_partitions == sweep_partition
            )
        for rows in self._db.stream(query, size=1000):
            yield _entries(rows)

    def first_due_between(
        self, since: datetime, until: datetime, limit: int, policies: Policies = NO_POLICIES
    ) -> list[Entry]:
        """Return the first rows that `due_between` yields, by one statement.

        For callers that ask often.
        """
        query = self._due_between(since, until, policies).limit(limit)
        return _entries(self._db.rows(query))

    def _due_between(self, since: datetime, until: datetime, policies: Policies) -> Select[Any]:
        t = self._t
        query = select(t.c.id, t.c.version, t.c.expected_time, t.c.queue, t.c.priority)
        query = query.where(waits_between(t, since, until)).order_by(t.c.expected_time)
        if policies.has_pauses:
            query = query.where(not_(is_paused(self._schema)))
        return query

    def levels(self, late_s: float, queues: Iterable[str] | None = None) -> list[Level]:
        """Return the levels with rows late by more than `late_s`, the highest priority first.

        Queues with tasks in a waitlist are included. The cost grows with the number of levels, not
        of rows. If that number has to be bounded, name the `queues`.
        """
        t, entry = self._t, self._schema.waitlists

        def work(on: Any) -> list[Level]:
            if queues is None:
                waiting = queue_levels(on, t, Status.NOT_COMPLETE)
                in_waitlist = {*distinct_values(on, entry.c.queue)}
            else:
                waiting = [one for q in queues for one in levels_of(on, t, Status.NOT_COMPLETE, q)]
                of_queue = partial(distinct_values, on, entry.c.queue)
                in_waitlist = {q for q in queues if any(of_queue(entry.c.queue == q))}
            late = [
                level
                for level in waiting
                if on.execute(select(exists().where(_is_late(t, level, late_s)))).scalar()
            ]
            late += [Level(queue, 0) for queue in in_waitlist - {level.queue for level in late}]
            return sorted(late, key=lambda level: (-level.priority, level.queue))

        return self._db.autocommitted(work)

    def next_queues(self, after: QueuePlace, most: int) -> tuple[set[str], QueuePlace]:
        """Return some of the queues in which tasks wait, and where the next call continues.

        A call returns at most `most` queues of the tasks and `most` queues of the waitlists. A
        caller that passes the returned place to its next call meets every queue, one part after
        another, and then begins again.
        """
        waitlist_queue = self._schema.waitlists.c.queue

        def work(connection: Any) -> tuple[set[str], QueuePlace]:
            tasks = queues_after(connection, self._t, Status.NOT_COMPLETE, after.tasks, most)
            later = None if after.waitlists is None else waitlist_queue > after.waitlists
            waitlists = list(islice(distinct_values(connection, waitlist_queue, later), most))
            # A part that is not full was the last one.
            place = QueuePlace(
                *(part[-1] if len(part) == most else None for part in (tasks, waitlists))
            )
            return {*tasks, *waitlists}, place

        return self._db.autocommitted(work)

    def recover(self, max_lost_leases: int, limit: int, lost_s: float) -> Recovered:
        """Recover RUNNING rows whose lease is over, or whose worker is lost since `lost_s` seconds.

        A worker that was only paused reports again, and is not lost then. It keeps the rows that it
        has claimed since it was marked as lost.
        """
        w = self._schema.workers.c
        is_silent = and_(w.lost_at.is_not(None), w.seen_at < db_now_plus(-lost_s))
        lost = select(w.name, w.lost_at).where(is_silent).order_by(w.lost_at.desc())
        which = is_abandoned(self._t, self._db.rows(lost.limit(EXPIRED_PER_SWEEP)))
        return recover_rows(self._db, self._schema, which, max_lost_leases, limit)

    def purge(self, older_than_s: float, limit: int) -> int:
        """Delete up to `limit` finished rows that have not changed for `older_than_s` seconds."""
        t = self._t
        is_finished = unindexed(t.c.status).in_([int(s) for s in FINISHED])
        old = and_(is_finished, t.c.update_time < db_now_plus(-older_than_s))
        # The index on expected_time finds old rows, since a row is due before it runs. A row that
        # was cancelled early counts from its due time.
        query = select(t.c.id, t.c.tag, t.c.task_key).where(old)
        query = query.order_by(t.c.expected_time).limit(limit)

        keys, attempts = TaskKeys(self._db, self._schema), Attempts(self._db, self._schema)

        def work(on: Any) -> int:
            # A separate query: planners that know the instant can estimate how few rows are older.
            since = on.execute(select(db_now_plus(-older_than_s))).scalar_one()
            rows = on.execute(query.where(t.c.expected_time < since)).all()
            if not rows:
                return 0
            ids = t.c.id.in_(sorted(row[0] for row in rows))
            # A task that another program finished still owns its key.
            locked = keys.lock_all(on, [row for row in rows if row[2] is not None])
            purged = int(on.execute(delete(t).where(ids, old)).rowcount)
            # Some may have been retried meanwhile.
            left = set(on.execute(select(t.c.id).where(ids)).scalars())
            attempts.forget(on, [row[0] for row in rows if row[0] not in left])
            keys.release_all(on, [row for row in locked if row[0] not in left])
            return purged

        return self._db.transaction(work)

    def purge_audit(self, older_than_s: float) -> None:
        Audit(self._db, self._schema).purge(older_than_s)


def _is_late(t: Table, level: Level, late_s: float) -> ColumnElement[bool]:
    """The condition for waiting rows of a level that are late by more than `late_s`."""
    here = is_narrow(t.c.queue, level.queue), t.c.priority == level.priority
    is_past_due = is_past(t.c.expected_time, db_now_plus(-late_s))
    return and_(has_status(t, Status.NOT_COMPLETE), *here, is_past_due)


def _entries(rows: Iterable[Any]) -> list[Entry]:
    return [Entry(row[0], row[1], to_us(row[2]), row[3], row[4]) for row in rows]


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
                .where(_is_late(t, level, late_s))
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


# -- due schedules --------------------------------------------------------------------------------

# Whether the package of recurring schedules is needed: every sweep asks, and most find none.


class DueSchedules:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._r = schema.recurring.c

    def exist(self, within_s: float) -> bool:
        """Return whether a schedule needs tasks that are due within `within_s` seconds."""
        # The bound of NULLs helps MySQL, whose index begins with them.
        is_due = is_past(self._r.next_at, db_now_plus(within_s))
        return bool(self._read(exists().where(is_due, self._r.next_at.is_not(None))))

    def first_at(self) -> datetime | None:
        """Return the first occurrence that has no task yet; None if no schedule goes on."""
        first: datetime | None = self._read(func.min(self._r.next_at))
        return first

    def has_declared(self) -> bool:
        """Return whether code has declared a schedule that is stored here."""
        return bool(self._read(exists().where(self._r.is_declared)))

    def _read(self, expression: Any) -> Any:
        return self._db.autocommitted(lambda c: c.execute(select(expression)).scalar())
