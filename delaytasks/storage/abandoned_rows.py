"""What a dead or stuck worker held goes back to the others, or is given up when that happened too often in a row."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Update, and_, case, or_, select, update

from delaytasks.core.interfaces import Lapsed, Level
from delaytasks.core.states import MOVES, Status
from delaytasks.storage.attempts import Attempts
from delaytasks.storage.database import Database
from delaytasks.storage.rows import columns, next_version, one_more, task_of
from delaytasks.storage.schema import Schema
from delaytasks.storage.task_keys import TaskKeys
from delaytasks.storage.types import db_now, db_now_plus

LAPSED = "the worker died, or lost its lease, while this attempt ran"
NO_LONGER_ALIVE = (
    "gave up: the worker died or lost its lease {n} times in a row while this task ran"
)
#: Added to these where that is why.
TIMED_OUT = "; its time limit of {s:g} s was over"


class AbandonedRows:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._t = schema.tasks
        self._schema = schema
        self._keys = TaskKeys(database, schema)
        self._attempts = Attempts(database, schema)
        self._columns = columns(schema)

    def lapse(
        self,
        which: ColumnElement[bool],
        max_lost_leases: int,
        limit: int | None = None,
        time_limits: Mapping[str, float] | None = None,
    ) -> Lapsed:
        """These RUNNING rows lapse. What somebody has locked is left for the next time. `time_limits` are those of
        tags, in seconds, where they may be what ended the runs."""

        def work() -> Lapsed:
            with self._db.begin() as connection:
                return self._lapse(connection, which, max_lost_leases, limit, time_limits or {})

        return self._db.run(work)

    def _lapse(
        self,
        on: Any,
        which: ColumnElement[bool],
        max_lost_leases: int,
        limit: int | None,
        time_limits: Mapping[str, float],
    ) -> Lapsed:
        t = self._t
        # Keys before tasks, as everybody does it. A key that is missed here names a finished task: harmless.
        named = and_(which, t.c.lapses >= max_lost_leases - 1, t.c.task_key.is_not(None))
        # `+ 0` keeps planners from walking the whole primary key in search of the few rows that run.
        order = t.c.id + 0
        keyed = on.execute(
            select(t.c.id, t.c.tag, t.c.task_key).where(named).order_by(order).limit(limit)
        ).all()
        locked = self._keys.lock_all(on, keyed)
        run = (t.c.id, t.c.version, t.c.attempts, t.c.execution_time, t.c.worker)
        query = select(*run, t.c.lapses, t.c.tag, db_now(), t.c.queue, t.c.priority)
        query = query.where(which).order_by(order).limit(limit)
        rows = on.execute(query.with_for_update(skip_locked=True)).all()
        if not rows:
            return Lapsed(0, [])
        reasons: dict[str, list[Any]] = {}
        for row in rows:
            reasons.setdefault(_reason(time_limits.get(row[6]), row[3], row[7]), []).append(row)
        for reason, some in reasons.items():
            on.execute(
                lapse_statement(t, max_lost_leases, reason).where(
                    t.c.id.in_([row[0] for row in some])
                )
            )
            self._attempts.record_lapsed(on, [row[:5] for row in some], LAPSED + reason)
        timed_out = tuple(
            (row[0], row[6]) for reason, some in reasons.items() if reason for row in some
        )
        last = {row[0] for row in rows if row[5] + 1 >= max_lost_leases}
        levels = {Level(row.queue, row.priority) for row in rows if row[0] not in last}
        if not last:
            return Lapsed(len(rows), [], timed_out, levels)
        self._keys.release_all(on, [row for row in locked if row[0] in last])
        found = on.execute(select(*self._columns).where(t.c.id.in_(last)))
        return Lapsed(len(rows), [task_of(row, self._schema) for row in found], timed_out, levels)


def _reason(limit_s: float | None, began: datetime | None, now: datetime) -> str:
    if limit_s is None or began is None or (now - began).total_seconds() < limit_s:
        return ""
    return TIMED_OUT.format(s=limit_s)


def lease_is_over(tasks: Any, lease_s: float) -> ColumnElement[bool]:
    """RUNNING, and nobody renews it. Another program may have written no lease: then it lasts from the last change."""
    unleased = and_(tasks.c.lease_until.is_(None), tasks.c.update_time < db_now_plus(-lease_s))
    return and_(
        tasks.c.status == int(Status.RUNNING), or_(tasks.c.lease_until < db_now(), unleased)
    )


def lapse_statement(tasks: Any, max_lost_leases: int, reason: str = "") -> Update:
    """RUNNING → NOT_COMPLETE, or FAILED when it happened too often in a row. MySQL assigns from left to right,
    so `lapses` comes last: all the others look at its old value."""
    is_last, error = (
        tasks.c.lapses >= max_lost_leases - 1,
        NO_LONGER_ALIVE.format(n=max_lost_leases) + reason,
    )
    return update(tasks).ordered_values(
        (
            tasks.c.status,
            case(
                (is_last, int(MOVES["fail_worker_lost"].target)), else_=int(MOVES["recover"].target)
            ),
        ),
        (tasks.c.version, next_version(tasks.c.version)),
        (
            tasks.c.error_stack,
            case((is_last, error), else_=tasks.c.error_stack),
        ),
        (tasks.c.lease_until, None),
        (tasks.c.update_time, db_now()),
        (tasks.c.lapses, one_more(tasks.c.lapses)),
    )
