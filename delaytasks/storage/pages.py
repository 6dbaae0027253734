"""Pages of rows in the order of their due times. A cursor is a position, so pages stay right while
rows move."""

from __future__ import annotations

import base64
from datetime import datetime
from operator import attrgetter
from typing import Any

from sqlalchemy import Select, Table, and_, or_

from delaytasks.core.clock import from_us, to_us
from delaytasks.core.errors import InvalidQueryError
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask
from delaytasks.core.text import shown
from delaytasks.storage.queue_levels import has_status, levels
from delaytasks.storage.types import EARLIEST, LATEST


def first(
    connection: Any,
    query: Select[Any],
    tasks: Table,
    status: Status | None,
    is_narrow: bool,
    limit: int,
    newest_first: bool = False,
) -> list[Any]:
    """Return the first rows of `query` by due time, or with `newest_first` the last ones.

    In the order of due times alone, a search for a few rows that failed or wait would read millions
    of finished rows. Rows of one status are therefore read through the index of their status, which
    has them in order within each queue and priority. This does not apply if `is_narrow`: few rows
    have a given key, and a given tag may have no rows in most queues.
    """
    t = tasks.c
    order = (t.expected_time.desc(), t.id.desc()) if newest_first else (t.expected_time, t.id)
    query = query.order_by(*order).limit(limit)
    if status is None:
        return list(connection.execute(query))
    query = query.where(has_status(tasks, status))
    if is_narrow or status is Status.DONE:  # nearly all rows are DONE
        return list(connection.execute(query))
    found: list[Any] = []
    for level in levels(connection, tasks, status):
        found += connection.execute(
            query.where(t.queue == level.queue, t.priority == level.priority)
        )
        found = sorted(found, key=attrgetter("expected_time", "id"), reverse=newest_first)[:limit]
        if len(found) == limit:  # later rows are not on this page
            last = found[-1].expected_time
            query = query.where(
                t.expected_time >= last if newest_first else t.expected_time <= last
            )
    return found


def after(
    query: Select[Any], tasks: Table, shard: int, cursor: str, newest_first: bool = False
) -> Select[Any]:
    """Limit `query`, which reads this shard's tasks, to the rows after the cursor's position."""
    due, id, last_shard = _parse_cursor(cursor)
    t = tasks.c
    if newest_first:
        is_before = t.id <= id if shard < last_shard else t.id < id
        if due == EARLIEST:
            return query.where(t.expected_time <= due, is_before)
        if due == LATEST:
            return query.where(or_(t.expected_time < due, is_before))
        return query.where(
            t.expected_time <= due,
            or_(t.expected_time < due, and_(t.expected_time == due, is_before)),
        )
    # If other programs write rows, two shards may have the same id.
    is_after = t.id >= id if shard > last_shard else t.id > id
    # An instant outside of datetime's range reads as the first or the last one. Without these cases
    # a page would begin with its own last row.
    if due == LATEST:
        return query.where(t.expected_time >= due, is_after)
    if due == EARLIEST:
        return query.where(or_(t.expected_time > due, is_after))
    return query.where(
        t.expected_time >= due, or_(t.expected_time > due, and_(t.expected_time == due, is_after))
    )


def place(task: DelayTask) -> tuple[datetime, int, int]:
    """Return the sort key of tasks."""
    return task.expected_time, task.id, task.shard


def make_cursor(task: DelayTask) -> str:
    return base64.urlsafe_b64encode(
        f"{to_us(task.expected_time)}:{task.id}:{task.shard}".encode()
    ).decode()


def _parse_cursor(cursor: str) -> tuple[datetime, int, int]:
    try:
        due_us, id, shard = (
            base64.b64decode(cursor.encode(), b"-_", validate=True).decode().split(":")
        )
        due, after, last_shard = from_us(int(due_us)), int(id), int(shard)
    except (AttributeError, ValueError, OverflowError):
        raise InvalidQueryError(f"{shown(cursor)} is not a cursor that find() returned") from None
    if not -(2**63) <= after < 2**63:
        raise InvalidQueryError(f"{shown(cursor)} is not a cursor that find() returned")
    return due, after, last_shard
