"""Rows that wait in place of Celery tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Select, bindparam, select

from delaytasks.core.celery_calls import CELERY_PREFIX
from delaytasks.core.filters import batches
from delaytasks.core.interfaces import CallerConnection
from delaytasks.core.states import LIVE
from delaytasks.core.task import DelayTask
from delaytasks.storage.database import Database
from delaytasks.storage.row_lists import listed
from delaytasks.storage.rows import columns, task_of
from delaytasks.storage.schema import Schema

#: The keys of one statement.
MOST_KEYS = 500


class CeleryRows:
    def __init__(self, database: Database, schema: Schema) -> None:
        t = schema.tasks
        self._db = database
        self._schema = schema
        rows = select(*columns(schema)).where(t.c.tag.like(f"{CELERY_PREFIX}%"))
        live = rows.where(t.c.status.in_([int(status) for status in LIVE]))
        has_key = listed(database, t.c.task_key, "task_keys")
        self._live_of_keys = live.where(has_key)
        self._live_of_ids = live.where(listed(database, t.c.id, "ids"))
        self._after = (
            live.where(t.c.id > bindparam("after")).order_by(t.c.id).limit(bindparam("limit"))
        )

    def live(self, keys: Sequence[str], on: CallerConnection | None = None) -> list[DelayTask]:
        """Return the rows with these keys that wait or run."""
        found: list[DelayTask] = []
        for some in batches(keys, MOST_KEYS):
            found += self._read(self._live_of_keys, {"task_keys": some}, on)
        return found

    def live_of_ids(self, ids: Sequence[int], on: CallerConnection | None) -> list[DelayTask]:
        """Return the rows with these ids that wait or run."""
        found: list[DelayTask] = []
        for some in batches(ids, MOST_KEYS):
            found += self._read(self._live_of_ids, {"ids": some}, on)
        return found

    def page(self, after: int, limit: int, on: CallerConnection | None = None) -> list[DelayTask]:
        """Return up to `limit` rows that wait or run, in the order of their ids."""
        return self._read(self._after, {"after": after, "limit": limit}, on)

    def _read(
        self, query: Select[Any], parameters: dict[str, Any], on: CallerConnection | None
    ) -> list[DelayTask]:
        rows = self._db.autocommitted(lambda c: c.execute(query, parameters).all(), on)
        return [task_of(row, self._schema) for row in rows]
