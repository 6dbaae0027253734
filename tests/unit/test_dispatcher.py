"""Chunks, drains and the pool of a dispatcher."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.einfo import ExceptionInfo
from billiard.exceptions import WorkerLostError
from celery.concurrency import solo

from delaytasks.core.interfaces import Entry
from delaytasks.core.policies import WaitlistState
from delaytasks.core.settings import Settings
from delaytasks.execution.runner import FailureReason, Report
from delaytasks.worker.chunk_queue import (
    BACKLOG_WAIT_S,
    CONTINUE_IN_TURN_S,
    CONTINUE_S,
    HELD_UP_S,
    UnfinishedWork,
)
from delaytasks.worker.pool import POOL_REST_S
from tests.unit.worker_harness import DispatcherHarness, Hands
from tests.waiting import wait_until

# -- fixtures of the tests of the dispatcher ------------------------------------------------------


@pytest.fixture
def bench() -> DispatcherHarness:
    return DispatcherHarness()


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    return Hands(monkeypatch)


# -- chunks, their size and order, and the end of a dispatcher ------------------------------------


def test_no_more_chunks_are_dispatched_than_the_pool_has_processes(
    bench: DispatcherHarness,
) -> None:
    bench.dispatcher.take(bench.entries(1000))
    assert bench.sizes() == [10, 10]
    assert bench.dispatcher.waiting == 980


def test_chunks_grow_to_the_number_of_rows_that_fits_the_time_budget(
    bench: DispatcherHarness,
) -> None:
    bench.dispatcher.take(bench.entries(1000))
    bench.pool.end(Report(10, 10, 10 * 0.0001))
    assert bench.sizes() == [10, 200], "a tenth of a millisecond each: as many as a chunk may have"
    bench.pool.end(Report(10, 10, 10 * 0.050))
    bench.pool.end(Report(200, 200, 200 * 0.050))
    assert bench.sizes()[-1] < 5, "50 ms each: hardly more than one"


def test_waiting_entries_are_shared_among_free_processes(bench: DispatcherHarness) -> None:
    bench.dispatcher.take(bench.entries(6))
    assert bench.sizes() == [3, 3]


def test_late_entries_are_left_to_the_table_even_if_the_pool_is_busy(
    bench: DispatcherHarness,
) -> None:
    bench.dispatcher.take(bench.entries(20))
    bench.dispatcher.take(bench.entries(5000, start=100))
    bench.clock.advance(2)
    bench.dispatcher.take([])
    assert bench.dispatcher.waiting == 0
    assert bench.events.counts["entry.late"] == 5000
    assert bench.dispatcher.take_left_to_table().queues == [("default", {0})]
    bench.pool.end(Report(10, 10, 0.01))
    assert bench.pool.requests[-1][0].drained_queue == "default"


def test_late_entries_wait_longer_if_their_queue_has_a_backlog(bench: DispatcherHarness) -> None:
    bench.dispatcher.start_drain("default", [0])
    # The queue has a backlog, so both processes drain it.
    bench.pool.end(Report(10, 10, 0.01, is_full=True))
    grace_s = Settings().grace_s
    assert bench.dispatcher.grace_s("default") == grace_s + BACKLOG_WAIT_S
    assert bench.dispatcher.grace_s("mail") == grace_s
    bench.dispatcher.take(bench.entries(5))
    bench.clock.advance(grace_s + BACKLOG_WAIT_S - 0.1)
    bench.pool.end(Report(10, 10, 0.01, is_full=True))
    assert [len(request.entries) for request, _, _ in bench.pool.requests] == [0, 5], (
        "in turn with the backlog"
    )
    mail = [entry._replace(queue="mail") for entry in bench.entries(3, start=200)]
    bench.dispatcher.take(bench.entries(5, start=100) + mail)
    bench.clock.advance(grace_s + 0.1)
    bench.dispatcher.take([])
    assert bench.events.counts["entry.late"] == 3, (
        "those of a queue without a backlog go to the table"
    )
    bench.clock.advance(BACKLOG_WAIT_S)
    bench.dispatcher.take([])
    assert bench.events.counts["entry.late"] == 8


def test_the_capacity_is_a_chunk_and_the_next_one_of_each_process(bench: DispatcherHarness) -> None:
    assert bench.dispatcher.capacity() == 400, "two processes, of which nothing is known yet"
    bench.dispatcher.take(bench.entries(20))
    bench.pool.end(Report(10, 10, 10 * 0.005))
    bench.pool.end(Report(10, 10, 10 * 0.005))
    assert bench.dispatcher.capacity() == 40, "ten rows each in a time budget"
    assert bench.dispatcher.capacity(coming=15) == 25
    bench.dispatcher.take(bench.entries(15, start=50))
    assert bench.dispatcher.capacity() == 20, "both work, and nothing waits"
    bench.dispatcher.take(bench.entries(5, start=100))
    assert bench.dispatcher.capacity() == 15
    bench.dispatcher.take(bench.entries(6, start=200))
    assert bench.dispatcher.capacity() == 0, "not worth the way"
    bench.dispatcher.close()
    assert bench.dispatcher.capacity() == 0


def test_chunks_are_made_in_the_order_in_which_rows_were_written(bench: DispatcherHarness) -> None:
    """Entries that arrive together are sorted. A later entry waits behind earlier ones."""
    bench.dispatcher.take(bench.entries(20))
    now = bench.clock.now_us()
    ids = list(range(101, 141))
    odd, even = ([Entry(id, 0, now) for id in ids if id % 2 == rest] for rest in (1, 0))
    bench.dispatcher.take(odd)
    bench.dispatcher.take([*even, Entry(90, 0, now + 1), Entry(200, 0, now - 1)])
    bench.dispatcher.take([Entry(1, 0, now)])
    ran: list[int] = []
    while bench.pool.requests:
        request = bench.pool.end(Report(10, 10, 10 * 0.005))
        ran += [entry.id for entry in request.entries]
    assert ran[20:] == [200, *ids, 90, 1]


def test_a_process_that_will_be_busy_for_long_adds_no_capacity(bench: DispatcherHarness) -> None:
    bench.dispatcher.take(bench.entries(20))
    bench.clock.advance(0.5)
    assert bench.dispatcher.capacity() == 0, "its chunk takes longer than the time budget"
    bench.pool.end(Report(10, 10, 10.0))
    assert bench.dispatcher.capacity() == 1, (
        "a second each: the free process takes one, and the next one when that is over"
    )
    bench.dispatcher.take(bench.entries(1, start=100))
    assert bench.dispatcher.capacity() == 0


def test_a_closed_dispatcher_returns_waiting_entries_and_starts_no_chunk(
    bench: DispatcherHarness,
) -> None:
    bench.dispatcher.take(bench.entries(25))
    assert len(bench.dispatcher.close().entries) == 5
    bench.pool.end(Report(10, 10, 0.001))
    assert len(bench.pool.requests) == 1


def test_work_that_a_chunk_reports_after_the_close_is_left_to_other_workers(
    bench: DispatcherHarness,
) -> None:
    bench.dispatcher.take(bench.entries(12))
    bench.pool.end(Report(10, 10, 0.001, waitlists=(WaitlistState("default", "test.first"),)))
    assert not bench.sent_back, "this worker continues with them"
    bench.dispatcher.close()
    tags = "test.first", "test.second"
    [early] = bench.entries(1, start=50)
    bench.pool.end(
        Report(
            2,
            2,
            0.001,
            early=(early,),
            waitlists=tuple(WaitlistState("default", tag) for tag in tags),
        )
    )
    assert bench.sent_back == [UnfinishedWork([early], [("default", set())])]
    assert not bench.held, "the wheel has stopped"


def test_entries_that_a_chunk_found_early_are_held_before_a_dispatcher_can_close(
    bench: DispatcherHarness,
) -> None:
    """A closed dispatcher would pass them to a timing wheel that is empty and no longer turns."""
    closed: list[bool] = []
    closing: list[threading.Thread] = []

    def close() -> None:
        bench.dispatcher.close()
        closed.append(True)

    def hold(entries: Sequence[Entry]) -> list[Entry]:
        closing.append(threading.Thread(target=close))
        closing[0].start()
        closing[0].join(0.2)  # `close` waits for the end of the chunk
        bench.held += entries
        assert not closed, "what is held now would be lost"
        return []

    bench.hold = hold  # type: ignore[method-assign]
    bench.dispatcher.take(bench.entries(1))
    early = Entry(7, 0, bench.clock.now_us() + 1_000_000)
    bench.pool.end(Report(0, early=(early,)))
    closing[0].join(10)
    assert (bench.held, closed, bench.sent_back) == ([early], [True], [])


# -- batch processors ----------------------------------------------------------------------------


def test_rows_of_one_batch_stay_together_although_other_processes_are_free(
    bench: DispatcherHarness,
) -> None:
    bench.dispatcher.take(bench.entries(10))
    assert bench.sizes() == [5, 5]
    bench.pool.end(Report(5, 5, 5 * 0.001, wanted=40))
    bench.pool.end(Report(5, 5, 5 * 0.001, wanted=40))
    bench.dispatcher.take(bench.entries(60, start=100))
    assert bench.sizes() == [40, 20], "and not 30 for each"
    bench.pool.end(Report(40, 40, 40 * 0.001))
    bench.pool.end(Report(20, 20, 20 * 0.001))
    bench.dispatcher.take(bench.entries(60, start=200))
    assert bench.sizes() == [30, 30], "others came meanwhile, who are shared"


def test_a_chunk_has_all_rows_that_can_start_together_even_beyond_the_time_budget(
    bench: DispatcherHarness,
) -> None:
    bench.dispatcher.take(bench.entries(10))
    bench.pool.end(Report(5, 5, 5 * 0.2, wanted=30))
    bench.pool.end(Report(5, 5, 5 * 0.2, wanted=30))
    bench.dispatcher.take(bench.entries(100, start=100))
    assert bench.sizes() == [30, 30]


def test_detached_rows_are_known_until_their_process_reports_their_end(
    bench: DispatcherHarness,
) -> None:
    bench.dispatcher.take(bench.entries(400))
    bench.pool.end(Report(10, 8, 0.01, pid=1, detached=(4, 5)))
    bench.pool.end(Report(10, 9, 0.01, pid=2, detached=(9,)))
    assert bench.dispatcher.running()[1] == {1: (4, 5), 2: (9,)}
    assert len(bench.pool.requests) == 2, "and the next chunks come"
    bench.pool.end(Report(1, 3, 0.01, pid=1))
    away = FailureReason.UNAVAILABLE
    bench.pool.end(Report(error="away", reason=away, pid=2, detached=(9, 12)))
    assert bench.dispatcher.running()[1] == {2: (9, 12)}


def test_after_a_chunk_found_the_database_unavailable_chunks_pause(
    hands: Hands, bench: DispatcherHarness
) -> None:
    bench.dispatcher.take(bench.entries(100))
    assert len(bench.pool.requests) == 2
    bench.pool.end(Report(error="away", reason=FailureReason.UNAVAILABLE))
    bench.dispatcher.take([])
    assert len(bench.pool.requests) == 1
    hands.at += 1
    bench.dispatcher.take([])
    assert len(bench.pool.requests) == 2, "after its pause it is tried again"


@pytest.mark.parametrize("reason", [FailureReason.UNKNOWN, FailureReason.REFUSED])
def test_a_failure_of_a_database_that_answers_pauses_nothing_and_is_not_repeated(
    hands: Hands, reason: FailureReason
) -> None:
    """The sweep finds the rows of the chunk again, and requests the drain again."""
    bench = DispatcherHarness()
    bench.pool.limit = 1
    bench.dispatcher.take(bench.entries(1))
    bench.dispatcher.start_drain("default", [0])
    failed = Report(error="KeyError: a bug, or a row that cannot be read", reason=reason)
    assert len(bench.pool.end(failed).entries) == 1
    assert bench.pool.end(failed).drained_queue == "default", "it does not wait"
    bench.dispatcher.take(bench.entries(1, start=2))
    assert len(bench.pool.end(failed).entries) == 1, "nor does the next task"
    hands.at += 60
    bench.dispatcher.pump()
    assert bench.pool.requests == [], "neither the entries nor the drain are tried again"


# -- drains of queues whose rows are overdue ------------------------------------------------------


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


def test_a_drain_delayed_by_a_slow_row_continues_in_free_processes(hands: Hands) -> None:
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


def test_a_chunk_that_ends_late_does_not_end_a_drain_that_was_requested_later(hands: Hands) -> None:
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


def test_a_drain_requested_during_another_drain_is_done_after_it(bench: DispatcherHarness) -> None:
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


def test_draining_processes_notice_tasks_that_wait_for_a_process(bench: DispatcherHarness) -> None:
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


# -- pool processes that die, fail or lose a chunk ------------------------------------------------


def test_a_pool_that_refuses_a_chunk_pauses_and_keeps_the_other_entries(
    bench: DispatcherHarness, hands: Hands
) -> None:
    bench.pool.is_broken = True
    bench.dispatcher.take(bench.entries(30))
    assert (bench.dispatcher.waiting, bench.events.counts["chunk.failed"]) == (20, 1)
    bench.pool.is_broken = False
    hands.at += POOL_REST_S
    bench.dispatcher.pump()
    assert bench.sizes() == [10, 10]


def test_a_dead_process_does_not_pause_chunks(bench: DispatcherHarness) -> None:
    bench.dispatcher.take(bench.entries(30))
    _, _, lost = bench.pool.requests.pop()
    try:
        raise WorkerLostError("exited prematurely")
    except WorkerLostError:
        lost(ExceptionInfo())
    wait_until(lambda: bench.pool.requests, 5, "the next chunk")
    assert bench.events.counts["chunk.failed"] == 1


class Sent:
    """A request that is registered in billiard's pool and that no process has started yet."""

    def __init__(self, books: dict[int, Any], written_to: Any) -> None:
        self._cache, self._job, self._books = books, len(books), books
        self._write_to = written_to
        books[self._job] = self

    def ready(self) -> bool:
        return False


