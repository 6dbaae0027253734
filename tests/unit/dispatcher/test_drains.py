"""Drains of queues whose rows are overdue."""

from __future__ import annotations

import pytest
from billiard.einfo import ExceptionInfo
from billiard.exceptions import WorkerLostError
from celery.concurrency import solo

from delaytasks.execution.runner import FailureReason, Report
from delaytasks.worker.chunk_queue import CONTINUE_IN_TURN_S, CONTINUE_S, HELD_UP_S, UnfinishedWork
from tests.unit.dispatcher.dispatcher_harness import DispatcherHarness, Hands
from tests.waiting import wait_until


def test_a_large_backlog_is_drained_by_all_processes_and_a_small_one_by_one_process(
    bench: DispatcherHarness,
) -> None:
    bench.dispatcher.start_drain("default", [0])
    assert len(bench.pool.requests) == 1
    bench.pool.end(Report(10, 10, 0.001, (), is_full=True))
    assert [request.drained_queue for request, _, _ in bench.pool.requests] == [
        "default",
        "default",
    ]
    bench.pool.end(Report(3, 3, 0.001))
    assert len(bench.pool.requests) == 1
    bench.pool.end(Report(0))
    assert bench.pool.requests == []


def test_chunks_of_fresh_tasks_and_of_a_backlog_alternate() -> None:
    bench = DispatcherHarness()
    bench.pool.limit = 1
    bench.dispatcher.take(bench.entries(100))
    bench.dispatcher.start_drain("default", [0])
    kinds = []
    for _ in range(4):
        request = bench.pool.end(Report(10, 10, 0.05, (), is_full=True))
        kinds.append("old" if request.drained_queue else "fresh")
    assert kinds == ["fresh", "old", "fresh", "old"]


def test_a_drain_delayed_by_a_slow_row_continues_in_free_processes(
    hands: Hands,
) -> None:
    """Each look at most doubles the number of processes, until a process finds the queue empty."""
    bench = DispatcherHarness()
    bench.pool.limit = 8
    bench.dispatcher.start_drain("default", [0])
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
    bench.dispatcher.start_drain("default", [0])
    hands.at += HELD_UP_S + 0.01
    bench.dispatcher.pump()
    assert len(bench.pool.requests) == 2
    slow = bench.pool.requests.pop(0)
    bench.pool.end(Report(0))
    for _ in range(3):
        hands.at += HELD_UP_S + 0.01
        bench.dispatcher.pump()
    assert bench.pool.requests == [], "there is nothing in it"
    bench.dispatcher.start_drain("default", [0])
    bench.pool.end(Report(0))
    assert bench.pool.requests == [], "the next start is worth one look, too"
    slow[1](Report(10, 1, 12.0))
    assert bench.pool.requests == []


def test_a_chunk_that_ends_late_does_not_end_a_drain_that_was_requested_later(
    hands: Hands,
) -> None:
    bench = DispatcherHarness()
    bench.dispatcher.start_drain("default", [0])
    hands.at += HELD_UP_S + 0.01
    bench.dispatcher.pump()
    slow = bench.pool.requests.pop(0)
    bench.pool.end(Report(0))
    bench.pool.limit = 1  # the slow chunk occupies the only process
    bench.dispatcher.start_drain("default", [0])
    assert bench.pool.requests == []
    slow[1](Report(3, 1, 12.0))
    assert [request.drained_queue for request, _, _ in bench.pool.requests] == ["default"]


def test_a_drain_continues_after_its_process_died_and_ends_if_the_database_is_unavailable(
    hands: Hands,
) -> None:
    bench = DispatcherHarness()
    bench.dispatcher.start_drain("default", [0])
    _, _, lost = bench.pool.requests.pop()
    try:
        raise WorkerLostError("exited prematurely")
    except WorkerLostError:
        lost(ExceptionInfo())
    wait_until(lambda: bench.pool.requests, 5, "another process to go on")
    bench.pool.end(Report(error="away", reason=FailureReason.UNAVAILABLE))
    hands.at += 60
    bench.dispatcher.pump()
    assert bench.pool.requests == []


def test_a_drain_requested_during_another_drain_is_done_after_it(
    bench: DispatcherHarness,
) -> None:
    bench.dispatcher.start_drain("default", [0])
    bench.dispatcher.start_drain("default", [5])
    bench.pool.end(Report(0))
    assert [set(request.priorities) for request, _, _ in bench.pool.requests] == [{0, 5}]
    bench.pool.end(Report(0))
    assert bench.pool.requests == []


