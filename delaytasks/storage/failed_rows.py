"""Reads the FAILED tasks that were due last."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from sqlalchemy import select

from delaytasks.core.filters import Filter
from delaytasks.core.states import Status
from delaytasks.storage.database import Database
from delaytasks.storage.pages import first
from delaytasks.storage.schema import Schema

#: The most tasks that one call reads.
MOST_FAILED = 500


class FailedRow(NamedTuple):
    """A FAILED task without its body."""

    id: int
    tag: str
    queue: str
    due: datetime
    failed_at: datetime | None
    error: str | None


def failed_rows(database: Database, schema: Schema) -> list[FailedRow]:
    """Return the FAILED tasks that were due last, at most `MOST_FAILED`."""
    t = schema.tasks.c
    query = select(t.expected_time, t.id, t.tag, t.queue, t.due_time, t.update_time, t.error_stack)
    where = Filter(status=frozenset({Status.FAILED}))
    rows = database.autocommitted(lambda c: first(c, query, schema.tasks, where, MOST_FAILED, True))
    return [FailedRow(r[1], r[2], r[3], r[4] or r[0], r[5], r[6]) for r in rows]
