"""Chunks, drains and the pool of a dispatcher."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
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
from delaytasks.worker import chunk_queue, pool
from delaytasks.worker.chunk_queue import (
    BACKLOG_WAIT_S,
    CONTINUE_IN_TURN_S,
    CONTINUE_S,
    HELD_UP_S,
    UnfinishedWork,
)
from delaytasks.worker.pool import POOL_REST_S
from tests.recording import ManualClock, ManualMonotonic
from tests.waiting import wait_until
from tests.world import MainProcess, MakeWorld

# -- fixtures of the tests of the dispatcher ------------------------------------------------------


MakeMain = Callable[[int], MainProcess]


@pytest.fixture
def make_main(make_world: MakeWorld) -> MakeMain:
    """Make main processes whose clock stands still."""

    def make(processes: int) -> MainProcess:
        world = make_world(_chunk_time_budget_s=0.05)
        world.runtime.clock = ManualClock(datetime(2030, 1, 1, tzinfo=timezone.utc))
        return MainProcess(world, processes)

    return make


@pytest.fixture
def main(make_main: MakeMain) -> MainProcess:
    return make_main(2)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> ManualMonotonic:
    time = ManualMonotonic()
    for module in (pool, chunk_queue):
        monkeypatch.setattr(module, "monotonic", time)
    return time


# -- chunks, their size and order, and the end of a dispatcher ------------------------------------


def test_no_more_chunks_are_dispatched_than_the_pool_has_processes(main: MainProcess) -> None:
    main.take(1000)
    assert main.sizes() == [10, 10]
    assert main.dispatcher.waiting == 980


def test_chunks_grow_to_the_number_of_rows_that_fits_the_time_budget(main: MainProcess) -> None:
    main.take(1000)
    main.end(10, 0.0001)
    assert main.sizes() == [10, 200], "a tenth of a millisecond each: as many as a chunk may have"
    main.end(10, 0.050)
    main.end(200, 0.050)
    assert main.sizes()[-1] < 5, "50 ms each: hardly more than one"


def test_waiting_entries_are_shared_among_free_processes(main: MainProcess) -> None:
    main.take(6)
    assert main.sizes() == [3, 3]


def test_late_entries_are_left_to_the_table_even_if_the_pool_is_busy(main: MainProcess) -> None:
    main.take(20)
    main.take(5000, start=100)
    main.clock.advance(2)
    main.dispatcher.take([])
    assert main.dispatcher.waiting == 0
    assert main.world.count("entry.late") == 5000
    assert main.dispatcher.take_left_to_table().queues == [("default", {0})]
    main.end(10, 0.001)
    assert main.pool.requests[-1][0].drained_queue == "default"


def test_late_entries_wait_longer_if_their_queue_has_a_backlog(main: MainProcess) -> None:
    main.drain()
    # The queue has a backlog, so both processes drain it.
    main.end(is_full=True)
    grace_s = Settings().grace_s
    assert main.dispatcher.grace_s("default") == grace_s + BACKLOG_WAIT_S
    assert main.dispatcher.grace_s("mail") == grace_s
    main.take(5)
    main.clock.advance(grace_s + BACKLOG_WAIT_S - 0.1)
    main.end(is_full=True)
    assert main.sizes() == [0, 5], "in turn with the backlog"
    mail = [entry._replace(queue="mail") for entry in main.entries(3, start=200)]
    main.dispatcher.take(main.entries(5, start=100) + mail)
    main.clock.advance(grace_s + 0.1)
    main.dispatcher.take([])
    assert main.world.count("entry.late") == 3, "those of a queue without a backlog go to the table"
    main.clock.advance(BACKLOG_WAIT_S)
    main.dispatcher.take([])
    assert main.world.count("entry.late") == 8


def test_the_capacity_is_a_chunk_and_the_next_one_of_each_process(main: MainProcess) -> None:
    assert main.dispatcher.capacity() == 400, "two processes, of which nothing is known yet"
    main.take(20)
    main.end(10, 0.005)
    main.end(10, 0.005)
    assert main.dispatcher.capacity() == 40, "ten rows each in a time budget"
    assert main.dispatcher.capacity(coming=15) == 25
    main.take(15, start=50)
    assert main.dispatcher.capacity() == 20, "both work, and nothing waits"
    main.take(5, start=100)
    assert main.dispatcher.capacity() == 15
    main.take(6, start=200)
    assert main.dispatcher.capacity() == 0, "not worth the way"
    main.dispatcher.close()
    assert main.dispatcher.capacity() == 0


def test_chunks_are_made_in_the_order_in_which_rows_were_written(main: MainProcess) -> None:
    """Entries that arrive together are sorted. A later entry waits behind earlier ones."""
    main.take(20)
    now = main.clock.now_us()
    ids = list(range(101, 141))
    odd, even = ([Entry(id, 0, now) for id in ids if id % 2 == rest] for rest in (1, 0))
    main.dispatcher.take(odd)
    main.dispatcher.take([*even, Entry(90, 0, now + 1), Entry(200, 0, now - 1)])
    main.dispatcher.take([Entry(1, 0, now)])
    ran: list[int] = []
    while main.pool.requests:
        request = main.end(10, 0.005)
        ran += [entry.id for entry in request.entries]
    assert ran[20:] == [200, *ids, 90, 1]


def test_a_process_that_will_be_busy_for_long_adds_no_capacity(main: MainProcess) -> None:
    main.take(20)
    main.clock.advance(0.5)
    assert main.dispatcher.capacity() == 0, "its chunk takes longer than the time budget"
    main.end(10, 1)
    assert main.dispatcher.capacity() == 1, (
        "a second each: the free process takes one, and the next one when that is over"
    )
    main.take(1, start=100)
    assert main.dispatcher.capacity() == 0


def test_a_closed_dispatcher_returns_waiting_entries_and_starts_no_chunk(main: MainProcess) -> None:
    main.take(25)
    assert len(main.dispatcher.close().entries) == 5
    main.end(10, 0.0001)
    assert len(main.pool.requests) == 1


def test_work_that_a_chunk_reports_after_the_close_is_left_to_other_workers(
    main: MainProcess,
) -> None:
    main.take(12)
    main.end(waitlists=(WaitlistState("default", "test.first"),))
    assert not main.world.broker.requested_drains, "this worker continues with them"
    main.dispatcher.close()
    [early] = main.entries(1, start=50)
    states = tuple(WaitlistState("default", tag) for tag in ("test.first", "test.second"))
    main.end(2, early=(early,), waitlists=states)
    assert main.world.broker.armed == [early]
    assert [request[:2] for request in main.world.broker.requested_drains] == [("default", [])]
    assert len(main.runtime.near_entries.wheel) == 0, "the wheel has stopped"


def test_entries_that_a_chunk_found_early_are_held_before_a_dispatcher_can_close(
    main: MainProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed dispatcher would pass them to a timing wheel that is empty and no longer turns."""
    closed: list[bool] = []
    closing: list[threading.Thread] = []
    hold = main.runtime.near_entries.hold

    def close() -> None:
        main.dispatcher.close()
        closed.append(True)

    def hold_slowly(entries: Sequence[Entry]) -> list[Entry]:
        closing.append(threading.Thread(target=close))
        closing[0].start()
        closing[0].join(0.2)  # `close` waits for the end of the chunk
        assert not closed, "what is held now would be lost"
        return hold(entries)

    monkeypatch.setattr(main.runtime.near_entries, "hold", hold_slowly)
    main.take(1)
    early = Entry(7, 0, main.clock.now_us() + 1_000_000)
    main.end(0, early=(early,))
    closing[0].join(10)
    assert (closed, main.world.broker.armed) == ([True], [])
    assert len(main.runtime.near_entries.wheel) == 1


