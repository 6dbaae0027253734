"""The counts of one worker, in its main process."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from delaytasks.core.clock import Clock
from delaytasks.core.run_counts import (
    OTHER_TAGS,
    WORKER_LOST,
    FailureCount,
    RunCounts,
    RunStatistics,
)
from delaytasks.core.text import error_pattern

#: The length of a period in microseconds.
MINUTE_US = 60_000_000
#: The most minutes that wait to be written while a database is unavailable. The counts of other
#: minutes are added to one of them.
MAX_MINUTES = 60
#: The most groups of failures that wait to be written. The others are not counted as groups.
MAX_GROUPS_OF_WORKER = 500


@dataclass
class Unwritten:
    """Counts of one database that are not written yet."""

    #: By the minute in which they were reported, in minutes since 1970, and by tag.
    runs: dict[tuple[int, str], RunCounts] = field(default_factory=dict)
    #: By the hour, the tag and the error pattern.
    failures: dict[tuple[int, str, str], FailureCount] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.runs or self.failures)

    def add_run(self, minute: int, tag: str, counts: RunCounts) -> None:
        if (minute, tag) in self.runs:
            self.runs[minute, tag].add(counts)
        else:
            self.runs[minute, tag] = counts

    def add_failure(self, hour: int, failure: FailureCount) -> None:
        key = hour, failure.tag, failure.pattern
        known = self.failures.get(key)
        if known is not None:
            self.failures[key] = failure._replace(runs=known.runs + failure.runs)
        elif len(self.failures) < MAX_GROUPS_OF_WORKER:
            self.failures[key] = failure

    def add(self, other: Unwritten) -> None:
        for (minute, tag), counts in other.runs.items():
            self.add_run(minute, tag, counts)
        for (hour, _, _), failure in other.failures.items():
            self.add_failure(hour, failure)

    def limit_minutes(self) -> None:
        """Keep the newest `MAX_MINUTES` minutes, and add all older runs to the oldest of them."""
        minutes = sorted({minute for minute, _ in self.runs})
        if len(minutes) <= MAX_MINUTES:
            return
        oldest = minutes[-MAX_MINUTES]
        for minute, tag in [key for key in self.runs if key[0] < oldest]:
            self.add_run(oldest, tag, self.runs.pop((minute, tag)))


class WorkerCounts:
    """What a worker's processes have run since the worker started.

    The pool processes report their counts with each chunk. Any thread may call these methods: one
    thread for each database writes the counts, and an endpoint for metrics reads `totals`.
    """

    def __init__(self, clock: Clock, max_tags: int) -> None:
        self._clock = clock
        self._max_tags = max_tags
        self._lock = threading.Lock()
        self._tags: set[str] = set()
        self._totals: dict[str, RunCounts] = {}
        self._unwritten = Unwritten()
        #: Counts that could not be written. The totals have them already.
        self._again = Unwritten()

    def add(self, statistics: RunStatistics) -> None:
        """Add what a process has reported."""
        if not statistics.tags:
            return
        minute = self._minute()
        with self._lock:
            for tag, stored in statistics.tags:
                self._of(minute, tag).add_stored(stored)
            for failure in statistics.failures:
                self._unwritten.add_failure(
                    minute // 60, failure._replace(tag=self._counted_as(failure.tag))
                )

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        """Count the tasks that failed because their workers died. A subscriber of events."""
        if name != "task.worker_lost":
            return
        id, tag, error = fields["id"], fields["tag"], str(fields["error"])
        failure = FailureCount(self._counted_as(tag), error_pattern(error), 1, id, error)
        minute = self._minute()
        with self._lock:
            self._of(minute, tag).add_outcome(WORKER_LOST)
            self._unwritten.add_failure(minute // 60, failure)

    def totals(self) -> dict[str, RunCounts]:
        """Return the counts of each tag since the worker started, as copies."""
        with self._lock:
            found = {tag: counts.copy() for tag, counts in self._totals.items()}
            for (_, tag), counts in self._unwritten.runs.items():
                found.setdefault(tag, RunCounts()).add(counts)
        return found

    def take(self) -> Unwritten:
        """Return the counts that are to be written now."""
        with self._lock:
            taken, self._unwritten = self._unwritten, Unwritten()
            for (_, tag), counts in taken.runs.items():
                self._totals.setdefault(tag, RunCounts()).add(counts)
            again, self._again = self._again, Unwritten()
        again.add(taken)
        return again

    def put_back(self, unwritten: Unwritten) -> None:
        """Keep counts that could not be written for the next call of `take`."""
        with self._lock:
            self._again.add(unwritten)
            self._again.limit_minutes()

    def _minute(self) -> int:
        return int(self._clock.now_us() // MINUTE_US)

    def _of(self, minute: int, tag: str) -> RunCounts:
        runs, tag = self._unwritten.runs, self._counted_as(tag)
        counts = runs.get((minute, tag))
        if counts is None:
            if len(runs) >= MAX_MINUTES * self._max_tags:
                minute = max(known for known, _ in runs)
            counts = runs.setdefault((minute, tag), RunCounts())
        return counts

    def _counted_as(self, tag: str) -> str:
        if tag in self._tags:
            return tag
        if len(self._tags) >= self._max_tags:
            return OTHER_TAGS
        self._tags.add(tag)
        return tag
