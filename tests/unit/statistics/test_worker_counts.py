"""The counts of a worker's main process: totals, and counts that are not written yet."""

from __future__ import annotations

from datetime import datetime, timezone

from delaytasks.core.run_counts import (
    OTHER_TAGS,
    WORKER_LOST,
    FailureCount,
    RunCounts,
    RunStatistics,
)
from delaytasks.statistics.statistics_table import MAX_GROUPS_OF_WORKER, MAX_MINUTES, WorkerCounts
from tests.recording import ManualClock

START = datetime(2030, 1, 1, 12, 0, 30, tzinfo=timezone.utc)
MINUTE = int(START.timestamp()) // 60


def report(*tags: str, failures: tuple[FailureCount, ...] = ()) -> RunStatistics:
    counts = RunCounts()
    counts.add_outcome("done")
    counts.add_run(0.1, 0.2, None)
    return RunStatistics(tuple((tag, counts.as_list()) for tag in tags), failures)


def started(counts: WorkerCounts) -> dict[str, int]:
    return {tag: found.started for tag, found in counts.totals().items()}


def test_totals_include_written_and_unwritten_counts() -> None:
    counts = WorkerCounts(ManualClock(START), 10)
    counts.add(report("a", "b"))
    counts.take()
    counts.add(report("a"))
    assert started(counts) == {"a": 2, "b": 1}
    assert counts.totals()["a"].outcome("done") == 2


def test_tags_beyond_the_limit_are_counted_together() -> None:
    counts = WorkerCounts(ManualClock(START), 2)
    counts.add(report("a", "b", "c", "d"))
    counts.add(report("a", "d"))
    assert started(counts) == {"a": 2, "b": 1, OTHER_TAGS: 3}


def test_a_long_outage_keeps_a_bounded_number_of_minutes_and_all_counts() -> None:
    clock = ManualClock(START)
    counts = WorkerCounts(clock, 1)
    for _ in range(2 * MAX_MINUTES):
        counts.add(report("a"))
        clock.advance(60)
    taken = counts.take()
    assert len(taken.runs) == MAX_MINUTES
    assert sum(one.started for one in taken.runs.values()) == 2 * MAX_MINUTES


def test_failed_writes_keep_the_newest_minutes_and_all_counts() -> None:
    clock = ManualClock(START)
    counts = WorkerCounts(clock, 10)
    for number in range(2 * MAX_MINUTES):
        counts.add(report("a", "b"))
        counts.put_back(counts.take())
        if number < 2 * MAX_MINUTES - 1:
            clock.advance(60)
    taken = counts.take()
    newest = MINUTE + 2 * MAX_MINUTES - 1
    oldest = newest - MAX_MINUTES + 1
    assert {minute for minute, _ in taken.runs} == set(range(oldest, newest + 1))
    assert taken.runs[oldest, "a"].started == taken.runs[oldest, "b"].started == MAX_MINUTES + 1
    assert sum(one.started for one in taken.runs.values()) == 4 * MAX_MINUTES
    assert started(counts) == {"a": 2 * MAX_MINUTES, "b": 2 * MAX_MINUTES}


def test_failed_writes_keep_a_bounded_number_of_groups() -> None:
    counts = WorkerCounts(ManualClock(START), 10)
    for number in range(MAX_GROUPS_OF_WORKER + 5):
        counts.add(report("a", failures=(FailureCount("a", f"p{number}", 1, number, "error"),)))
        counts.put_back(counts.take())
    assert len(counts.take().failures) == MAX_GROUPS_OF_WORKER


def test_a_task_that_its_workers_lost_is_counted_and_grouped() -> None:
    counts = WorkerCounts(ManualClock(START), 10)
    counts("task.worker_lost", {"id": 5, "tag": "a", "error": "gave up: it died 5 times"})
    counts("task.failed", {"id": 5, "tag": "a", "error": "counted by the process"})
    assert counts.totals()["a"].outcome(WORKER_LOST) == 1
    [failure] = counts.take().failures.values()
    assert failure.pattern == "gave up: it died * times*"