# -- batch processors ----------------------------------------------------------------------------


def test_rows_of_one_batch_stay_together_although_other_processes_are_free(
    main: MainProcess,
) -> None:
    main.take(10)
    assert main.sizes() == [5, 5]
    main.end(5, 0.001, wanted=40)
    main.end(5, 0.001, wanted=40)
    main.take(60, start=100)
    assert main.sizes() == [40, 20], "and not 30 for each"
    main.end(40, 0.001)
    main.end(20, 0.001)
    main.take(60, start=200)
    assert main.sizes() == [30, 30], "others came meanwhile, who are shared"


def test_a_chunk_has_all_rows_that_can_start_together_even_beyond_the_time_budget(
    main: MainProcess,
) -> None:
    main.take(10)
    main.end(5, 0.2, wanted=30)
    main.end(5, 0.2, wanted=30)
    main.take(100, start=100)
    assert main.sizes() == [30, 30]


def test_detached_rows_are_known_until_their_process_reports_their_end(main: MainProcess) -> None:
    main.take(400)
    main.pool.end(Report(10, 8, 0.01, pid=1, detached=(4, 5)))
    main.pool.end(Report(10, 9, 0.01, pid=2, detached=(9,)))
    assert main.dispatcher.running()[1] == {1: (4, 5), 2: (9,)}
    assert len(main.pool.requests) == 2, "and the next chunks come"
    main.pool.end(Report(1, 3, 0.01, pid=1))
    away = FailureReason.UNAVAILABLE
    main.pool.end(Report(error="away", reason=away, pid=2, detached=(9, 12)))
    assert main.dispatcher.running()[1] == {2: (9, 12)}


