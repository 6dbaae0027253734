"""Drains of queues whose rows are overdue."""

from __future__ import annotations

from billiard.einfo import ExceptionInfo
from billiard.exceptions import WorkerLostError

from delaytasks.execution.runner import Report
from delaytasks.worker.queue_drain import HELD_UP_S
from tests.unit.dispatcher.dispatcher_harness import DispatcherHarness, Hands
from tests.waiting import wait_until


def test_a_deep_backlog_is_drained_by_all_processes_and_a_shallow_one_by_one(
    bench: DispatcherHarness,
) -> None:
    bench.dispatcher.drain("default", [0])
    assert len(bench.pool.requests) == 1
    bench.pool.end(Report(10, 10, 0.001, (), is_full=True))
    assert [request.drain for request, _, _ in bench.pool.requests] == ["default", "default"]
    bench.pool.end(Report(3, 3, 0.001))
    assert len(bench.pool.requests) == 1
    bench.pool.end(Report(0))
    assert bench.pool.requests == []


def test_fresh_tasks_and_a_backlog_take_turns() -> None:
    bench = DispatcherHarness()
    bench.pool.limit = 1
    bench.dispatcher.take(bench.entries(100))
    bench.dispatcher.drain("default", [0])
    kinds = []
    for _ in range(4):
        request = bench.pool.end(Report(10, 10, 0.05, (), is_full=True))
        kinds.append("old" if request.drain else "fresh")
    assert kinds == ["fresh", "old", "fresh", "old"]


def test_a_drain_that_a_slow_row_holds_up_goes_on_in_the_free_processes_without_being_asked(
    hands: Hands,
) -> None:
    """Each look at most doubles the number of processes, until a process finds the queue empty."""
    bench = DispatcherHarness()
    bench.pool.limit = 8
    bench.dispatcher.drain("default", [0])
    assert len(bench.pool.requests) == 1, "it is not known to be deep"
    for processes in (2, 4, 8, 8):
        hands.at += HELD_UP_S + 0.01
        wait_until(
            lambda count=processes: len(bench.pool.requests) == count,  # type: ignore[misc]
            5,
            f"{processes} processes at it",
        )
        bench.dispatcher.pump()
        assert len(bench.pool.requests) == processes, "the new ones have just begun"
    for _ in range(8):
        bench.pool.end(Report(1, 1, 12.0))
    assert bench.pool.requests == []


def test_an_empty_queue_behind_a_slow_task_is_read_once(hands: Hands) -> None:
    bench = DispatcherHarness()
    bench.pool.limit = 8
    bench.dispatcher.drain("default", [0])
    hands.at += HELD_UP_S + 0.01
    bench.dispatcher.pump()
    assert len(bench.pool.requests) == 2
    slow = bench.pool.requests.pop(0)
    bench.pool.end(Report(0))
    for _ in range(3):
        hands.at += HELD_UP_S + 0.01
        bench.dispatcher.pump()
    assert bench.pool.requests == [], "there is nothing in it"
    bench.dispatcher.drain("default", [0])
    bench.pool.end(Report(0))
    assert bench.pool.requests == [], "the next token is worth one look, too"
    slow[1](Report(10, 1, 12.0))
    assert bench.pool.requests == []


def test_a_chunk_that_ends_late_does_not_end_a_drain_that_was_asked_for_after_it(
    hands: Hands,
) -> None:
    bench = DispatcherHarness()
    bench.dispatcher.drain("default", [0])
    hands.at += HELD_UP_S + 0.01
    bench.dispatcher.pump()
    slow = bench.pool.requests.pop(0)
    bench.pool.end(Report(0))
    bench.pool.limit = 1  # the slow chunk occupies the only process
    bench.dispatcher.drain("default", [0])
    assert bench.pool.requests == []
    slow[1](Report(3, 1, 12.0))
    assert [request.drain for request, _, _ in bench.pool.requests] == ["default"]


def test_a_drain_goes_on_after_a_process_of_it_died_and_ends_with_the_database(
    hands: Hands,
) -> None:
    bench = DispatcherHarness()
    bench.dispatcher.drain("default", [0])
    _, _, lost = bench.pool.requests.pop()
    try:
        raise WorkerLostError("exited prematurely")
    except WorkerLostError:
        lost(ExceptionInfo())
    wait_until(lambda: bench.pool.requests, 5, "another process to go on")
    bench.pool.end(Report(error="StoreUnavailableError: away"))
    hands.at += 60
    bench.dispatcher.pump()
    assert bench.pool.requests == []


def test_a_drain_that_is_asked_for_while_one_is_under_way_is_done_after_it(
    bench: DispatcherHarness,
) -> None:
    bench.dispatcher.drain("default", [0])
    bench.dispatcher.drain("default", [5])
    bench.pool.end(Report(0))
    assert [set(request.priorities) for request, _, _ in bench.pool.requests] == [{0, 5}]
    bench.pool.end(Report(0))
    assert bench.pool.requests == []
