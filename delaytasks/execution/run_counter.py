"""Counts what one process runs, for the statistics of its worker."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Container, Sequence
from datetime import datetime, timedelta

from delaytasks.core.clock import reset_in_child
from delaytasks.core.interfaces import Settlement
from delaytasks.core.run_counts import (
    LOST_LEASE,
    OUTCOMES,
    FailureCount,
    RunCounts,
    RunStatistics,
)
from delaytasks.core.states import MOVES
from delaytasks.core.task import DelayTask
from delaytasks.core.text import error_pattern
from delaytasks.processors.registry import Registry

#: The most groups of failures in one report. Further ones are counted as outcomes only.
MAX_FAILURE_GROUPS = 20
#: The longest error text of a group.
MAX_SAMPLE = 2000

_FAILURES = {name for name, move in MOVES.items() if move.ending and move.ending.is_failure}


class RunCounter:
    """Counts the runs of one runner until `take` returns the counts for a report.

    Several threads may run and settle tasks. A run is only added to a queue, without a lock, and
    the lock is taken once for the settlements of a chunk.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._runs: deque[tuple[str, timedelta, float]] = deque()
        self._tags: dict[str, RunCounts] = {}
        self._failures: dict[tuple[str, str], FailureCount] = {}

    def add_run(self, task: DelayTask, began: datetime, duration_s: float) -> None:
        """Count a run that has ended, and that began at `began`."""
        self._runs.append((task.tag, began - task.due, duration_s))

    def add_settlements(self, settlements: Sequence[Settlement], accepted: Container[int]) -> None:
        """Count the outcomes of runs. `accepted` are the ids whose settlement changed a row."""
        done: dict[str, int] = {}
        with self._lock:
            for settlement in settlements:
                task = settlement.task
                if settlement.move == "succeed" and task.id in accepted:
                    tag = task.tag
                    done[tag] = done.get(tag, 0) + 1
                else:
                    self._add_outcome(settlement, task.id in accepted)
            for tag, number in done.items():
                self._of(tag).add_outcome(OUTCOMES["succeed"], number)

    def take(self) -> RunStatistics:
        """Return the counts since the last call, and count anew."""
        with self._lock:
            self._add_runs()
            if not self._tags:
                return RunStatistics()
            tags, self._tags = self._tags, {}
            failures, self._failures = self._failures, {}
        return RunStatistics(
            tuple((tag, counts.as_list()) for tag, counts in tags.items()),
            tuple(failures.values()),
        )

    def _add_runs(self) -> None:
        """Add the runs of the queue to the counts of their tags."""
        runs, last, counts, on_time_s = self._runs, "", None, None
        for _ in range(len(runs)):
            tag, lateness, duration_s = runs.popleft()
            if counts is None or tag != last:  # most neighbours have the same tag
                last, counts, on_time_s = tag, self._of(tag), self._on_time_s(tag)
            counts.add_run(lateness.total_seconds(), duration_s, on_time_s)

    def _add_outcome(self, settlement: Settlement, is_accepted: bool) -> None:
        task, move = settlement.task, settlement.move
        counts = self._of(task.tag)
        # A transaction of the processor that is still open keeps the row until its lease ends.
        is_left_open = settlement.is_made and move != "succeed"
        if is_left_open or not is_accepted:
            counts.add_outcome(LOST_LEASE)
            return
        counts.add_outcome(OUTCOMES[move])
        if move in _FAILURES:
            self._add_failure(task, settlement.error or "")
        elif move == "expire" and self._on_time_s(task.tag) is not None:
            counts.late += 1

    def _of(self, tag: str) -> RunCounts:
        counts = self._tags.get(tag)
        if counts is None:
            counts = self._tags[tag] = RunCounts()
        return counts

    def _on_time_s(self, tag: str) -> float | None:
        processor = self._registry.get(tag)
        return None if processor is None else processor.on_time_s

    def _add_failure(self, task: DelayTask, error: str) -> None:
        pattern = error_pattern(error)
        known = self._failures.get((task.tag, pattern))
        if known is not None:
            self._failures[task.tag, pattern] = known._replace(runs=known.runs + 1)
        elif len(self._failures) < MAX_FAILURE_GROUPS:
            self._failures[task.tag, pattern] = FailureCount(
                task.tag, pattern, 1, task.id, error[-MAX_SAMPLE:]
            )
