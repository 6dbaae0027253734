"""Counts of runs at instants that a test chooses, written as a worker writes its own."""

from __future__ import annotations

from datetime import datetime

from delaytasks.model.clock import to_us
from delaytasks.operate.statistics import count_rows
from delaytasks.operate.statistics_table import MINUTE_US, StatisticsTable, Unwritten
from delaytasks.run.observers import FailureCount, RunCounts
from tests.world.world import World


class Counts:
    """What a worker has counted since it wrote the last time."""

    def __init__(self, world: World) -> None:
        self._store = world.store
        self._unwritten = Unwritten()

    def add_runs(
        self,
        at: datetime,
        tag: str,
        *latenesses_s: float,
        duration_s: float = 0.2,
        on_time_s: float | None = None,
    ) -> Counts:
        """Add a run that succeeded for each lateness."""
        counts = RunCounts()
        counts["done"] += len(latenesses_s)
        for lateness_s in latenesses_s:
            counts.add_run(lateness_s, duration_s, on_time_s)
        self._unwritten.add_run(to_us(at) // MINUTE_US, tag, counts)
        return self

    def add_failures(
        self, at: datetime, pattern: str, runs: int = 1, task_id: int = 1, error: str = "broken"
    ) -> Counts:
        """Add runs of the tag `a` that failed in the hour of this instant."""
        failure = FailureCount("a", pattern, runs, task_id, error)
        self._unwritten.add_failure(to_us(at) // MINUTE_US // 60, failure)
        return self

    def write(self, now: datetime) -> None:
        """Write all counts in one transaction."""
        table = StatisticsTable(self._store.database, self._store.schema)
        self._store.database.transaction(lambda on: table.add(on, self._unwritten, now))

    def rows(self, since: datetime, until: datetime, most: int) -> int:
        """Count the rows of a range up to a limit, as the console does before it reads them."""
        return count_rows(self._store, since, until, most)
