"""Stepping through an index from one queue and priority to the next: at the cost of their number, not of the rows'."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, Table, and_, literal_column, select, true

from delaytasks.core.ports import Level
from delaytasks.core.states import Status


def levels(connection: Connection, t: Table, status: Status) -> Iterator[Level]:
    """The queues and priorities that have rows of this status."""
    here = t.c.status == literal_column(str(int(status)))
    for queue in steps(connection, t.c.queue, here):
        for priority in steps(connection, t.c.priority, and_(here, t.c.queue == queue)):
            yield Level(queue, priority)


def steps(connection: Any, column: Any, where: Any = None) -> Iterator[Any]:
    """The values of an index's column, from one to the next."""
    where = true() if where is None else where
    query = select(column).where(where).order_by(column).limit(1)
    # Not min(): where statistics are missing, PostgreSQL reads all rows of the queue for it.
    value = connection.execute(query).scalar()
    while value is not None:
        yield value
        value = connection.execute(query.where(column > value)).scalar()
