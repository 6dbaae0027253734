"""What the console reads beyond the public API. Each statement reads a bounded number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, func, literal, select

from delaytasks.core.filters import Filter
from delaytasks.core.states import Status
from delaytasks.statistics.gauge_queries import MAX_GAUGE_PRIORITIES
from delaytasks.storage.pages import first
from delaytasks.storage.queue_levels import first_levels_of, has_status, steps
from delaytasks.storage.store import Store

#: Due tasks that one call reads at most.
MOST_DUE = 5_000
#: Queues whose waiting tasks are counted, and the most that are counted in each.
MOST_QUEUES, MOST_COUNTED = 100, 10_000


class QueueCounts(NamedTuple):
    """The tasks of a queue, counted up to `MOST_COUNTED` each."""

    name: str
    waiting: int
    overdue: int
    running: int
    held: int


class ConsoleQueries:
    """Reads one database."""

    def __init__(self, store: Store) -> None:
        self._db = store.database
        self._t = store.schema.tasks

    def due_between(self, since: datetime, until: datetime) -> list[datetime]:
        """Return the due times of waiting tasks in a range, at most the first `MOST_DUE`."""
        t = self._t.c
        query = select(t.expected_time, t.id).where(
            t.expected_time >= since, t.expected_time < until
        )
        waiting = Filter(status=frozenset({Status.NOT_COMPLETE}))
        rows = self._db.alone(lambda c: first(c, query, self._t, waiting, MOST_DUE))
        return [row[0] for row in rows]

    def queues(self, now: datetime, named: Sequence[str]) -> list[QueueCounts]:
        """Count the live tasks of the queues in `named` and of those that have live tasks."""
        return self._db.alone(lambda c: self._queues(c, now, named))

    def _queues(self, on: Connection, now: datetime, named: Sequence[str]) -> list[QueueCounts]:
        t, names = self._t, set(named)
        for status in (Status.NOT_COMPLETE, Status.RUNNING, Status.HELD):
            for queue in steps(on, t.c.queue, has_status(t, status)):
                if len(names) >= MOST_QUEUES:
                    break
                names.add(queue)

        def count(
            queue: str, status: Status, *more: ColumnElement[bool], most: int = MOST_COUNTED
        ) -> int:
            rows = select(literal(1)).where(has_status(t, status), t.c.queue == queue, *more)
            some = rows.limit(most).subquery()
            return int(on.execute(select(func.count()).select_from(some)).scalar_one())

        def count_overdue(queue: str) -> int:
            # One priority at a time, since the index has the due times in order within each:
            # without a priority, all waiting tasks of the queue are read.
            found, waits = 0, Status.NOT_COMPLETE
            for level in first_levels_of(on, t, waits, queue, MAX_GAUGE_PRIORITIES):
                here = (t.c.priority == level.priority, t.c.expected_time < now)
                found += count(queue, waits, *here, most=MOST_COUNTED - found)
                if found >= MOST_COUNTED:
                    break
            return found

        return [
            QueueCounts(
                queue,
                count(queue, Status.NOT_COMPLETE),
                count_overdue(queue),
                count(queue, Status.RUNNING),
                count(queue, Status.HELD),
            )
            for queue in sorted(names)
        ]
