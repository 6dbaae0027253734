"""Counts gauges at a bounded cost, however large the table of the tasks is."""

from __future__ import annotations

from datetime import datetime
from itertools import islice
from typing import Any

from sqlalchemy import Connection, func, select

from delaytasks.core.inputs import MAX_PRIORITY
from delaytasks.core.states import Status
from delaytasks.statistics.gauges import Gauges
from delaytasks.storage.database import Database
from delaytasks.storage.estimates import estimate
from delaytasks.storage.queue_levels import first_levels_of, has_status, steps
from delaytasks.storage.schema import Schema
from delaytasks.storage.types import db_now, db_now_plus

#: Rows that one statement counts. A larger number is the planner's estimate.
MAX_COUNTED_ROWS = 20_000
#: Queues in which overdue tasks are counted, and their priorities.
MAX_GAUGE_QUEUES, MAX_GAUGE_PRIORITIES = 200, MAX_PRIORITY + 1


class GaugeQueries:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._t = schema.tasks
        self._w = schema.workers

    def count(self, late_s: float, silent_s: float) -> Gauges:
        """Count. Tasks that are late by more than `late_s` are overdue, and a worker that was
        silent for `silent_s` does not count."""
        return self._db.alone(lambda c: self._count(c, late_s, silent_s))

    def _count(self, on: Connection, late_s: float, silent_s: float) -> Gauges:
        overdue, oldest_s = self._overdue(on, late_s)
        w = self._w
        alive = select(func.count()).where(w.c.seen_at >= db_now_plus(-silent_s))
        return Gauges(
            pending=self._rows_of(on, Status.NOT_COMPLETE),
            overdue=overdue,
            running=self._rows_of(on, Status.RUNNING),
            failed=self._rows_of(on, Status.FAILED),
            held=self._rows_of(on, Status.HELD),
            oldest_overdue_s=oldest_s,
            workers=on.execute(alive).scalar_one(),
        )

    def _rows_of(self, on: Connection, status: Status) -> int:
        rows = select(self._t.c.id).where(has_status(self._t, status))
        first = rows.limit(MAX_COUNTED_ROWS + 1).subquery()
        counted = int(on.execute(select(func.count()).select_from(first)).scalar_one())
        return counted if counted <= MAX_COUNTED_ROWS else max(counted, estimate(on, rows))

    def _overdue(self, on: Connection, late_s: float) -> tuple[int, float]:
        """Return the number of overdue tasks and the lateness of the oldest in seconds."""
        t, waits = self._t, has_status(self._t, Status.NOT_COMPLETE)
        total, oldest = 0, None
        for queue in islice(steps(on, t.c.queue, waits), MAX_GAUGE_QUEUES):
            for level in first_levels_of(on, t, Status.NOT_COMPLETE, queue, MAX_GAUGE_PRIORITIES):
                late = (
                    select(t.c.expected_time)
                    .where(
                        waits,
                        t.c.queue == queue,
                        t.c.priority == level.priority,
                        t.c.expected_time <= db_now_plus(-late_s),
                    )
                    .order_by(t.c.expected_time)
                    .limit(max(MAX_COUNTED_ROWS - total, 1))
                    .subquery()
                )
                count, first = on.execute(
                    select(func.count(), func.min(late.c.expected_time))
                ).one()
                total += count
                oldest = first if oldest is None else min(oldest, first or oldest)
        return total, 0.0 if oldest is None else _age_s(on, oldest)


def _age_s(on: Any, instant: datetime) -> float:
    now: datetime = on.execute(select(db_now())).scalar_one()
    return max((now - instant).total_seconds(), 0.0)