def test_processes_continue_to_drain_a_queue_with_a_large_backlog(bench: DispatcherHarness) -> None:
    bench.dispatcher.start_drain("default", [0])
    assert bench.continue_s() == [0]
    bench.pool.end(Report(10, 10, 0.001, (), is_full=True))
    assert bench.continue_s() == [CONTINUE_S] * 2
    assert not bench.others_wait.is_so()


def test_draining_processes_notice_another_queue_and_share_their_time_with_it(
    bench: DispatcherHarness,
) -> None:
    full = Report(10, 10, 0.001, (), is_full=True)
    bench.dispatcher.start_drain("default", [0])
    bench.pool.end(full)
    bench.dispatcher.start_drain("mail", [0])
    assert bench.others_wait.is_so()
    bench.pool.end(full)
    assert not bench.others_wait.is_so(), "a process has begun to drain the other queue"
    bench.pool.end(full)
    assert {request.drained_queue for request, _, _ in bench.pool.requests} == {"default", "mail"}
    assert bench.continue_s() == [0, CONTINUE_IN_TURN_S]


def test_draining_processes_notice_tasks_that_wait_for_a_process(
    bench: DispatcherHarness,
) -> None:
    bench.dispatcher.start_drain("default", [0])
    bench.pool.end(Report(10, 10, 0.001, (), is_full=True))
    bench.dispatcher.take(bench.entries(1))
    assert bench.others_wait.is_so()
    bench.pool.end(Report(10, 10, 0.001, (), is_full=True))
    assert bench.sizes() == [0, 1]
    assert not bench.others_wait.is_so(), "the task is in a process"


def test_draining_processes_notice_that_the_worker_stops(bench: DispatcherHarness) -> None:
    bench.dispatcher.start_drain("default", [0])
    bench.pool.end(Report(10, 10, 0.001, (), is_full=True))
    bench.dispatcher.close()
    assert bench.others_wait.is_so()


def test_a_draining_process_has_capacity_for_entries_that_become_due(
    bench: DispatcherHarness, hands: Hands
) -> None:
    bench.dispatcher.start_drain("default", [0])
    bench.pool.end(Report(10, 10, 0.001, (), is_full=True))
    bench.clock.advance(0.4)
    assert bench.dispatcher.capacity() > 0


def test_a_solo_pool_ends_each_drain_chunk_so_that_it_can_read_its_messages(
    bench: DispatcherHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solo, "TaskPool", type(bench.pool))
    bench.dispatcher.start_drain("default", [0])
    bench.pool.end(Report(10, 10, 0.001, (), is_full=True))
    assert bench.continue_s() == [0, 0]


def learn(bench: DispatcherHarness, row_s: float) -> None:
    bench.dispatcher.take(bench.entries(10))
    for _ in range(2):
        bench.pool.end(Report(5, 5, 5 * row_s))


def test_a_burst_of_slow_tasks_is_left_to_the_table_and_claimed_ahead(
    bench: DispatcherHarness,
) -> None:
    learn(bench, 0.02)
    bench.dispatcher.take(bench.entries(200))
    assert [request.drained_queue for request, _, _ in bench.pool.requests] == ["default"] * 2
    assert bench.continue_s() == [CONTINUE_S] * 2
    assert (bench.dispatcher.waiting, bench.events.counts["entry.late"]) == (0, 200)


def test_other_workers_are_asked_once_to_help_with_what_is_left_to_the_table(
    bench: DispatcherHarness,
) -> None:
    learn(bench, 0.02)
    bench.dispatcher.take(bench.entries(100) + bench.entries(100, priority=5, start=101))
    left = UnfinishedWork([], [("default", {0, 5})])
    assert bench.dispatcher.take_left_to_table() == left
    assert bench.dispatcher.take_left_to_table() == UnfinishedWork([], [])


@pytest.mark.parametrize(("row_s", "entries"), [(0.02, 15), (0.0001, 1000)], ids=["few", "quick"])
def test_other_bursts_are_run_from_their_entries(
    bench: DispatcherHarness, row_s: float, entries: int
) -> None:
    learn(bench, row_s)
    bench.dispatcher.take(bench.entries(entries))
    assert [request.drained_queue for request, _, _ in bench.pool.requests] == [None] * 2


def test_a_burst_in_a_queue_with_a_backlog_is_run_from_its_entries(
    bench: DispatcherHarness,
) -> None:
    learn(bench, 0.02)
    bench.dispatcher.start_drain("default", [0])
    bench.pool.end(Report(2, 2, 0.04, (), is_full=True))
    bench.dispatcher.take(bench.entries(200))
    bench.pool.end(Report(2, 2, 0.04, (), is_full=True))
    assert len(bench.pool.requests[-1][0].entries) == 2
    assert bench.dispatcher.waiting == 198
