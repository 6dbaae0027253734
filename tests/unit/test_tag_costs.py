"""Quick and slow tags in one queue: the order of a chunk's rows, and the size of the next chunk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from delaytasks.core.workers import ChunkSize
from delaytasks.execution.chunk_runner import TagCosts
from delaytasks.execution.runner import Report
from tests.recording import RunnerHarness
from tests.unit.conftest import Make
from tests.waiting import wait_until

BUDGET_S = 0.1


def size_after(*reports: Report) -> ChunkSize:
    size = ChunkSize(BUDGET_S, 200)
    for report in reports:
        rows, seconds = report.sample or (report.ran, report.seconds)
        size.learn(rows, seconds)
    return size


def mixed(make: Make, slow: Callable[[Any], object], **changes: Any) -> RunnerHarness:
    """Return a bench whose tag "slow" was learned to outlast the time budget."""
    bench = make(chunk_time_budget_s=BUDGET_S, **changes)
    waits = threading.Event()

    def run(body: Any) -> None:
        if body == "learn":
            waits.wait(1.2 * 2 * BUDGET_S)
        else:
            slow(body)
            bench.ran.append(body)

    bench.registry.processor("slow")(run)
    bench.run(bench.schedule())
    bench.run(bench.schedule("slow", "learn"))
    bench.ran.clear()
    return bench


def test_quick_rows_run_before_a_slow_one_that_leaves_no_time_for_them(make: Make) -> None:
    bench = mixed(make, lambda body: None)
    bench.run(bench.schedule("slow", 0), bench.schedule(body=1), bench.schedule(body=2))
    assert bench.ran == [1, 2, 0]


def test_a_quick_row_does_not_overtake_a_slow_one_of_a_higher_priority(make: Make) -> None:
    bench = mixed(make, lambda body: None)
    tasks = [bench.schedule("slow", 0, priority=1), bench.schedule(body=1)]
    bench.run(*tasks)
    assert bench.ran == [0, 1]


def test_rows_that_fit_the_time_budget_run_in_the_order_of_their_due_times(make: Make) -> None:
    bench = make()

    def wait(body: Any) -> None:
        threading.Event().wait(0.01)
        bench.ran.append(body)

    bench.registry.processor("slower")(wait)
    bench.run(bench.schedule("slower"), bench.schedule())
    bench.run(*[bench.schedule(tag, tag) for tag in ("slower", "note", "slower")])
    assert bench.ran[-3:] == ["slower", "note", "slower"]


def test_a_slow_row_gives_back_slow_rows_and_no_quick_ones(make: Make) -> None:
    def outlast(body: Any) -> None:
        wait_until(lambda: bench.events.counts["chunk.gave_back"], 5, "the end of the time budget")

    bench = mixed(make, outlast)
    slow = [bench.schedule("slow", number) for number in range(3)]
    quick = [bench.schedule(body="quick") for _ in range(20)]
    report = bench.run(*slow, *quick)
    assert bench.statuses(quick) == ["DONE"] * 20
    assert bench.statuses(slow) == ["DONE", "NOT_COMPLETE", "NOT_COMPLETE"]
    assert report.ran == 21
    assert report.sample is not None
    assert report.sample.rows == 23, "the rows that were given back count as what they would take"
    assert report.sample.seconds == pytest.approx(3 * BUDGET_S, rel=0.5)


def test_a_slow_row_counts_as_one_time_budget(make: Make) -> None:
    bench = mixed(make, lambda body: threading.Event().wait(4 * BUDGET_S))
    quick = [bench.schedule() for _ in range(19)]
    report = bench.run(*quick, bench.schedule("slow"))
    assert report.ran == 20
    assert report.seconds > 4 * BUDGET_S
    assert size_after(report, report).rows > 10, "with the whole time it would be 5"


def test_a_chunk_of_slow_rows_makes_the_next_one_small_although_only_one_row_ran(
    make: Make,
) -> None:
    def outlast(body: Any) -> None:
        wait_until(lambda: bench.events.counts["chunk.gave_back"], 5, "the end of the time budget")

    bench = mixed(make, outlast)
    quick = Report(200, 200, 0.0002)
    report = bench.run(*[bench.schedule("slow", number) for number in range(40)])
    assert report.ran == 1
    assert size_after(quick, report).rows == 1
    assert size_after(quick, Report(40, 1, report.seconds)).rows > 1, "by the row that ran alone"


def test_rows_without_a_processor_are_not_remembered(make: Make) -> None:
    bench = make(chunk_time_budget_s=BUDGET_S, strict_tags=False)
    learned: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        learn = TagCosts.learn

        def note(self: TagCosts, tag: str, rows: int, seconds: float) -> float:
            learned.append(tag)
            return learn(self, tag, rows, seconds)

        patch.setattr(TagCosts, "learn", note)
        bench.run(bench.schedule("of another release"), bench.schedule())
    assert learned == ["note"]
