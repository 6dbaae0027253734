"""Pages of rows in the order of their due times. A cursor is a position, so pages stay right while
rows move."""

from __future__ import annotations

import base64
import operator
from datetime import datetime
from operator import attrgetter
from typing import Any

from sqlalchemy import Select, Table, and_, or_

from delaytasks.core.clock import EARLIEST, LATEST, from_us, to_us
from delaytasks.core.errors import InvalidQueryError
from delaytasks.core.filters import Filter
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask
from delaytasks.core.text import shown
from delaytasks.storage.queue_levels import has_status, levels
from delaytasks.storage.types import unindexed


def first(
    connection: Any,
    query: Select[Any],
    tasks: Table,
    where: Filter,
    limit: int,
    newest_first: bool = False,
) -> list[Any]:
    """Return the first rows of `query` by due time, or with `newest_first` the last ones.

    In the order of due times alone, a search for a few rows that failed or wait would read millions
    of finished rows. Rows of one status are therefore read through the index of their status, which
    has them in order within each queue and priority. This does not apply to a filter that has its
    own index: few rows have a given key, and a given tag may have no rows in most queues.
    """
    t = tasks.c
    order = (t.expected_time.desc(), t.id.desc()) if newest_first else (t.expected_time, t.id)
    query = query.order_by(*order).limit(limit)
    if where.status is None:
        return list(connection.execute(query))
    if where.ids is not None:
        named = unindexed(t.status).in_(sorted(map(int, where.status)))
        return list(connection.execute(query.where(named)))
    if where.has_own_index or Status.DONE in where.status:  # nearly all rows are DONE
        return list(connection.execute(query.where(has_status(tasks, *where.status))))
    found: list[Any] = []
    for status in sorted(where.status):
        for level in levels(connection, tasks, status):
            if where.queue not in (None, level.queue):
                continue
            here = (t.queue == level.queue, t.priority == level.priority)
            found += connection.execute(query.where(has_status(tasks, status), *here))
            found = sorted(found, key=attrgetter("expected_time", "id"), reverse=newest_first)
            found = found[:limit]
            if len(found) == limit:  # later rows are not on this page
                last = found[-1].expected_time
                query = query.where(
                    t.expected_time >= last if newest_first else t.expected_time <= last
                )
    return found


def after(query: Select[Any], tasks: Table, cursor: str, newest_first: bool = False) -> Select[Any]:
    """Limit `query`, which reads tasks, to the rows after the cursor's position."""
    due, id = _parse_cursor(cursor)
    at, number = tasks.c.expected_time, tasks.c.id
    if newest_first:
        is_after, is_not_before, begin, end = operator.lt, operator.le, LATEST, EARLIEST
    else:
        is_after, is_not_before, begin, end = operator.gt, operator.ge, EARLIEST, LATEST
    follows = is_after(number, id)
    # An instant outside of datetime's range reads as the first or the last one. Without these cases
    # a page would begin with its own last row.
    if due == end:
        return query.where(is_not_before(at, due), follows)
    if due == begin:
        return query.where(or_(is_after(at, due), follows))
    return query.where(is_not_before(at, due), or_(is_after(at, due), and_(at == due, follows)))


def make_cursor(task: DelayTask) -> str:
    text = f"{to_us(task.expected_time)}:{task.id}"
    return base64.urlsafe_b64encode(text.encode()).decode()


def _parse_cursor(cursor: str) -> tuple[datetime, int]:
    try:
        text = base64.b64decode(cursor.encode(), b"-_", validate=True).decode()
        due_us, id = text.split(":")
        due, after = from_us(int(due_us)), int(id)
    except (AttributeError, ValueError, OverflowError):
        raise InvalidQueryError(f"{shown(cursor)} is not a cursor that find() returned") from None
    if not -(2**63) <= after < 2**63:
        raise InvalidQueryError(f"{shown(cursor)} is not a cursor that find() returned")
    return due, after
