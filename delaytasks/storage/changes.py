"""Reads the rows that have changed lately, at a cost that does not grow with the table.

No index leads to the time of a change, since each move would have to maintain it. Therefore the
rows are found where changes happen: among the newest ids, among the rows that were due lately,
among those that run, and among those that the caller has seen before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Select, and_, literal, null, select

from delaytasks.core.filters import Filter
from delaytasks.core.ids import first_id
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask
from delaytasks.storage.database import Database
from delaytasks.storage.filters import conditions
from delaytasks.storage.queue_levels import has_status
from delaytasks.storage.row_lists import listed
from delaytasks.storage.rows import COLUMNS, task_of
from delaytasks.storage.schema import Schema

#: The rows that each part of a read looks at.
MOST_CHANGES = 1000
#: Rows that were due for a longer time are found only while they run, or if they were seen before.
LATELY_S = 60.0
#: Rows that are due a little later may run soon.
SOON_S = 1.0


class FoundChanges(NamedTuple):
    """The changed rows, without their bodies and results."""

    tasks: Sequence[DelayTask]
    #: Whether there may be more changes than the read has looked at.
    is_incomplete: bool


class ChangeReader:
    def __init__(self, database: Database, schema: Schema, where: Filter) -> None:
        self._db = database
        self._schema = schema
        self._t = t = schema.tasks
        without = {"message_body": literal(""), "result": null()}
        read: list[ColumnElement[Any]] = [
            without[name].label(name) if name in without else t.c[name] for name in COLUMNS
        ]
        wanted = listed(database, t.c.id, "ids"), *conditions(t, where, database.can)
        self._rows = select(*read).where(*wanted)
        self._key = where.key

    def now(self) -> datetime:
        return self._db.now()

    def read(self, since: datetime, now: datetime, seen: Iterable[int]) -> FoundChanges:
        """Return the rows that have changed since then, of the rows `seen` and of all others."""

        def work(connection: Connection) -> FoundChanges:
            ids, is_incomplete = set(seen), False
            for part in self._parts(since, now):
                found = connection.execute(part.limit(MOST_CHANGES)).scalars().all()
                is_incomplete |= len(found) == MOST_CHANGES
                ids.update(found)
            rows = connection.execute(
                self._rows.where(self._t.c.update_time >= since), {"ids": list(ids)}
            ).all()
            return FoundChanges([task_of(row, self._schema) for row in rows], is_incomplete)

        return self._db.autocommitted(work)

    def _parts(self, since: datetime, now: datetime) -> Sequence[Select[Any]]:
        """Return queries for the ids of rows that may have changed. Each uses an index."""
        t = self._t.c
        if self._key is not None:
            mine = select(t.id).where(t.task_key == self._key)
            return [mine.order_by(t.expected_time.desc())]
        lately, soon = now - timedelta(seconds=LATELY_S), now + timedelta(seconds=SOON_S)
        is_due = and_(t.expected_time > lately, t.expected_time <= soon)
        return [
            select(t.id).where(t.id >= first_id(since)).order_by(t.id.desc()),
            select(t.id).where(is_due).order_by(t.expected_time.desc()),
            select(t.id).where(has_status(self._t, Status.RUNNING)),
        ]