def test_after_a_chunk_found_the_database_unavailable_chunks_pause(
    time: ManualMonotonic, main: MainProcess
) -> None:
    main.take(100)
    assert len(main.pool.requests) == 2
    main.end(0, error="away", reason=FailureReason.UNAVAILABLE)
    main.dispatcher.take([])
    assert len(main.pool.requests) == 1
    time.at += 1
    main.dispatcher.take([])
    assert len(main.pool.requests) == 2, "after its pause it is tried again"


@pytest.mark.parametrize("reason", [FailureReason.UNKNOWN, FailureReason.REFUSED])
def test_a_failure_of_a_database_that_answers_pauses_nothing_and_is_not_repeated(
    make_main: MakeMain, time: ManualMonotonic, reason: FailureReason
) -> None:
    """The sweep finds the rows of the chunk again, and requests the drain again."""
    main = make_main(1)
    main.take(1)
    main.drain()
    failed = Report(error="KeyError: a bug, or a row that cannot be read", reason=reason)
    assert len(main.pool.end(failed).entries) == 1
    assert main.pool.end(failed).drained_queue == "default", "it does not wait"
    main.take(1, start=2)
    assert len(main.pool.end(failed).entries) == 1, "nor does the next task"
    time.at += 60
    main.dispatcher.pump()
    assert main.pool.requests == [], "neither the entries nor the drain are tried again"


# -- drains of queues whose rows are overdue ------------------------------------------------------


def test_a_large_backlog_is_drained_by_all_processes_and_a_small_one_by_one_process(
    main: MainProcess,
) -> None:
    main.drain()
    assert len(main.pool.requests) == 1
    main.end(is_full=True)
    assert main.drained() == ["default", "default"]
    main.end(3, 0.000333333)
    assert len(main.pool.requests) == 1
    main.end(0)
    assert main.pool.requests == []


def test_chunks_of_fresh_tasks_and_of_a_backlog_alternate(make_main: MakeMain) -> None:
    main = make_main(1)
    main.take(100)
    main.drain()
    kinds = []
    for _ in range(4):
        request = main.end(10, 0.005, is_full=True)
        kinds.append("old" if request.drained_queue else "fresh")
    assert kinds == ["fresh", "old", "fresh", "old"]


def test_a_drain_delayed_by_a_slow_row_continues_in_free_processes(
    make_main: MakeMain, time: ManualMonotonic
) -> None:
    """Each look at most doubles the number of processes, until a process finds the queue empty."""
    main = make_main(8)
    main.drain()
    assert len(main.pool.requests) == 1, "it is not known to be deep"
    for processes in (2, 4, 8, 8):
        time.at += HELD_UP_S + 0.01
        wait_until(
            lambda count=processes: len(main.pool.requests) == count,  # type: ignore[misc]
            5,
            f"{processes} processes at it",
        )
        main.dispatcher.pump()
        assert len(main.pool.requests) == processes, "the new ones have just begun"
    for _ in range(8):
        main.end(1, 12)
    assert main.pool.requests == []


