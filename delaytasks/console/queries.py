"""What the console reads beyond the public API. Each statement reads a bounded number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import Connection, func, literal, select

from delaytasks.core.filters import Filter
from delaytasks.core.states import Status
from delaytasks.storage.overdue_rows import OverdueRows
from delaytasks.storage.pages import first
from delaytasks.storage.queue_levels import has_status, steps
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
    #: The due time of the oldest of the overdue tasks that were counted.
    oldest: datetime | None


class ConsoleQueries:
    """Reads one database."""

    def __init__(self, store: Store) -> None:
        self._db = store.database
        self._t = store.schema.tasks
        self._overdue = OverdueRows(store.database, store.schema)

    def due_between(self, since: datetime, until: datetime) -> list[datetime]:
        """Return the due times of waiting tasks in a range, at most the first `MOST_DUE`."""
        t = self._t.c
        query = select(t.expected_time, t.id).where(
            t.expected_time >= since, t.expected_time < until
        )
        waiting = Filter(status=frozenset({Status.NOT_COMPLETE}))
        rows = self._db.autocommitted(lambda c: first(c, query, self._t, waiting, MOST_DUE))
        return [row[0] for row in rows]

    def queues(self, named: Sequence[str], late_s: float) -> list[QueueCounts]:
        """Count the live tasks of the queues in `named` and of those that have live tasks.

        Tasks that are late by more than `late_s` are overdue.
        """
        return self._db.autocommitted(lambda c: self._queues(c, named, late_s))

    def _queues(self, on: Connection, named: Sequence[str], late_s: float) -> list[QueueCounts]:
        t, names = self._t, set(named)
        for status in (Status.NOT_COMPLETE, Status.RUNNING, Status.HELD):
            for queue in steps(on, t.c.queue, has_status(t, status)):
                if len(names) >= MOST_QUEUES:
                    break
                names.add(queue)

        def count(queue: str, status: Status) -> int:
            rows = select(literal(1)).where(has_status(t, status), t.c.queue == queue)
            some = rows.limit(MOST_COUNTED).subquery()
            return int(on.execute(select(func.count()).select_from(some)).scalar_one())

        overdue = self._overdue.count_of_queues(on, sorted(names), late_s, MOST_COUNTED)
        return [
            QueueCounts(
                queue,
                count(queue, Status.NOT_COMPLETE),
                overdue[queue].tasks,
                count(queue, Status.RUNNING),
                count(queue, Status.HELD),
                overdue[queue].oldest,
            )
            for queue in sorted(names)
        ]
