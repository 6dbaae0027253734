"""Searches for tasks: the conditions of a filter, steps through an index, and pages."""

from __future__ import annotations

import base64
import operator
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from operator import attrgetter
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    SmallInteger,
    Table,
    and_,
    func,
    literal_column,
    or_,
    select,
    true,
)

from delaytasks.db.types import Capabilities, unindexed
from delaytasks.model.clock import from_us, to_us
from delaytasks.model.errors import InvalidInputError
from delaytasks.model.filters import Filter
from delaytasks.model.inputs import pair_text
from delaytasks.model.moves import Status
from delaytasks.model.task import DelayedTask, Level
from delaytasks.model.text import shown

#: Not a backslash, which MySQL's string literals escape, too.
_ESCAPE = "!"


def conditions(tasks: Table, where: Filter, can: Capabilities) -> list[ColumnElement[bool]]:
    """Return the conditions of all filters except `status`, which decides about the index."""
    t = tasks.c
    comparisons = (
        (t.tag, operator.eq, where.tag),
        (t.task_key, operator.eq, where.key),
        (t.queue, operator.eq, where.queue),
        (t.expected_time, operator.ge, where.since),
        (t.expected_time, operator.lt, where.until),
        (t.create_time, operator.ge, where.created_since),
        (t.create_time, operator.lt, where.created_until),
        (t.update_time, operator.lt, where.updated_until),
    )
    found: list[ColumnElement[bool]] = [
        compare(column, value) for column, compare, value in comparisons if value is not None
    ]
    if where.ids is not None:
        ids = sorted(where.ids)
        # The range lets planners leave out partitions.
        found += [t.id.in_(ids), t.id.between(ids[0], ids[-1])]
    if where.key_prefix is not None:
        # Not LIKE, which ignores case in SQLite.
        found.append(func.substr(t.task_key, 1, len(where.key_prefix)) == where.key_prefix)
    if where.error is not None:
        found.append(t.error_stack.ilike(_like(where.error), escape=_ESCAPE))
    if where.meta is not None:
        find = func.strpos if can.arrays else func.instr
        found += [find(t.meta, pair_text(*pair)) > 0 for pair in where.meta]
    return found


def _like(pattern: str) -> str:
    """Return a pattern for LIKE, in which `*` stands for any text."""
    for special in (_ESCAPE, "%", "_"):
        pattern = pattern.replace(special, _ESCAPE + special)
    return pattern.replace("*", "%")


# -- queue levels ---------------------------------------------------------------------------------

# Steps through an index from one queue and priority to the next. The cost grows with their number,
# not with the rows.


def queue_levels(
    connection: Connection,
    t: Table,
    status: Status,
    queue: str | None = None,
    most_queues: int | None = None,
) -> list[Level]:
    """Return the priorities that have rows of this status, of one queue or of all (up to
    `most_queues`)."""
    if queue is not None:  # the other queues are not visited, since each costs a query
        return levels_of(connection, t, status, queue)
    queues = islice(distinct_values(connection, t.c.queue, has_status(t, status)), most_queues)
    return [level for each in queues for level in levels_of(connection, t, status, each)]


def levels_of(connection: Connection, t: Table, status: Status, queue: str) -> list[Level]:
    """Return the priorities of one queue that have rows of this status."""
    here = and_(has_status(t, status), t.c.queue == queue)
    return [Level(queue, priority) for priority in distinct_values(connection, t.c.priority, here)]


def queues_after(
    connection: Connection, t: Table, status: Status, after: str | None, most: int
) -> list[str]:
    """Return the next `most` queues that have rows of this status, in the database's order."""
    return list(islice(distinct_values(connection, t.c.queue, has_status(t, status), after), most))


def has_status(t: Table, *statuses: Status) -> ColumnElement[bool]:
    # Literals, since a parameter may be planned without the partial index of these rows.
    numbers = [literal_column(str(int(status)), SmallInteger) for status in sorted(statuses)]
    return t.c.status == numbers[0] if len(numbers) == 1 else t.c.status.in_(numbers)


def waits_between(t: Table, since: datetime, until: datetime) -> ColumnElement[bool]:
    """The condition for waiting rows due in (since, until]."""
    waits = unindexed(t.c.status) == int(Status.NOT_COMPLETE)
    return and_(waits, t.c.expected_time > since, t.c.expected_time <= until)


def distinct_values(
    connection: Any, column: Any, where: Any = None, after: Any = None
) -> Iterator[Any]:
    """Yield the distinct values of an index's column after the value `after`, one query for
    each."""
    # Not min(): if statistics are missing, PostgreSQL reads all rows of the queue for it.
    query = select(column).where(true() if where is None else where).order_by(column).limit(1)
    while True:
        later = query if after is None else query.where(column > after)
        after = connection.execute(later).scalar()
        if after is None:
            return
        yield after


# -- pages ----------------------------------------------------------------------------------------

# Pages of rows in the order of their due times. A cursor is a position, so pages stay right while
# rows move.


def first_page(
    connection: Any,
    query: Select[Any],
    tasks: Table,
    where: Filter,
    limit: int,
    newest_first: bool = False,
    most_queues: int | None = None,
) -> list[Any]:
    """Return the first rows of `query` by due time, or with `newest_first` the last ones.

    In the order of due times alone, a search for a few rows that failed or wait would read millions
    of finished rows. Rows of one status are therefore read through the index of their status, which
    has them in order within each queue and priority. This does not apply to a filter that has its
    own index: few rows have a given key, and a given tag may have no rows in most queues. Each
    queue costs a query or more: with `most_queues`, no further ones are read.
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
    bounded = query
    for status in sorted(where.status):
        for level in queue_levels(connection, tasks, status, where.queue, most_queues):
            here = (t.queue == level.queue, t.priority == level.priority)
            found += connection.execute(bounded.where(has_status(tasks, status), *here))
            found = sorted(found, key=attrgetter("expected_time", "id"), reverse=newest_first)
            found = found[:limit]
            if len(found) == limit:  # later rows are not on this page
                last = found[-1].expected_time
                bounded = query.where(
                    t.expected_time >= last if newest_first else t.expected_time <= last
                )
    return found


def after_cursor(
    query: Select[Any], tasks: Table, cursor: str, newest_first: bool = False
) -> Select[Any]:
    """Limit `query`, which reads tasks, to the rows after the cursor's position."""
    due, id = _parse_cursor(cursor)
    at, number = tasks.c.expected_time, tasks.c.id
    if newest_first:
        return query.where(at <= due, or_(at < due, number < id))
    return query.where(at >= due, or_(at > due, number > id))


def make_cursor(task: DelayedTask) -> str:
    text = f"{to_us(task.expected_time)}:{task.id}"
    return base64.urlsafe_b64encode(text.encode()).decode()


def _parse_cursor(cursor: str) -> tuple[datetime, int]:
    try:
        text = base64.b64decode(cursor.encode(), b"-_", validate=True).decode()
        due_us, id = text.split(":")
        due, number = from_us(int(due_us)), int(id)
        if not -(2**63) <= number < 2**63:
            raise ValueError
        return due, number
    except (AttributeError, ValueError, OverflowError):
        raise InvalidInputError(
            f"{shown(cursor)} is not a cursor that find() returned", "cursor"
        ) from None