def test_an_empty_queue_behind_a_slow_task_is_read_once(
    make_main: MakeMain, time: ManualMonotonic
) -> None:
    main = make_main(8)
    main.drain()
    time.at += HELD_UP_S + 0.01
    main.dispatcher.pump()
    assert len(main.pool.requests) == 2
    slow = main.pool.requests.pop(0)
    main.end(0)
    for _ in range(3):
        time.at += HELD_UP_S + 0.01
        main.dispatcher.pump()
    assert main.pool.requests == [], "there is nothing in it"
    main.drain()
    main.end(0)
    assert main.pool.requests == [], "the next start is worth one look, too"
    slow[1](Report(10, 1, 12.0))
    assert main.pool.requests == []


def test_a_chunk_that_ends_late_does_not_end_a_drain_that_was_requested_later(
    main: MainProcess, time: ManualMonotonic
) -> None:
    main.drain()
    time.at += HELD_UP_S + 0.01
    main.dispatcher.pump()
    slow = main.pool.requests.pop(0)
    main.end(0)
    main.pool.limit = 1  # the slow chunk occupies the only process
    main.drain()
    assert main.pool.requests == []
    slow[1](Report(3, 1, 12.0))
    assert main.drained() == ["default"]


def test_a_drain_continues_after_its_process_died_and_ends_if_the_database_is_unavailable(
    main: MainProcess, time: ManualMonotonic
) -> None:
    main.drain()
    _, _, lost = main.pool.requests.pop()
    try:
        raise WorkerLostError("exited prematurely")
    except WorkerLostError:
        lost(ExceptionInfo())
    wait_until(lambda: main.pool.requests, 5, "another process to go on")
    main.end(0, error="away", reason=FailureReason.UNAVAILABLE)
    time.at += 60
    main.dispatcher.pump()
    assert main.pool.requests == []


def test_a_drain_requested_during_another_drain_is_done_after_it(main: MainProcess) -> None:
    main.drain()
    main.drain("default", 5)
    main.end(0)
    assert [set(request.priorities) for request, _, _ in main.pool.requests] == [{0, 5}]
    main.end(0)
    assert main.pool.requests == []


def test_processes_continue_to_drain_a_queue_with_a_large_backlog(main: MainProcess) -> None:
    main.drain()
    assert main.continue_s() == [0]
    main.end(is_full=True)
    assert main.continue_s() == [CONTINUE_S] * 2
    assert not main.processes.others_wait.is_so()


def test_draining_processes_notice_another_queue_and_share_their_time_with_it(
    main: MainProcess,
) -> None:
    main.drain()
    main.end(is_full=True)
    main.drain("mail", 0)
    assert main.processes.others_wait.is_so()
    main.end(is_full=True)
    assert not main.processes.others_wait.is_so(), "a process has begun to drain the other queue"
    main.end(is_full=True)
    assert {request.drained_queue for request, _, _ in main.pool.requests} == {"default", "mail"}
    assert main.continue_s() == [0, CONTINUE_IN_TURN_S]


def test_draining_processes_notice_tasks_that_wait_for_a_process(main: MainProcess) -> None:
    main.drain()
    main.end(is_full=True)
    main.take(1)
    assert main.processes.others_wait.is_so()
    main.end(is_full=True)
    assert main.sizes() == [0, 1]
    assert not main.processes.others_wait.is_so(), "the task is in a process"


def test_draining_processes_notice_that_the_worker_stops(main: MainProcess) -> None:
    main.drain()
    main.end(is_full=True)
    main.dispatcher.close()
    assert main.processes.others_wait.is_so()


def test_a_draining_process_has_capacity_for_entries_that_become_due(
    main: MainProcess, time: ManualMonotonic
) -> None:
    main.drain()
    main.end(is_full=True)
    main.clock.advance(0.4)
    assert main.dispatcher.capacity() > 0


