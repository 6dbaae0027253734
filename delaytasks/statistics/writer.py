"""Writes the counts of a worker to a database once a minute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from delaytasks.core.bounded_calls import all_within
from delaytasks.core.events import Events
from delaytasks.core.loop import Loop
from delaytasks.core.run_counts import RunStatistics
from delaytasks.statistics.queries import StatisticsTable
from delaytasks.statistics.worker_counts import WorkerCounts

if TYPE_CHECKING:
    from delaytasks.routing.shard import Shard

#: The time between two writes. A worker that is killed loses the counts since the last one.
WRITE_S = 60.0
#: A write that takes longer is stuck.
WRITE_STUCK_S = 60.0
#: How long a process that ends waits for its last writes, those of all databases together.
LAST_WRITES_S = 3.0


class StatisticsWriter:
    """Writes what `counts` has for one database."""

    def __init__(self, shard: Shard, counts: WorkerCounts, events: Events) -> None:
        self._shard = shard
        self._counts = counts
        self._events = events
        self._is_first = True
        self.loop = Loop(shard.named("statistics"), self._turn, events, WRITE_STUCK_S, shard.close)

    def _turn(self) -> float:
        # The first turn is at the start of the worker, which has run nothing yet.
        if not self._is_first:
            # Without tables or rights each write fails. Then the next one is a minute later, too.
            self._events.attempt(self.loop.name, "write", self.write)
        self._is_first = False
        return WRITE_S

    def write(self) -> None:
        """Write all counts that are not written yet."""
        number = self._shard.number
        unwritten = self._counts.take(number)
        if not unwritten:
            return
        store, is_executed = self._shard.store, False
        table = StatisticsTable(store.database, store.schema)

        def work(connection: Any) -> None:
            nonlocal is_executed
            table.add(connection, unwritten, self._shard.clock.now())
            is_executed = True

        try:
            # One try: if a commit is lost, nobody knows whether the counts were added.
            store.database.repeat(work, store.database.begin, tries=1)
        except Exception:  # also if a sweep has just deleted a group of failures
            if not is_executed:
                self._counts.put_back(number, unwritten)
            raise


def write_last(writers: Iterable[StatisticsWriter], events: Events) -> None:
    """Write what a process that ends has counted, to all databases at the same time.

    A database that does not answer loses these counts, because a worker must end in time.
    """
    writes = [partial(events.attempt, "stop", "statistics", writer.write) for writer in writers]
    all_within(LAST_WRITES_S, writes)


def write_rest(
    shards: Sequence[Shard], rest: Mapping[int, RunStatistics], max_tags: int, events: Events
) -> None:
    """Write what a process of the pool has counted after its last report, by shard."""
    counts = WorkerCounts([shard.clock for shard in shards], max_tags)
    for number, statistics in rest.items():
        counts.add(number, statistics)
    write_last((StatisticsWriter(shards[number], counts, events) for number in rest), events)
