"""Counts gauges at a bounded cost, however large the table of the tasks is."""

from __future__ import annotations

from sqlalchemy import Connection, func, select

from delaytasks.core.states import Status
from delaytasks.statistics.gauges import Gauges
from delaytasks.storage.database import Database
from delaytasks.storage.estimates import estimate
from delaytasks.storage.overdue_rows import OverdueRows
from delaytasks.storage.queue_levels import has_status
from delaytasks.storage.schema import Schema
from delaytasks.storage.types import db_now, db_now_plus
from delaytasks.storage.worker_table import is_present

#: Rows that one statement counts. A larger number is the planner's estimate.
MAX_COUNTED_ROWS = 20_000
#: Queues in which overdue tasks are counted.
MAX_GAUGE_QUEUES = 200


class GaugeQueries:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._t = schema.tasks
        self._w = schema.workers
        self._overdue = OverdueRows(database, schema)

    def count(self, late_s: float, silent_s: float) -> Gauges:
        """Count. Tasks that are late by more than `late_s` are overdue, and a worker that was
        silent for `silent_s` does not count."""
        return self._db.autocommitted(lambda c: self._count(c, late_s, silent_s))

    def _count(self, on: Connection, late_s: float, silent_s: float) -> Gauges:
        overdue = self._overdue.count_on(on, late_s, MAX_COUNTED_ROWS, MAX_GAUGE_QUEUES)
        w, now = self._w, on.execute(select(db_now())).scalar_one()
        is_alive = w.c.seen_at >= db_now_plus(-silent_s), is_present(w)
        alive = select(func.count()).where(*is_alive)
        return Gauges(
            pending=self._rows_of(on, Status.NOT_COMPLETE),
            overdue=overdue.tasks,
            running=self._rows_of(on, Status.RUNNING),
            failed=self._rows_of(on, Status.FAILED),
            held=self._rows_of(on, Status.HELD),
            oldest_overdue_s=max((now - (overdue.oldest or now)).total_seconds(), 0.0),
            workers=on.execute(alive).scalar_one(),
        )

    def _rows_of(self, on: Connection, status: Status) -> int:
        rows = select(self._t.c.id).where(has_status(self._t, status))
        first = rows.limit(MAX_COUNTED_ROWS + 1).subquery()
        counted = int(on.execute(select(func.count()).select_from(first)).scalar_one())
        return counted if counted <= MAX_COUNTED_ROWS else max(counted, estimate(on, rows))