def test_a_solo_pool_ends_each_drain_chunk_so_that_it_can_read_its_messages(
    main: MainProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solo, "TaskPool", type(main.pool))
    main.drain()
    main.end(is_full=True)
    assert main.continue_s() == [0, 0]


def learn(main: MainProcess, row_s: float) -> None:
    main.take(10)
    for _ in range(2):
        main.end(5, row_s)


def test_a_burst_of_slow_tasks_is_left_to_the_table_and_claimed_ahead(main: MainProcess) -> None:
    learn(main, 0.02)
    main.take(200)
    assert main.drained() == ["default"] * 2
    assert main.continue_s() == [CONTINUE_S] * 2
    assert (main.dispatcher.waiting, main.world.count("entry.late")) == (0, 200)


def test_other_workers_are_asked_once_to_help_with_what_is_left_to_the_table(
    main: MainProcess,
) -> None:
    learn(main, 0.02)
    main.dispatcher.take(main.entries(100) + main.entries(100, priority=5, start=101))
    left = UnfinishedWork([], [("default", {0, 5})])
    assert main.dispatcher.take_left_to_table() == left
    assert main.dispatcher.take_left_to_table() == UnfinishedWork([], [])


@pytest.mark.parametrize(("row_s", "entries"), [(0.02, 15), (0.0001, 1000)], ids=["few", "quick"])
def test_other_bursts_are_run_from_their_entries(
    main: MainProcess, row_s: float, entries: int
) -> None:
    learn(main, row_s)
    main.take(entries)
    assert main.drained() == [None] * 2


def test_a_burst_in_a_queue_with_a_backlog_is_run_from_its_entries(main: MainProcess) -> None:
    learn(main, 0.02)
    main.drain()
    main.end(2, 0.02, is_full=True)
    main.take(200)
    main.end(2, 0.02, is_full=True)
    assert len(main.pool.requests[-1][0].entries) == 2
    assert main.dispatcher.waiting == 198


# -- pool processes that die, fail or lose a chunk ------------------------------------------------


def test_a_pool_that_refuses_a_chunk_pauses_and_keeps_the_other_entries(
    main: MainProcess, time: ManualMonotonic
) -> None:
    main.pool.is_broken = True
    main.take(30)
    assert (main.dispatcher.waiting, main.world.count("chunk.failed")) == (20, 1)
    main.pool.is_broken = False
    time.at += POOL_REST_S
    main.dispatcher.pump()
    assert main.sizes() == [10, 10]


def test_a_dead_process_does_not_pause_chunks(main: MainProcess) -> None:
    main.take(30)
    _, _, lost = main.pool.requests.pop()
    try:
        raise WorkerLostError("exited prematurely")
    except WorkerLostError:
        lost(ExceptionInfo())
    wait_until(lambda: main.pool.requests, 5, "the next chunk")
    assert main.world.count("chunk.failed") == 1


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
    main: MainProcess, written_to: Any, is_written: bool
) -> None:
    books: dict[int, Any] = {}
    keep = main.pool.apply_async
    busy: set[int] = set()
    main.pool._pool = SimpleNamespace(_pool=[process_of(1)], _busy_workers=busy)  # type: ignore[attr-defined]

    def apply_async(*args: Any, **options: Any) -> Sent:
        keep(*args, **options)
        return Sent(books, written_to)

    main.pool.apply_async = apply_async  # type: ignore[method-assign]
    main.take(20)
    assert main.dispatcher.recall() == []
    assert len(main.dispatcher.in_flight) == 2, "nothing is forgotten yet"
    first = books.pop(0)
    [request, *_] = main.pool.requests[0]
    assert main.dispatcher.recall() == ([] if is_written else list(request.entries))
    assert books.get(0) is (first if is_written else None)
    assert busy == ({101} if is_written else set()), "Celery before 5.7 forgets this, too"
    assert len(main.dispatcher.in_flight) == (2 if is_written else 1)
    main.take(5, start=100)
    assert len(main.pool.requests) == (2 if is_written else 3)
    # The report arrives after all, or the process was busy with another request for a long time.
    main.end(10, 0.005)
    assert main.world.count("chunk.failed") == 0
