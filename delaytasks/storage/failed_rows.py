"""Reads the FAILED tasks that were due last, and tasks that failed runs were counted for."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import select

from delaytasks.core.filters import Filter
from delaytasks.core.states import Status
from delaytasks.storage.database import Database
from delaytasks.storage.pages import first
from delaytasks.storage.row_lists import by_id, listed
from delaytasks.storage.schema import Schema

#: The most tasks that `failed_rows` reads.
MOST_FAILED = 500


class FailedRow(NamedTuple):
    """A task that has failed, without its body."""

    id: int
    tag: str
    queue: str
    due: datetime
    failed_at: datetime | None
    error: str | None
    status: int = Status.FAILED


def failed_rows(database: Database, schema: Schema) -> list[FailedRow]:
    """Return the FAILED tasks that were due last, at most `MOST_FAILED`."""
    where = Filter(status=frozenset({Status.FAILED}))
    query = select(*_columns(schema))
    rows = database.autocommitted(lambda c: first(c, query, schema.tasks, where, MOST_FAILED, True))
    return list(map(_row, rows))


def rows_of(database: Database, schema: Schema, ids: Iterable[int]) -> list[FailedRow]:
    """Return the tasks with these ids that exist, whatever their status is."""
    wanted = sorted(set(ids))
    if not wanted:
        return []
    t = schema.tasks
    # The range lets the planner leave out partitions.
    where = (listed(database, t.c.id, "ids"), t.c.id.between(wanted[0], wanted[-1]))
    query = by_id(select(*_columns(schema)).where(*where), t)
    rows = database.autocommitted(lambda c: c.execute(query, {"ids": wanted}).all())
    return list(map(_row, rows))


def _columns(schema: Schema) -> list[Any]:
    t = schema.tasks.c
    return [
        *(t.expected_time, t.id, t.tag, t.queue, t.due_time, t.update_time),
        *(t.error_stack, t.status),
    ]


def _row(r: Any) -> FailedRow:
    return FailedRow(r[1], r[2], r[3], r[4] or r[0], r[5], r[6], r[7])
