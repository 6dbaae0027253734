"""Steps through an index from one queue and priority to the next. The cost grows with their number,
not with the rows."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    SmallInteger,
    Table,
    and_,
    literal_column,
    select,
    true,
)

from delaytasks.core.interfaces import Level
from delaytasks.core.states import Status
from delaytasks.storage.types import unindexed


def levels(connection: Connection, t: Table, status: Status) -> list[Level]:
    """Return the queues and priorities that have rows of this status."""
    queues = steps(connection, t.c.queue, has_status(t, status))
    return [level for queue in queues for level in levels_of(connection, t, status, queue)]


def levels_of(connection: Connection, t: Table, status: Status, queue: str) -> list[Level]:
    """Return the priorities of one queue that have rows of this status."""
    here = and_(has_status(t, status), t.c.queue == queue)
    return [Level(queue, priority) for priority in steps(connection, t.c.priority, here)]


def queues_after(
    connection: Connection, t: Table, status: Status, after: str | None, most: int
) -> list[str]:
    """Return the next `most` queues that have rows of this status, in the database's order."""
    here = has_status(t, status)
    later = here if after is None else and_(here, t.c.queue > after)
    return list(islice(steps(connection, t.c.queue, later), most))


def has_status(t: Table, *statuses: Status) -> ColumnElement[bool]:
    # Literals, since a parameter may be planned without the partial index of these rows.
    numbers = [literal_column(str(int(status)), SmallInteger) for status in sorted(statuses)]
    return t.c.status == numbers[0] if len(numbers) == 1 else t.c.status.in_(numbers)


def waits_between(t: Table, since: datetime, until: datetime) -> ColumnElement[bool]:
    """The condition for waiting rows due in (since, until]."""
    waits = unindexed(t.c.status) == int(Status.NOT_COMPLETE)
    return and_(waits, t.c.expected_time > since, t.c.expected_time <= until)


def steps(
    connection: Any, column: Any, where: Any = None, descending: bool = False
) -> Iterator[Any]:
    """Yield the distinct values of an index's column, one query for each."""
    where = true() if where is None else where
    query = select(column).where(where).order_by(column.desc() if descending else column).limit(1)
    # Not min(): if statistics are missing, PostgreSQL reads all rows of the queue for it.
    value = connection.execute(query).scalar()
    while value is not None:
        yield value
        further = column < value if descending else column > value
        value = connection.execute(query.where(further)).scalar()
