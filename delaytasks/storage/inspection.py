"""Rows that a worker shows when it is inspected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import select

from delaytasks.core.states import Status
from delaytasks.storage.database import Database
from delaytasks.storage.schema import Schema


class Inspection:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        t = schema.tasks
        self._t = t
        self._columns = (
            t.c.id,
            t.c.tag,
            t.c.queue,
            t.c.priority,
            t.c.attempts,
            t.c.worker,
            t.c.update_time,
        )

    def running(self, workers: Iterable[str], limit: int) -> Sequence[Any]:
        """Return up to `limit` rows that these processes have claimed, in the order of their
        claims."""
        t = self._t
        claimed = t.c.status == int(Status.RUNNING), t.c.worker.in_(list(workers))
        query = (
            select(*self._columns).where(*claimed).order_by(t.c.update_time, t.c.id).limit(limit)
        )
        return self._db.rows(query)

    def named(self, ids: Iterable[int]) -> dict[int, Any]:
        """Return the rows with these ids, by id."""
        query = select(*self._columns).where(self._t.c.id.in_(list(ids)))
        return {row.id: row for row in self._db.rows(query)}
