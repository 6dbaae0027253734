"""What was lost or is overdue: the leases of rows that run, the workers that are alive, and what a
sweep reads and writes."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, NamedTuple
from zlib import crc32

from sqlalchemy import (
    ColumnElement,
    Select,
    Table,
    Update,
    and_,
    case,
    delete,
    exc,
    exists,
    func,
    insert,
    or_,
    select,
    update,
)

from delaytasks.db.database import Database
from delaytasks.db.schema import (
    VERSION_LENGTH,
    Schema,
    by_index,
    check_row_count,
    columns,
    hot_index,
    move_locked,
    next_version,
    one_more,
)
from delaytasks.db.statements import Insert, task_of
from delaytasks.db.task_rows import (
    Attempts,
    TaskKeys,
    distinct_values,
    has_status,
    levels_of,
    queues_after,
    waits_between,
)
from delaytasks.db.types import db_now, db_now_plus, is_narrow, is_past, is_rare, unindexed
from delaytasks.model.clock import json_fields, to_us
from delaytasks.model.inputs import serves
from delaytasks.model.moves import FINISHED, MOVES, Status
from delaytasks.model.task import Entry, Level, QueuePlace, Recovered
from delaytasks.model.text import count, installed_version

# -- Recovers rows whose worker died, or lost its lease, while they ran ---------------------------

# A recovered row waits again, or fails if it has lost its lease too often in a row.


LEASE_LOST = "the worker died, or lost its lease, while this attempt ran"
TOO_MANY_LOST_LEASES = (
    "gave up: the worker died or lost its lease {times} in a row while this task ran"
)
#: Appended to both texts if the time limit of the task's tag was over.
TIMED_OUT = "; its time limit of {s:g} s was over"


def _reason(limit_s: float | None, began: datetime | None, now: datetime) -> str:
    if limit_s is None or began is None or (now - began).total_seconds() < limit_s:
        return ""
    return TIMED_OUT.format(s=limit_s)


def is_abandoned(tasks: Any, lost: Iterable[Any] = ()) -> ColumnElement[bool]:
    """The condition for a RUNNING row whose lease is over, or that a worker claimed before it was
    lost. `lost` has the names of such workers, and when they were lost.
    """
    runs = is_rare(tasks.c.status == int(Status.RUNNING))
    reasons = [tasks.c.lease_until < db_now()]
    for name, lost_at in lost:
        process = f"{name}/"
        is_its = func.substr(tasks.c.worker, 1, len(process)) == process
        reasons.append(and_(is_its, tasks.c.update_time <= lost_at))
    return and_(runs, or_(*reasons))


def _recovery(tasks: Any, max_lost_leases: int, reason: str) -> Update:
    """RUNNING → NOT_COMPLETE, or FAILED after `max_lost_leases` lost leases in a row.

    MySQL assigns from left to right, so `lapses` comes last: the other columns use its old value.
    """
    is_last = tasks.c.lapses >= max_lost_leases - 1
    error = TOO_MANY_LOST_LEASES.format(times=count(max_lost_leases, "time")) + reason
    failed, waiting = int(MOVES["fail_worker_lost"].target), int(MOVES["recover"].target)
    return update(tasks).ordered_values(
        (tasks.c.status, case((is_last, failed), else_=waiting)),
        (tasks.c.version, next_version(tasks.c.version)),
        (tasks.c.error_stack, case((is_last, error), else_=tasks.c.error_stack)),
        (tasks.c.lease_until, None),
        (tasks.c.update_time, db_now()),
        (tasks.c.lapses, one_more(tasks.c.lapses)),
    )


class Renewed(NamedTuple):
    #: The number of rows whose leases were renewed.
    rows: int
    #: The ids of rows that other transactions have locked. While a row is locked, no other worker
    #: can recover it.
    skipped: Sequence[int] = ()


class Leases:
    def __init__(self, database: Database, schema: Schema, lease_s: float) -> None:
        self._db = database
        self._schema = schema
        self._t = schema.tasks
        self._keys = TaskKeys(database, schema)
        self._attempts = Attempts(database, schema)
        self._lease_s = lease_s

    def renew(
        self, workers: Sequence[str], claimed_since: datetime, named: Sequence[int] = ()
    ) -> Renewed:
        """Renew the leases of rows that these processes have claimed since `claimed_since`, and of
        the `named` rows.

        Rows that they claimed before that were lost on the way. No process runs them, so their
        leases must end. A row that another transaction has locked is skipped, so that the other
        rows do not wait for it.
        """
        t = self._t
        is_recent = t.c.update_time >= claimed_since
        is_current = or_(is_recent, t.c.id.in_(named)) if named else is_recent
        find = select(t.c.id).where(self._leased_by(workers), is_current)
        find = by_index(find, t, hot_index(t)).order_by(unindexed(t.c.id))
        renewal = update(t).values(lease_until=db_now_plus(self._lease_s))

        def work(on: Any) -> Renewed:
            wanted = on.execute(find).scalars().all()
            lock = find.with_for_update(skip_locked=True)
            ids = on.execute(lock).scalars().all() if wanted else []
            if ids:
                move_locked(on, renewal, ids, "leases to renew")
            return Renewed(len(ids), sorted(set(wanted).difference(ids)))

        return self._db.transaction(work)

    def recover_dead(
        self, workers: Sequence[str], max_lost_leases: int, time_limits: Mapping[str, float] = {}
    ) -> Recovered:
        """Recover the rows of dead processes immediately, not only when their leases end."""
        return self._recover(self._leased_by(workers), max_lost_leases, None, time_limits)

    def recover(self, max_lost_leases: int, limit: int, lost_s: float) -> Recovered:
        """Recover up to `limit` rows whose lease is over, or whose worker is lost since `lost_s`
        seconds.

        A worker that was only paused reports again, and is not lost then. It keeps the rows that it
        has claimed since it was marked as lost. Where tasks run in the process that reports, they
        can silence it, so only their leases count.
        """
        w = self._schema.workers.c
        is_silent = w.seen_at < db_now_plus(-lost_s)
        has_leases = w.lost_at > db_now_plus(-self._lease_s)
        lost = select(w.name, w.lost_at).where(is_silent, has_leases, w.pool.endswith(PREFORK))
        lost = lost.order_by(w.lost_at.desc()).limit(EXPIRED_PER_SWEEP)
        which = is_abandoned(self._t, self._db.rows(lost))
        return self._recover(which, max_lost_leases, limit, {})

    def _recover(
        self,
        which: ColumnElement[bool],
        max_lost_leases: int,
        limit: int | None,
        time_limits: Mapping[str, float],
    ) -> Recovered:
        """Recover these RUNNING rows. Rows that another transaction has locked are left for the
        next call.

        `time_limits` contains the seconds by tag, for tags whose time limit may have ended the
        runs.
        """
        t, schema, keys, order = self._t, self._schema, self._keys, unindexed(self._t.c.id)
        # Every transaction locks keys before tasks. A key that this query misses belongs to a
        # finished task, which is harmless.
        named = and_(which, t.c.lapses >= max_lost_leases - 1, t.c.task_key.is_not(None))
        find_keys = select(t.c.id, t.c.tag, t.c.task_key).where(named).order_by(order).limit(limit)
        run = (t.c.id, t.c.version, t.c.runs, t.c.execution_time, t.c.worker)
        find = select(*run, t.c.lapses, t.c.tag, t.c.queue, t.c.priority, db_now().label("now"))
        # The index of rows that run, or MySQL would lock all rows of a small table for a moment.
        find = by_index(find.where(which), t, hot_index(t)).order_by(order).limit(limit)

        def work(on: Any) -> Recovered:
            locked = keys.lock_all(on, on.execute(find_keys).all())
            rows = on.execute(find.with_for_update(skip_locked=True)).all()
            reasons: dict[str, list[Any]] = {}
            for row in rows:
                reason = _reason(time_limits.get(row.tag), row.execution_time, row.now)
                reasons.setdefault(reason, []).append(row)
            for reason, some in reasons.items():
                change = _recovery(t, max_lost_leases, reason)
                move_locked(on, change, [row.id for row in some], "abandoned rows")
                self._attempts.record_lost_leases(on, some, LEASE_LOST + reason)
            last = {row.id for row in rows if row.lapses + 1 >= max_lost_leases}
            keys.release_all(on, [row for row in locked if row.id in last])
            found = on.execute(select(*columns(schema)).where(t.c.id.in_(last))) if last else ()
            return Recovered(
                len(rows),
                [task_of(row, schema) for row in found],
                tuple((row.id, row.tag) for why, some in reasons.items() if why for row in some),
                {Level(row.queue, row.priority) for row in rows if row.id not in last},
            )

        return self._db.transaction(work)

    def count_expired(self) -> int:
        """Count the rows whose lease is over. The next sweep recovers them."""
        return int(self._db.rows(select(func.count()).where(is_abandoned(self._t)))[0][0])

    def _leased_by(self, workers: Sequence[str]) -> ColumnElement[Any]:
        runs = is_rare(self._t.c.status == int(Status.RUNNING))
        return and_(runs, self._t.c.worker.in_(list(workers)))


# -- The workers, one row each --------------------------------------------------------------------

# Which are alive, which queues and tags they serve, how far their clocks are off, and which were
# lost within the last hour.


class ServiceTimes(NamedTuple):
    """For how long a worker has been without the services around it, in seconds."""

    #: Since it lost its broker; None while it is connected, and if it uses no broker.
    broker_down_s: float | None = None
    #: Since its timer accepts no tasks; None while it does.
    timer_down_s: float | None = None
    #: Since beat's last message arrived, or since the worker has waited for the first one. None if
    #: the worker does not read the messages of beat.
    beat_s: float | None = None


NO_OUTAGES = ServiceTimes()
#: The pool whose tasks run in other processes than the one that reports the worker.
PREFORK = "prefork"


class RegisteredWorker(NamedTuple):
    name: str
    #: Whether it has reported recently. A report from the future was not written by a live worker.
    is_alive: bool
    #: Seconds since its last report.
    age_s: float
    queues: Sequence[str]
    #: The tags for which it has processors; None if the worker has not published its tags.
    tags: frozenset[str] | None
    pool: str
    concurrency: int
    started_at: datetime
    seen_at: datetime
    #: How far the clock of its machine is ahead of the clock of the database.
    clock_offset_s: float
    services: ServiceTimes = NO_OUTAGES
    #: How many of its processes had a chunk when it last reported, and its version of delaytasks;
    #: None if only workers of an earlier version have reported by this name.
    busy: int | None = None
    version: str | None = None

    def serves(self, queue: str) -> bool:
        return serves(self.queues, queue)

    @property
    def up_s(self) -> float:
        """Seconds since its start."""
        return (self.seen_at - self.started_at).total_seconds() + self.age_s


class LostWorker(NamedTuple):
    """A worker that ended without signing off: it was killed, or its host is down."""

    name: str
    #: When a sweep found that the worker no longer reports.
    lost_at: datetime
    #: When the worker reported for the last time.
    seen_at: datetime
    pool: str
    concurrency: int
    queues: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        return json_fields(self._asdict())


#: The number of workers that one sweep marks as lost.
EXPIRED_PER_SWEEP = 100
#: A lost worker is shown for this time.
LOST_FOR_S = 3600.0
#: The longest list of tags. A worker with a longer list publishes none.
MAX_TAG_BYTES = 16_384
#: The columns of the fields of `ServiceTimes`.
_SERVICES = ("broker_down_at", "timer_down_at", "beat_at")
#: The columns that `RegisteredWorker` has too.
_AS_STORED = "name queues tags pool concurrency started_at seen_at busy version".split()


class WorkerTable:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._w = w = schema.workers
        self._is_lost, self._is_present = w.c.lost_at.is_not(None), w.c.lost_at.is_(None)
        #: The workers that this process has reported.
        self._reported = set[str]()

    def report(
        self,
        name: str,
        queues: Sequence[str],
        pool: str,
        concurrency: int,
        offset_us: int,
        tags: Collection[str] | None = None,
        services: ServiceTimes = NO_OUTAGES,
        busy: int | None = None,
    ) -> None:
        """Record that the worker is alive. `tags` are those with processors; None if they are not
        known. `busy` is the number of processes that run delayed tasks.

        The first report of a process is the start of its worker. The row may be that of a worker of
        this name that has died.
        """
        w = self._w
        values = {
            "seen_at": db_now(),
            "queues": json.dumps(sorted(queues)),
            "tags": _published(tags),
            "pool": pool,
            "concurrency": concurrency,
            "clock_offset_us": offset_us,
            **{
                name: None if age_s is None else db_now_plus(-age_s)
                for name, age_s in zip(_SERVICES, services, strict=True)
            },
            "lost_at": None,
            "busy": busy,
            "version": (installed_version() or "")[:VERSION_LENGTH] or None,
        }

        if name not in self._reported:
            values["started_at"] = db_now()
        report = update(w).where(w.c.name == name).values(values)
        new = insert(w).values({**values, "name": name, "started_at": db_now()})

        def work(connection: Any) -> None:
            if connection.execute(report).rowcount:
                return
            try:
                connection.execute(new)
            except exc.IntegrityError:  # another thread of the worker has inserted it
                connection.execute(report)

        self._db.autocommitted(work)
        self._reported.add(name)

    def remove(self, name: str) -> None:
        """Remove a worker that stopped in order, after it has returned its tasks."""
        w = self._w
        self._db.autocommitted(lambda c: c.execute(delete(w).where(w.c.name == name)))

    def has_reported(self, name: str, within_s: float) -> bool:
        """Return whether a worker has reported within this time, by the database's clock."""
        w = self._w
        is_recent = and_(self._is_present, w.c.seen_at > db_now_plus(-within_s))
        return bool(self._db.rows(select(w.c.name).where(w.c.name == name, is_recent)))

    def expire(self, silent_s: float) -> list[str]:
        """Mark some workers as lost that were silent for `silent_s` seconds. Return each name once.

        So is one whose `seen_at` is `silent_s` in the future: no live worker wrote it. The row of a
        lost worker is deleted after `LOST_FOR_S`.
        """
        w = self._w

        def is_apart(at: Any, past_s: float) -> ColumnElement[bool]:
            # The clock of the database may have been set back.
            return or_(at < db_now_plus(-past_s), at > db_now_plus(silent_s))

        silent = and_(self._is_present, is_apart(w.c.seen_at, silent_s))
        names = select(w.c.name).where(silent).order_by(w.c.name).limit(EXPIRED_PER_SWEEP)
        mark = update(w).where(silent).values(lost_at=db_now())

        def work(connection: Any) -> list[str]:
            connection.execute(delete(w).where(self._is_lost, is_apart(w.c.lost_at, LOST_FOR_S)))
            found = connection.execute(names).scalars().all()
            return [
                name for name in found if connection.execute(mark.where(w.c.name == name)).rowcount
            ]

        return self._db.autocommitted(work)

    def lost(self) -> list[LostWorker]:
        """Return the workers that were lost within the last hour, the latest loss first. No other
        method returns them."""
        w = self._w
        query = select(w.c.name, w.c.lost_at, w.c.seen_at, w.c.pool, w.c.concurrency, w.c.queues)
        rows = self._db.rows(query.where(self._is_lost).order_by(w.c.lost_at.desc()))
        return [LostWorker._make((*row[:5], json.loads(row.queues))) for row in rows]

    def all(self) -> list[dict[str, Any]]:
        """Return the rows of all workers that are not lost, also of those that are silent."""
        w = self._w
        return [
            {
                **row._mapping,
                "queues": json.loads(row.queues),
                "tags": None if row.tags is None else frozenset(json.loads(row.tags)),
            }
            for row in self._db.rows(select(w).where(self._is_present).order_by(w.c.name))
        ]

    def registered(self, now: datetime, silent_s: float) -> list[RegisteredWorker]:
        """Return all workers that are not lost. Those that were silent for `silent_s` seconds are
        not alive."""
        found = []
        for row in self.all():
            age_s = (now - row["seen_at"]).total_seconds()
            found.append(
                RegisteredWorker(
                    **{name: row[name] for name in _AS_STORED},
                    is_alive=abs(age_s) <= silent_s,
                    age_s=max(age_s, 0.0),
                    clock_offset_s=row["clock_offset_us"] / 1e6,
                    services=ServiceTimes(*(_age_s(now, row[name]) for name in _SERVICES)),
                )
            )
        return found


