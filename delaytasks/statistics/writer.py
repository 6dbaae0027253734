"""Writes the counts of a worker to the database once a minute."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from delaytasks.core.clock import Clock
from delaytasks.core.events import Events
from delaytasks.core.loop import Loop, all_within
from delaytasks.core.run_counts import RunStatistics
from delaytasks.statistics.statistics_table import StatisticsTable
from delaytasks.statistics.worker_counts import WorkerCounts

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime
    from delaytasks.storage.store import Store

#: The time between two writes. A worker that is killed loses the counts since the last one.
WRITE_S = 60.0
#: A write that takes longer is stuck.
WRITE_STUCK_S = 60.0
#: How long a process that ends waits for its last write.
LAST_WRITE_S = 3.0


class StatisticsWriter:
    """Writes what `counts` has."""

    def __init__(self, store: Store, clock: Clock, counts: WorkerCounts, events: Events) -> None:
        self._store = store
        self._clock = clock
        self._counts = counts
        self._events = events
        self._is_first = True
        self.loop = Loop("statistics", self._turn, events, WRITE_STUCK_S, store.close)

    def _turn(self) -> float:
        # The first turn is at the start of the worker, which has run nothing yet.
        if not self._is_first:
            # Without tables or rights each write fails. Then the next one is a minute later, too.
            self._events.attempt(self.loop.name, "write", self.write)
        self._is_first = False
        return WRITE_S

    def write(self) -> None:
        """Write all counts that are not written yet."""
        unwritten = self._counts.take()
        if not unwritten:
            return
        store, is_executed = self._store, False
        table = StatisticsTable(store.database, store.schema)

        def work(connection: Any) -> None:
            nonlocal is_executed
            table.add(connection, unwritten, self._clock.now())
            is_executed = True

        try:
            # One try: if a commit is lost, nobody knows whether the counts were added.
            store.database.repeat(work, store.database.begin, tries=1)
        except Exception:  # also if a sweep has just deleted a group of failures
            if not is_executed:
                self._counts.put_back(unwritten)
            raise


def write_last(writer: StatisticsWriter, events: Events) -> None:
    """Write what a process that ends has counted.

    If the database does not answer, these counts are lost, because a worker must end in time.
    """
    all_within(LAST_WRITE_S, [partial(events.attempt, "stop", "statistics", writer.write)])


def write_rest(runtime: Runtime, rest: RunStatistics) -> None:
    """Write what a process of the pool has counted after its last report."""
    counts = WorkerCounts(runtime.clock, runtime.settings.statistics_tags)
    counts.add(rest)
    writer = StatisticsWriter(runtime.store, runtime.clock, counts, runtime.events)
    write_last(writer, runtime.events)
