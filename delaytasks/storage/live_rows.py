"""Reads the rows that matter now: running, overdue, due soon, held, and ended lately.

Each part of a read looks at a bounded number of rows through an index, so the cost does not grow
with the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Select, select

from delaytasks.core.interfaces import Level
from delaytasks.core.states import Status
from delaytasks.storage.database import Database
from delaytasks.storage.overdue_rows import OverdueRows
from delaytasks.storage.queue_levels import has_status, levels_of, queues_after
from delaytasks.storage.schema import Schema

#: The rows that each part of a read looks at.
MOST_LIVE_ROWS = 5_000
#: Queues among which waiting rows are looked for.
MOST_LIVE_QUEUES = 100
#: "Soon" and "lately" are a minute.
LIVE_PERIOD = timedelta(minutes=1)
_COLUMNS = (
    "queue tag worker status expected_time due_time execution_time update_time attempts".split()
)


class LiveRow(NamedTuple):
    queue: str
    tag: str
    worker: str | None
    status: Status
    expected_time: datetime
    due_time: datetime | None
    execution_time: datetime | None
    update_time: datetime
    attempts: int

    @property
    def due(self) -> datetime:
        return self.due_time or self.expected_time


class Live(NamedTuple):
    """The rows of one database at one time."""

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
