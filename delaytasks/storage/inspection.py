"""Rows that a worker shows when it is inspected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import select

from delaytasks.core.states import Status
from delaytasks.storage.database import Database
from delaytasks.storage.rows import columns
from delaytasks.storage.schema import Schema


class Inspection:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._t = schema.tasks
        names = "id tag queue priority attempts worker update_time"
        self._select = select(*columns(schema, names.split()))

    def running(self, workers: Iterable[str], limit: int) -> Sequence[Any]:
        """Return up to `limit` rows that these processes have claimed, in the order of their
        claims."""
        t = self._t
        claimed = t.c.status == int(Status.RUNNING), t.c.worker.in_(list(workers))
        query = self._select.where(*claimed).order_by(t.c.update_time, t.c.id)
        return self._db.rows(query.limit(limit))

    def named(self, ids: Iterable[int]) -> dict[int, Any]:
        """Return the rows with these ids, by id."""
        query = self._select.where(self._t.c.id.in_(list(ids)))
        return {row.id: row for row in self._db.rows(query)}
