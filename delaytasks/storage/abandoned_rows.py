"""Recovers rows whose worker died, or lost its lease, while they ran.

A recovered row waits again, or fails if it has lost its lease too often in a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Update, and_, case, select, update

from delaytasks.core.interfaces import Level, Recovered
from delaytasks.core.states import MOVES, Status
from delaytasks.core.text import count
from delaytasks.storage.attempts import Attempts
from delaytasks.storage.database import Database
from delaytasks.storage.row_counts import check_row_count
from delaytasks.storage.row_lists import by_id, by_index
from delaytasks.storage.rows import columns, next_version, one_more, task_of
from delaytasks.storage.schema import Schema
from delaytasks.storage.task_keys import TaskKeys
from delaytasks.storage.task_table import hot_index
from delaytasks.storage.types import db_now, is_rare, unindexed

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
        run = (t.c.id, t.c.version, t.c.attempts, t.c.execution_time, t.c.worker)
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
