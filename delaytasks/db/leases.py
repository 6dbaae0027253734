"""Leases of RUNNING rows: renewal, recovery after a worker died, and requests to cancel."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Update, and_, case, or_, select, update

from delaytasks.db.database import Database
from delaytasks.db.inserts import CANCEL_REQUESTS, ChangeNumbers
from delaytasks.db.row_lists import by_id, by_index, check_row_count
from delaytasks.db.rows import columns, next_version, one_more, task_of
from delaytasks.db.schema import Schema, hot_index
from delaytasks.db.searching import has_status
from delaytasks.db.settlements import Attempts
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


class AbandonedRows:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._t = schema.tasks
        self._schema = schema
        self._keys = TaskKeys(database, schema)
        self._attempts = Attempts(database, schema)
        self._columns = columns(schema)

    def recover(
        self,
        which: ColumnElement[bool],
        max_lost_leases: int,
        limit: int | None = None,
        time_limits: Mapping[str, float] | None = None,
    ) -> Recovered:
        """Recover these RUNNING rows. Rows that another transaction has locked are left for the
        next call.

        `time_limits` contains the seconds by tag, for tags whose time limit may have ended the
        runs.
        """

        return self._db.transaction(
            lambda c: self._recover(c, which, max_lost_leases, limit, time_limits or {})
        )

    def _recover(
        self,
        on: Any,
        which: ColumnElement[bool],
        max_lost_leases: int,
        limit: int | None,
        time_limits: Mapping[str, float],
    ) -> Recovered:
        t = self._t
        # Every transaction locks keys before tasks. A key that this query misses belongs to a
        # finished task, which is harmless.
        named = and_(which, t.c.lapses >= max_lost_leases - 1, t.c.task_key.is_not(None))
        order = unindexed(t.c.id)
        keyed = on.execute(
            select(t.c.id, t.c.tag, t.c.task_key).where(named).order_by(order).limit(limit)
        ).all()
        locked = self._keys.lock_all(on, keyed)
        run = (t.c.id, t.c.version, t.c.runs, t.c.execution_time, t.c.worker)
        query = select(*run, t.c.lapses, t.c.tag, t.c.queue, t.c.priority, db_now().label("now"))
        # The index of rows that run, or MySQL would lock all rows of a small table for a moment.
        query = by_index(query.where(which), t, hot_index(t)).order_by(order).limit(limit)
        rows = on.execute(query.with_for_update(skip_locked=True)).all()
        if not rows:
            return Recovered(0, [])
        reasons: dict[str, list[Any]] = {}
        for row in rows:
            reason = _reason(time_limits.get(row.tag), row.execution_time, row.now)
            reasons.setdefault(reason, []).append(row)
        for reason, some in reasons.items():
            ids = t.c.id.in_([row.id for row in some])
            statement = by_id(recover_statement(t, max_lost_leases, reason).where(ids), t)
            changed = on.execute(statement).rowcount
            check_row_count(changed, len(some), "abandoned rows")
            self._attempts.record_lost_leases(on, some, LEASE_LOST + reason)
        timed_out = tuple(
            (row.id, row.tag) for reason, some in reasons.items() if reason for row in some
        )
        last = {row.id for row in rows if row.lapses + 1 >= max_lost_leases}
        levels = {Level(row.queue, row.priority) for row in rows if row.id not in last}
        if not last:
            return Recovered(len(rows), [], timed_out, levels)
        self._keys.release_all(on, [row for row in locked if row.id in last])
        found = on.execute(select(*self._columns).where(t.c.id.in_(last)))
        return Recovered(
            len(rows), [task_of(row, self._schema) for row in found], timed_out, levels
        )


def _reason(limit_s: float | None, began: datetime | None, now: datetime) -> str:
    if limit_s is None or began is None or (now - began).total_seconds() < limit_s:
        return ""
    return TIMED_OUT.format(s=limit_s)


def lease_is_over(tasks: Any) -> ColumnElement[bool]:
    """The condition for a RUNNING row whose lease is over."""
    runs = is_rare(tasks.c.status == int(Status.RUNNING))
    return and_(runs, tasks.c.lease_until < db_now())


def recover_statement(tasks: Any, max_lost_leases: int, reason: str = "") -> Update:
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
        self._t = schema.tasks
        self._abandoned = AbandonedRows(database, schema)
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
        leased = and_(self._leased_by(workers), is_current)
        pick = by_index(select(t.c.id).where(leased), t, hot_index(t)).order_by(unindexed(t.c.id))
        lock = pick.with_for_update(skip_locked=True)

        def work(connection: Any) -> Renewed:
            wanted = connection.execute(pick).scalars().all()
            ids = set(connection.execute(lock).scalars()) if wanted else set()
            skipped = [id for id in wanted if id not in ids]
            if not ids:
                return Renewed(0, skipped)
            renewal = update(t).where(t.c.id.in_(sorted(ids)))
            renewal = renewal.values(lease_until=db_now_plus(self._lease_s))
            return Renewed(connection.execute(renewal).rowcount, skipped)

        return self._db.transaction(work)

    def release(
        self,
        workers: Sequence[str],
        max_lost_leases: int,
        time_limits: Mapping[str, float] | None = None,
    ) -> Recovered:
        """Recover the rows of dead processes immediately, not only when their leases end."""
        return self._abandoned.recover(
            self._leased_by(workers), max_lost_leases, time_limits=time_limits
        )

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
        is_this_run = (
            t.c.id == task.id,
            t.c.version == task.version,
            has_status(t, Status.RUNNING),
        )
        asking = update(t).where(*is_this_run).values(cancel_request=ASKED)
        if not on.execute(asking).rowcount:
            return False
        self._numbers.next(on, CANCEL_REQUESTS)  # workers look for the request within a second
        return True

    def of(self, workers: Collection[str]) -> list[tuple[int, int]]:
        """Return id and version of the rows of these processes that were asked to stop."""
        t = self._t
        query = select(t.c.id, t.c.version).where(
            has_status(t, Status.RUNNING),
            t.c.worker.in_(list(workers)),
            t.c.cancel_request.is_not(None),
        )
        return [(row[0], row[1]) for row in self._db.rows(query)]
