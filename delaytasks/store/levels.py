"""Stepping through an index from one queue and priority to the next: at the cost of their number, not of the rows'."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, Table, and_, literal_column, select

from delaytasks.core.ports import Level
from delaytasks.core.states import Status


def levels(connection: Connection, t: Table, status: Status) -> Iterator[Level]:
    """The queues and priorities that have rows of this status."""
    here = t.c.status == literal_column(str(int(status)))

    def first(column: Any, where: Any) -> Any:
        # Not min(): where statistics are missing, PostgreSQL reads all rows of the queue for it.
        return connection.execute(select(column).where(where).order_by(column).limit(1)).scalar()

    queue = first(t.c.queue, here)
    while queue is not None:
        in_queue = and_(here, t.c.queue == queue)
        priority = first(t.c.priority, in_queue)
        while priority is not None:
            yield Level(queue, priority)
            priority = first(t.c.priority, and_(in_queue, t.c.priority > priority))
        queue = first(t.c.queue, and_(here, t.c.queue > queue))
