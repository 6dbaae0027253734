"""Counts of runs at instants that a test chooses, written as a worker writes its own."""

from __future__ import annotations

from datetime import datetime

from delaytasks.operate.statistics import write_counts
from delaytasks.run.observers import Counted, RunCounts
from tests.world.world import World


class Counts:
    """What workers have counted and not written yet, by the instant of the write."""

    def __init__(self, world: World) -> None:
        self._store = world.store
        self._unwritten: dict[datetime, Counted] = {}

    def add_runs(
        self, at: datetime, tag: str, *latenesses_s: float, duration_s: float = 0.2
    ) -> Counts:
        """Add a run that succeeded for each lateness."""
        counts = RunCounts()
        counts["done"] += len(latenesses_s)
        for lateness_s in latenesses_s:
            counts.add_run(lateness_s, duration_s)
        return self._add(at, (tag, ""), counts)

    def add_failures(
        self, at: datetime, pattern: str, runs: int = 1, task_id: int = 1, error: str = "broken"
    ) -> Counts:
        """Add runs of the tag `a` that failed at this instant."""
        failure = {"pattern": pattern, "failed": runs, "task_id": task_id, "error": error}
        return self._add(at, ("a", pattern), RunCounts(failure))

    def write(self) -> None:
        """Write all counts in one transaction. They are kept, and can be written again."""
        store = self._store

        def work(on: object) -> None:
            for at, unwritten in self._unwritten.items():
                write_counts(store, on, unwritten, at)

        store.database.transaction(work)

    def _add(self, at: datetime, key: tuple[str, str], counts: RunCounts) -> Counts:
        self._unwritten.setdefault(at, {}).setdefault(key, RunCounts()).add(counts)
        return self