def process_of(pid: int, is_alive: bool = True) -> Any:
    return SimpleNamespace(pid=pid, inqW_fd=pid + 100, _is_alive=lambda: is_alive)


#: The process to which the pool wrote a chunk, and whether the chunk reached that process.
WRITTEN = [
    pytest.param(process_of(1), True, id="to one that was there"),
    pytest.param(process_of(1, is_alive=False), False, id="to one that died"),
    pytest.param(process_of(2), False, id="to one that died, whose successor has its pipe"),
    pytest.param(None, False, id="to nobody yet"),
]


@pytest.mark.parametrize(("written_to", "is_written"), WRITTEN)
def test_a_chunk_that_the_pool_forgets_is_remembered_or_blocks_no_process(
    bench: DispatcherHarness, written_to: Any, is_written: bool
) -> None:
    books: dict[int, Any] = {}
    keep = bench.pool.apply_async
    busy: set[int] = set()
    bench.pool._pool = SimpleNamespace(_pool=[process_of(1)], _busy_workers=busy)  # type: ignore[attr-defined]

    def apply_async(*args: Any, **options: Any) -> Sent:
        keep(*args, **options)
        return Sent(books, written_to)

    bench.pool.apply_async = apply_async  # type: ignore[method-assign]
    bench.dispatcher.take(bench.entries(20))
    assert bench.dispatcher.recall() == []
    assert len(bench.dispatcher.in_flight) == 2, "nothing is forgotten yet"
    first = books.pop(0)
    [request, *_] = bench.pool.requests[0]
    assert bench.dispatcher.recall() == ([] if is_written else list(request.entries))
    assert books.get(0) is (first if is_written else None)
    assert busy == ({101} if is_written else set()), "Celery before 5.7 forgets this, too"
    assert len(bench.dispatcher.in_flight) == (2 if is_written else 1)
    bench.dispatcher.take(bench.entries(5, start=100))
    assert len(bench.pool.requests) == (2 if is_written else 3)
    # The report arrives after all, or the process was busy with another request for a long time.
    bench.pool.end(Report(10, 10, 0.05))
    assert bench.events.counts["chunk.failed"] == 0
