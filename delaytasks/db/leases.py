"""Leases of RUNNING rows: renewal, recovery after a worker died, and requests to cancel."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Update, and_, case, or_, select, update

from delaytasks.db.database import Database
from delaytasks.db.rows import by_index, columns, move_locked, next_version, one_more, task_of
from delaytasks.db.schema import Schema, hot_index
from delaytasks.db.searching import has_status
from delaytasks.db.settlements import Attempts
from delaytasks.db.statements import CANCEL_REQUESTS, ChangeNumbers
from delaytasks.db.task_keys import TaskKeys
from delaytasks.db.types import db_now, db_now_plus, is_rare, unindexed
from delaytasks.model.moves import MOVES, Status
from delaytasks.model.task import DelayedTask, Level, Recovered
from delaytasks.model.text import count

# -- Recovers rows whose worker died, or lost its lease, while they ran ---------------------------

# A recovered row waits again, or fails if it has lost its lease too often in a row.


LEASE_LOST = "the worker died, or lost its lease, while this attempt ran"
TOO_MANY_LOST_LEASES = (
    "gave up: the worker died or lost its lease {times} in a row while this task ran"
)
#: Appended to both texts if the time limit of the task's tag was over.
TIMED_OUT = "; its time limit of {s:g} s was over"


def recover_rows(
    database: Database,
    schema: Schema,
    which: ColumnElement[bool],
    max_lost_leases: int,
    limit: int | None = None,
    time_limits: Mapping[str, float] | None = None,
) -> Recovered:
    """Recover these RUNNING rows. Rows that another transaction has locked are left for the next
    call.

    `time_limits` contains the seconds by tag, for tags whose time limit may have ended the runs.
    """
    t, keys, attempts = schema.tasks, TaskKeys(database, schema), Attempts(database, schema)
    limits, order = time_limits or {}, unindexed(t.c.id)
    # Every transaction locks keys before tasks. A key that this query misses belongs to a finished
    # task, which is harmless.
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
            reason = _reason(limits.get(row.tag), row.execution_time, row.now)
            reasons.setdefault(reason, []).append(row)
        for reason, some in reasons.items():
            change = _recovery(t, max_lost_leases, reason)
            move_locked(on, change, [row.id for row in some], "abandoned rows")
            attempts.record_lost_leases(on, some, LEASE_LOST + reason)
        last = {row.id for row in rows if row.lapses + 1 >= max_lost_leases}
        keys.release_all(on, [row for row in locked if row.id in last])
        found = on.execute(select(*columns(schema)).where(t.c.id.in_(last))) if last else ()
        return Recovered(
            len(rows),
            [task_of(row, schema) for row in found],
            tuple((row.id, row.tag) for why, some in reasons.items() if why for row in some),
            {Level(row.queue, row.priority) for row in rows if row.id not in last},
        )

    return database.transaction(work)


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
        is_its = tasks.c.worker.startswith(f"{name}/", autoescape=True)
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

    def release(
        self,
        workers: Sequence[str],
        max_lost_leases: int,
        time_limits: Mapping[str, float] | None = None,
    ) -> Recovered:
        """Recover the rows of dead processes immediately, not only when their leases end."""
        which = self._leased_by(workers)
        return recover_rows(self._db, self._schema, which, max_lost_leases, time_limits=time_limits)

    def _leased_by(self, workers: Sequence[str]) -> ColumnElement[Any]:
        runs = is_rare(self._t.c.status == int(Status.RUNNING))
        return and_(runs, self._t.c.worker.in_(list(workers)))


# -- cancel requests ------------------------------------------------------------------------------

# Requests to cancel running tasks. The version, which is the fence of the run, stays as it is.


#: The value of the column `cancel_request` of a row that was asked to stop.
ASKED = 1


class CancelRequests:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._t = schema.tasks
        self._numbers = ChangeNumbers(database, schema)

    def make(self, on: Any, task: DelayedTask) -> bool:
        """Ask the run of this version to stop. Return False if it has ended meanwhile."""
        t = self._t
        this_run = update(t).where(t.c.id == task.id, t.c.version == task.version)
        asking = this_run.where(has_status(t, Status.RUNNING)).values(cancel_request=ASKED)
        if not on.execute(asking).rowcount:
            return False
        self._numbers.next(on, CANCEL_REQUESTS)  # workers look for the request within a second
        return True

    def of(self, workers: Collection[str]) -> list[tuple[int, int]]:
        """Return id and version of the rows of these processes that were asked to stop."""
        t = self._t
        runs_here = and_(has_status(t, Status.RUNNING), t.c.worker.in_(list(workers)))
        query = select(t.c.id, t.c.version).where(runs_here, t.c.cancel_request.is_not(None))
        return [(row[0], row[1]) for row in self._db.rows(query)]