def _age_s(now: datetime, at: datetime | None) -> float | None:
    return None if at is None else max((now - at).total_seconds(), 0.0)


def _published(tags: Collection[str] | None) -> str | None:
    """Return the tags as JSON, or None if that is too long. Then readers do not know them."""
    if tags is None:
        return None
    text = json.dumps(sorted(tags), ensure_ascii=False, separators=(",", ":"))
    return text if len(text.encode()) <= MAX_TAG_BYTES else None


# -- The sweeps -----------------------------------------------------------------------------------

#: Spreads ids over the sweep partitions, since the ids of one producer differ mostly in their low
#: bits.
_PARTITION_PRIME = 1_000_003


class SweepState(NamedTuple):
    """The last sweep of a sweep partition; without times if there was none."""

    partition: int
    is_late: bool = True
    at: datetime | None = None
    age_s: float | None = None
    armed_until: datetime | None = None


class SweepQueries:
    def __init__(self, database: Database, schema: Schema, timer: str, namespace: str) -> None:
        self._db = database
        self._schema = schema
        self._timer = timer
        #: The timer, and if it has a broker, a number for the namespace of its queues.
        is_direct = timer == "direct"
        self._signature = timer if is_direct else f"{timer}:{crc32(namespace.encode()):08x}"
        self._t = schema.tasks
        self._s = s = schema.sweeps
        self._insert = Insert(database, s, s.columns.keys())
        self._r = schema.recurring.c
        self._keys = TaskKeys(database, schema)
        self._attempts = Attempts(database, schema)

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
            armed_until, values = now, {"swept_at": now, "timer": self._signature}
            if row is None:
                key = {"sweep_partition": sweep_partition, "sweep_partitions": stored}
                is_mine = self._insert(on, {**key, **values, "armed_until": now})
                return now if is_mine else None
            is_set_back = row.swept_at > now  # or a server took over whose clock is behind
            if not is_set_back and row.swept_at > now - timedelta(seconds=at_least_s):
                return None
            # Our workers do not receive what another timer keeps, so rows are armed again.
            if not is_set_back and row.timer.partition(":")[0] == self._timer:
                armed_until = row.armed_until
            change = update(s).where(mine).values(**values, armed_until=armed_until)
            check_row_count(on.execute(change).rowcount, 1, f"sweep partition {sweep_partition}")
            return armed_until

        return self._db.transaction(work)

    def is_shared(self, within_s: float) -> bool:
        """Return whether a deployment with another namespace has swept within this time."""
        s = self._s.c
        lately = select(s.timer).where(s.swept_at > db_now_plus(-within_s), s.timer.like("%:%"))
        namespace = self._signature.partition(":")[2]
        return any(row.timer.partition(":")[2] != namespace for row in self._db.rows(lately))

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
        # Also what is in the past changes, so that a sweep that runs now records nothing.
        forget = update(self._s).values(armed_until=db_now())
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

    def last(self, sweep_partitions: int, late_s: float, now: datetime) -> list[SweepState]:
        """Return the last sweep of each sweep partition, with or without a broker.

        One that is older than `late_s` is late.
        """
        s = self._s.c
        mine = s.sweep_partitions.in_([sweep_partitions, -sweep_partitions])
        query = select(s.sweep_partition, s.swept_at, s.armed_until).where(mine)
        found = {}
        for partition, at, armed_until in self._db.rows(query.order_by(s.swept_at)):
            age_s = max((now - at).total_seconds(), 0.0)
            found[partition] = SweepState(partition, age_s > late_s, at, age_s, armed_until)
        return [found.get(number, SweepState(number)) for number in range(sweep_partitions)]

    def _stored_count(self, sweep_partitions: int) -> int:
        """Return the number of sweep partitions as the rows of sweeps store it.

        Without a broker (`timer="direct"`) it is negative. A sweep records up to when rows are
        armed, and a sweep without a broker arms nothing for workers with one. Therefore each of the
        two kinds needs rows of its own, and the key of a row is the partition and this number.
        """
        return -sweep_partitions if self._timer == "direct" else sweep_partitions

    def due_between(
        self, since: datetime, until: datetime, sweep_partition: int, sweep_partitions: int
    ) -> Iterator[list[Entry]]:
        """Yield waiting rows due in (since, until], by due time, in batches."""
        query = self._due_between(since, until)
        if sweep_partitions > 1:
            query = query.where(
                (self._t.c.id % _PARTITION_PRIME) % sweep_partitions == sweep_partition
            )
        for rows in self._db.stream(query, size=1000):
            yield _entries(rows)

    def first_due_between(self, since: datetime, until: datetime, limit: int) -> list[Entry]:
        """Return the first rows that `due_between` yields, by one statement.

        For callers that ask often.
        """
        return _entries(self._db.rows(self._due_between(since, until).limit(limit)))

    def _due_between(self, since: datetime, until: datetime) -> Select[Any]:
        t = self._t
        query = select(t.c.id, t.c.version, t.c.expected_time, t.c.queue, t.c.priority)
        return query.where(waits_between(t, since, until)).order_by(t.c.expected_time)

    def levels(self, late_s: float, queues: Iterable[str] | None = None) -> list[Level]:
        """Return the levels with rows late by more than `late_s`, the highest priority first.

        Queues with tasks in a waitlist are included. The cost grows with the number of levels, not
        of rows. If that number has to be bounded, name the `queues`.
        """
        t, waitlist_queue = self._t, self._schema.waitlists.c.queue

        def is_so(on: Any, condition: ColumnElement[bool]) -> bool:
            return bool(on.execute(select(exists().where(condition))).scalar())

        def work(on: Any) -> list[Level]:
            waits = has_status(t, Status.NOT_COMPLETE)
            names: Iterable[str] = (
                queues
                if queues is not None
                else {*distinct_values(on, t.c.queue, waits), *distinct_values(on, waitlist_queue)}
            )
            late: list[Level] = []
            for name in names:
                levels = levels_of(on, t, Status.NOT_COMPLETE, name)
                found = [level for level in levels if is_so(on, is_late(t, level, late_s))]
                if not found and is_so(on, waitlist_queue == name):
                    found = [Level(name, 0)]
                late += found
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
            names = distinct_values(connection, waitlist_queue, after=after.waitlists)
            waitlists = list(islice(names, most))
            # A part that is not full was the last one.
            place = QueuePlace(
                *(part[-1] if len(part) == most else None for part in (tasks, waitlists))
            )
            return {*tasks, *waitlists}, place

        return self._db.autocommitted(work)

    def purge(self, older_than_s: float, limit: int) -> int:
        """Delete up to `limit` finished rows that have not changed for `older_than_s` seconds."""
        t = self._t
        is_finished = unindexed(t.c.status).in_([int(s) for s in FINISHED])
        old = and_(is_finished, t.c.update_time < db_now_plus(-older_than_s))
        # The index on expected_time finds old rows, since a row is due before it runs. A row that
        # was cancelled early counts from its due time.
        query = select(t.c.id, t.c.tag, t.c.task_key).where(old)
        query = query.order_by(t.c.expected_time).limit(limit)

        keys, attempts = self._keys, self._attempts

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

    # -- due schedules -----------------------------------------------------------------------------

    # Whether the package of recurring schedules is needed: every sweep asks, and most find none.

    def has_due_schedule(self, within_s: float) -> bool:
        """Return whether a schedule needs tasks that are due within `within_s` seconds."""
        # The bound of NULLs helps MySQL, whose index begins with them.
        is_due = is_past(self._r.next_at, db_now_plus(within_s))
        return bool(self._read(exists().where(is_due, self._r.next_at.is_not(None))))

    def first_occurrence(self) -> datetime | None:
        """Return the first occurrence that has no task yet; None if no schedule goes on."""
        first: datetime | None = self._read(func.min(self._r.next_at))
        return first

    def has_declared_schedule(self) -> bool:
        """Return whether code has declared a schedule that is stored here."""
        return bool(self._read(exists().where(self._r.is_declared)))

    def _read(self, expression: Any) -> Any:
        return self._db.autocommitted(lambda c: c.execute(select(expression)).scalar())


def is_late(t: Table, level: Level, late_s: float) -> ColumnElement[bool]:
    """The condition for waiting rows of a level that are late by more than `late_s`."""
    here = is_narrow(t.c.queue, level.queue), t.c.priority == level.priority
    is_past_due = is_past(t.c.expected_time, db_now_plus(-late_s))
    return and_(has_status(t, Status.NOT_COMPLETE), *here, is_past_due)


def _entries(rows: Iterable[Any]) -> list[Entry]:
    return [Entry(row[0], row[1], to_us(row[2]), row[3], row[4]) for row in rows]
