"""The queries of the sweep: rows due within the horizon, overdue rows, abandoned rows, and old
ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from itertools import islice
from typing import Any

from sqlalchemy import Select, and_, delete, exc, exists, insert, not_, select, update

from delaytasks.core.clock import to_us
from delaytasks.core.interfaces import Entry, Level, QueuePlace, Recovered
from delaytasks.core.policies import NO_POLICIES, Policies
from delaytasks.core.states import FINISHED, Status
from delaytasks.storage.abandoned_rows import AbandonedRows, lease_is_over
from delaytasks.storage.attempts import Attempts
from delaytasks.storage.audit import Audit
from delaytasks.storage.database import Database
from delaytasks.storage.policies import is_paused
from delaytasks.storage.queue_levels import (
    levels,
    levels_of,
    queues_after,
    steps,
    waits_between,
)
from delaytasks.storage.row_counts import check_row_count
from delaytasks.storage.schema import Schema
from delaytasks.storage.task_keys import TaskKeys
from delaytasks.storage.types import db_now, db_now_plus, is_narrow, is_past, unindexed

#: Spreads ids over the sweep partitions, since the ids of one producer differ mostly in their low
#: bits.
_PARTITION_PRIME = 1_000_003


class SweepQueries:
    def __init__(self, database: Database, schema: Schema, timer: str) -> None:
        self._db = database
        self._timer = timer
        self._abandoned = AbandonedRows(database, schema)
        self._keys = TaskKeys(database, schema)
        self._attempts = Attempts(database, schema)
        self._audit = Audit(database, schema)
        self._t = schema.tasks
        self._s = schema.sweeps
        self._waitlist = schema.waitlists
        self._is_paused = is_paused(schema)

    def begin_sweep(
        self, sweep_partition: int, sweep_partitions: int, at_least_s: float
    ) -> datetime | None:
        """Begin a sweep of one sweep partition.

        Returns up to which due time rows were armed, or None if another process has just swept. Any
        number of processes may ask: the row's lock lets one sweep.
        """
        s, stored = self._s, self._stored_count(sweep_partitions)

        def work(connection: Any) -> datetime | None:
            mine = and_(s.c.sweep_partition == sweep_partition, s.c.sweep_partitions == stored)
            found = select(s.c.swept_at, s.c.armed_until, s.c.timer).where(mine).with_for_update()
            row = connection.execute(found).first()
            now: datetime = connection.execute(select(db_now())).scalar_one()
            if row is None:
                new = {
                    "sweep_partition": sweep_partition,
                    "sweep_partitions": stored,
                    "swept_at": now,
                    "armed_until": now,
                    "timer": self._timer,
                }
                connection.execute(insert(s).values(new))
                return now
            is_set_back = row.swept_at > now  # or a server took over whose clock is behind
            if not is_set_back and row.swept_at > now - timedelta(seconds=at_least_s):
                return None
            # Our workers do not receive what another timer keeps, so rows are armed again.
            armed_until = now if is_set_back or row.timer != self._timer else row.armed_until
            values = {"swept_at": now, "armed_until": armed_until, "timer": self._timer}
            changed = connection.execute(update(s).where(mine).values(values)).rowcount
            check_row_count(changed, 1, f"sweep partition {sweep_partition}")
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
        mine = and_(
            s.c.sweep_partition == sweep_partition,
            s.c.sweep_partitions == self._stored_count(sweep_partitions),
            s.c.armed_until == since,
        )
        # No row matches after `forget_armed`, and then the next sweep arms again.
        statement = update(s).where(mine).values(armed_until=until)
        self._db.autocommitted(lambda c: c.execute(statement))

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
            query = query.where(not_(self._is_paused))
        return query

    def levels(self, late_s: float) -> list[Level]:
        """Return the levels with rows late by more than `late_s`, the highest priority first.

        Queues with tasks in a waitlist are included. The cost grows with the number of levels, not
        of rows. If that number has to be bounded, call `levels_of`.
        """
        waitlist_queue = self._waitlist.c.queue

        def work(connection: Any) -> list[Level]:
            waiting = levels(connection, self._t, Status.NOT_COMPLETE)
            return self._late(connection, waiting, steps(connection, waitlist_queue), late_s)

        return self._db.autocommitted(work)

    def levels_of(self, queues: Iterable[str], late_s: float) -> list[Level]:
        """Return what `levels` returns for these queues."""
        t, waitlist_queue = self._t, self._waitlist.c.queue

        def work(connection: Any) -> list[Level]:
            found: list[Level] = []
            for queue in queues:
                waiting = levels_of(connection, t, Status.NOT_COMPLETE, queue)
                in_waitlist = steps(connection, waitlist_queue, waitlist_queue == queue)
                found += self._late(connection, waiting, in_waitlist, late_s)
            return found

        return self._db.autocommitted(work)

    def next_queues(self, after: QueuePlace, most: int) -> tuple[set[str], QueuePlace]:
        """Return some of the queues in which tasks wait, and where the next call continues.

        A call returns at most `most` queues of the tasks and `most` queues of the waitlists. A
        caller that passes the returned place to its next call meets every queue, one part after
        another, and then begins again.
        """
        waitlist_queue = self._waitlist.c.queue

        def work(connection: Any) -> tuple[set[str], QueuePlace]:
            tasks = queues_after(connection, self._t, Status.NOT_COMPLETE, after.tasks, most)
            later = None if after.waitlists is None else waitlist_queue > after.waitlists
            waitlists = list(islice(steps(connection, waitlist_queue, later), most))
            # A part that is not full was the last one.
            place = QueuePlace(
                *(part[-1] if len(part) == most else None for part in (tasks, waitlists))
            )
            return {*tasks, *waitlists}, place

        return self._db.autocommitted(work)

    def _late(
        self, on: Any, waiting: Iterable[Level], in_waitlist: Iterable[str], late_s: float
    ) -> list[Level]:
        t = self._t

        def is_late(level: Level) -> bool:
            waits = t.c.status == int(Status.NOT_COMPLETE)
            here = is_narrow(t.c.queue, level.queue), t.c.priority == level.priority
            late = and_(waits, *here, is_past(t.c.expected_time, db_now_plus(-late_s)))
            return bool(on.execute(select(exists().where(late))).scalar())

        found = [level for level in waiting if is_late(level)]
        known = {level.queue for level in found}
        found += [Level(queue, 0) for queue in in_waitlist if queue not in known]
        return sorted(found, key=lambda level: (-level.priority, level.queue))

    def recover(self, max_lost_leases: int, limit: int) -> Recovered:
        """Recover RUNNING rows whose lease is over: their worker is dead or stuck."""
        return self._abandoned.recover(lease_is_over(self._t), max_lost_leases, limit)

    def purge(self, older_than_s: float, limit: int) -> int:
        """Delete up to `limit` finished rows that have not changed for `older_than_s` seconds."""
        t = self._t
        is_finished = unindexed(t.c.status).in_([int(s) for s in FINISHED])
        old = and_(is_finished, t.c.update_time < db_now_plus(-older_than_s))
        # The index on expected_time finds old rows, since a row is due before it runs. A row that
        # was cancelled early counts from its due time.
        query = select(t.c.id, t.c.tag, t.c.task_key).where(old)
        query = query.order_by(t.c.expected_time).limit(limit)

        def work(connection: Any) -> int:
            # A separate query: planners that know the instant can estimate how few rows are older.
            since = connection.execute(select(db_now_plus(-older_than_s))).scalar_one()
            rows = connection.execute(query.where(t.c.expected_time < since)).all()
            if not rows:
                return 0
            ids = t.c.id.in_(sorted(row[0] for row in rows))
            # A task that another program finished still owns its key.
            keyed = [row for row in rows if row[2] is not None]
            locked = self._keys.lock_all(connection, keyed)
            purged = int(connection.execute(delete(t).where(ids, old)).rowcount)
            # Some may have been retried meanwhile.
            left = set(connection.execute(select(t.c.id).where(ids)).scalars())
            self._attempts.forget(connection, [row[0] for row in rows if row[0] not in left])
            self._keys.release_all(connection, [row for row in locked if row[0] not in left])
            return purged

        return self._db.transaction(work)

    def purge_audit(self, older_than_s: float) -> None:
        self._audit.purge(older_than_s)


def _entries(rows: Iterable[Any]) -> list[Entry]:
    return [Entry(row[0], row[1], to_us(row[2]), row[3], row[4]) for row in rows]
