"""Test the dispatcher with a pool that keeps each job until the test ends the job."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.einfo import ExceptionInfo
from billiard.exceptions import WorkerLostError

from delaytasks.core.capacity import WaitlistState
from delaytasks.core.clock import ManualClock
from delaytasks.core.errors import StoreUnavailableError
from delaytasks.core.events import Events
from delaytasks.core.ids import COUNTER_BITS, shard_of
from delaytasks.core.interfaces import Entry
from delaytasks.core.policies import Stamp
from delaytasks.core.settings import Settings
from delaytasks.execution.runner import Report
from delaytasks.worker import pool as pool_module
from delaytasks.worker import queue_drain, shard_queue
from delaytasks.worker.dispatcher import Dispatcher
from delaytasks.worker.job import Job
from delaytasks.worker.pool import MAX_FAILED_CHUNKS
from delaytasks.worker.queue_drain import HELD_UP_S
from delaytasks.worker.shard_queue import BACKLOG_WAIT_S
from delaytasks.worker.unfinished_work import UnfinishedWork
from tests.waiting import wait_until


class Pool:
    """A pool of two processes, whose jobs end when a test calls `end`."""

    limit = 2

    def __init__(self) -> None:
        self.jobs: list[tuple[Job, Callable[[Any], None], Callable[[Any], None]]] = []
        self.is_broken = False

    def apply_async(self, function: Any, args: Any, callback: Any, error_callback: Any) -> object:
        if self.is_broken:
            raise OSError("no more pipes")
        self.jobs.append((args[0], callback, error_callback))
        return object()

    def end(self, report: Any) -> Job:
        job, callback, _ = self.jobs.pop(0)
        callback(report)
        return job


class DispatcherHarness:
    def __init__(self, shards: int = 1, **settings: Any) -> None:
        self.clock = ManualClock(datetime(2030, 1, 1, tzinfo=timezone.utc))
        self.events = Events()
        self.pool = Pool()
        self.held: list[Entry] = []
        self.sent_back: list[UnfinishedWork] = []
        self.capacities: list[int] = []
        self.dispatcher = Dispatcher(
            Settings(**settings),
            [self.clock] * shards,
            self.events,
            self.pool,
            call_soon=lambda call: call(),
            hold=self.held.extend,
            send_back=self.sent_back.append,
            policy_stamp=lambda shard: Stamp(),
            sends_events=lambda: False,
            on_capacity=lambda: self.capacities.append(self.dispatcher.capacity()),
        )

    def entries(self, count: int, priority: int = 0, start: int = 1) -> list[Entry]:
        now = self.clock.now_us()
        return [Entry(start + n, 0, now, "default", priority) for n in range(count)]

    def entries_of(self, shard: int, count: int) -> list[Entry]:
        first = 1 << 60 | shard << COUNTER_BITS
        return [entry._replace(id=first + entry.id) for entry in self.entries(count)]

    def sizes(self) -> list[int]:
        return [len(job.entries) for job, _, _ in self.pool.jobs]


@pytest.fixture
def bench() -> DispatcherHarness:
    return DispatcherHarness()


def test_no_more_chunks_are_under_way_than_the_pool_has_processes(bench: DispatcherHarness) -> None:
    bench.dispatcher.take(bench.entries(1000))
    assert bench.sizes() == [10, 10]
    assert bench.dispatcher.waiting == 980


def test_chunks_grow_to_what_fits_the_time_box(bench: DispatcherHarness) -> None:
    bench.dispatcher.take(bench.entries(1000))
    bench.pool.end(Report(10, 10, 10 * 0.0001))
    assert bench.sizes() == [10, 200], "a tenth of a millisecond each: as many as a chunk may have"
    bench.pool.end(Report(10, 10, 10 * 0.050))
    bench.pool.end(Report(200, 200, 200 * 0.050))
    assert bench.sizes()[-1] < 5, "50 ms each: hardly more than one"


def test_what_waits_is_shared_among_free_processes(bench: DispatcherHarness) -> None:
    bench.dispatcher.take(bench.entries(6))
    assert bench.sizes() == [3, 3]


def test_the_highest_priority_goes_first(bench: DispatcherHarness) -> None:
    bench.dispatcher.take(bench.entries(20))
    bench.dispatcher.take(bench.entries(5, start=100) + bench.entries(5, priority=9, start=200))
    bench.pool.end(Report(10, 10, 10 * 0.005))
    assert [entry.priority for entry in bench.pool.jobs[-1][0].entries][:5] == [9] * 5


def test_what_is_late_is_left_to_the_table_though_the_pool_is_busy(
    bench: DispatcherHarness,
) -> None:
    bench.dispatcher.take(bench.entries(20))
    bench.dispatcher.take(bench.entries(5000, start=100))
    bench.clock.advance(2)
    bench.dispatcher.take([])
    assert bench.dispatcher.waiting == 0
    assert bench.events.counts["entry.late"] == 5000
    bench.pool.end(Report(10, 10, 0.01))
    assert bench.pool.jobs[-1][0].drain == "default"


def test_what_is_late_waits_longer_where_the_table_has_a_backlog_in_front_of_it(
    bench: DispatcherHarness,
) -> None:
    bench.dispatcher.drain("default", [0])
    # The queue has a backlog, so both processes drain it.
    bench.pool.end(Report(10, 10, 0.01, is_full=True))
    grace_s = Settings().grace_s
    assert bench.dispatcher.grace_s("default") == grace_s + BACKLOG_WAIT_S
    assert bench.dispatcher.grace_s("mail") == grace_s
    bench.dispatcher.take(bench.entries(5))
    bench.clock.advance(grace_s + BACKLOG_WAIT_S - 0.1)
    bench.pool.end(Report(10, 10, 0.01, is_full=True))
    assert [len(job.entries) for job, _, _ in bench.pool.jobs] == [0, 5], "in turn with the backlog"
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


def test_a_deep_backlog_is_drained_by_all_processes_and_a_shallow_one_by_one(
    bench: DispatcherHarness,
) -> None:
    bench.dispatcher.drain("default", [0])
    assert len(bench.pool.jobs) == 1
    bench.pool.end(Report(10, 10, 0.001, (), is_full=True))
    assert [job.drain for job, _, _ in bench.pool.jobs] == ["default", "default"]
    bench.pool.end(Report(3, 3, 0.001))
    assert len(bench.pool.jobs) == 1
    bench.pool.end(Report(0))
    assert bench.pool.jobs == []


def test_fresh_tasks_and_a_backlog_take_turns() -> None:
    bench = DispatcherHarness()
    bench.pool.limit = 1
    bench.dispatcher.take(bench.entries(100))
    bench.dispatcher.drain("default", [0])
    kinds = []
    for _ in range(4):
        job = bench.pool.end(Report(10, 10, 0.05, (), is_full=True))
        kinds.append("old" if job.drain else "fresh")
    assert kinds == ["fresh", "old", "fresh", "old"]


def test_a_drain_that_a_slow_row_holds_up_goes_on_in_the_free_processes_without_being_asked(
    hands: Hands,
) -> None:
    """Each look at most doubles the number of processes, until a process finds the queue empty."""
    bench = DispatcherHarness()
    bench.pool.limit = 8
    bench.dispatcher.drain("default", [0])
    assert len(bench.pool.jobs) == 1, "it is not known to be deep"
    for processes in (2, 4, 8, 8):
        hands.at += HELD_UP_S + 0.01
        wait_until(
            lambda count=processes: len(bench.pool.jobs) == count, 5, f"{processes} processes at it"
        )  # type: ignore[misc]
        bench.dispatcher.pump()
        assert len(bench.pool.jobs) == processes, "the new ones have just begun"
    for _ in range(8):
        bench.pool.end(Report(1, 1, 12.0))
    assert bench.pool.jobs == []


def test_an_empty_queue_behind_a_slow_task_is_read_once(hands: Hands) -> None:
    bench = DispatcherHarness()
    bench.pool.limit = 8
    bench.dispatcher.drain("default", [0])
    hands.at += HELD_UP_S + 0.01
    bench.dispatcher.pump()
    assert len(bench.pool.jobs) == 2
    slow = bench.pool.jobs.pop(0)
    bench.pool.end(Report(0))
    for _ in range(3):
        hands.at += HELD_UP_S + 0.01
        bench.dispatcher.pump()
    assert bench.pool.jobs == [], "there is nothing in it"
    bench.dispatcher.drain("default", [0])
    bench.pool.end(Report(0))
    assert bench.pool.jobs == [], "the next token is worth one look, too"
    slow[1](Report(10, 1, 12.0))
    assert bench.pool.jobs == []


def test_a_chunk_that_ends_late_does_not_end_a_drain_that_was_asked_for_after_it(
    hands: Hands,
) -> None:
    bench = DispatcherHarness()
    bench.dispatcher.drain("default", [0])
    hands.at += HELD_UP_S + 0.01
    bench.dispatcher.pump()
    slow = bench.pool.jobs.pop(0)
    bench.pool.end(Report(0))
    bench.pool.limit = 1  # the slow chunk occupies the only process
    bench.dispatcher.drain("default", [0])
    assert bench.pool.jobs == []
    slow[1](Report(3, 1, 12.0))
    assert [job.drain for job, _, _ in bench.pool.jobs] == ["default"]


def test_a_drain_goes_on_after_a_process_of_it_died_and_ends_with_the_database(
    hands: Hands,
) -> None:
    bench = DispatcherHarness()
    bench.dispatcher.drain("default", [0])
    _, _, lost = bench.pool.jobs.pop()
    try:
        raise WorkerLostError("exited prematurely")
    except WorkerLostError:
        lost(ExceptionInfo())
    wait_until(lambda: bench.pool.jobs, 5, "another process to go on")
    bench.pool.end(Report(error="StoreUnavailableError: away"))
    hands.at += 60
    bench.dispatcher.pump()
    assert bench.pool.jobs == []


def test_a_drain_that_is_asked_for_while_one_is_under_way_is_done_after_it(
    bench: DispatcherHarness,
) -> None:
    bench.dispatcher.drain("default", [0])
    bench.dispatcher.drain("default", [5])
    bench.pool.end(Report(0))
    assert [set(job.priorities) for job, _, _ in bench.pool.jobs] == [{0, 5}]
    bench.pool.end(Report(0))
    assert bench.pool.jobs == []


def test_a_pool_that_raises_costs_no_slot(bench: DispatcherHarness) -> None:
    bench.pool.is_broken = True
    bench.dispatcher.take(bench.entries(2))
    assert bench.dispatcher.in_flight == {}
    assert bench.events.counts["chunk.failed"] == 1


def test_a_process_that_died_gives_its_slot_back(bench: DispatcherHarness) -> None:
    bench.dispatcher.take(bench.entries(2))
    _, _, lost = bench.pool.jobs.pop()
    lost(RuntimeError("worker lost"))
    assert len(bench.dispatcher.in_flight) == 1


def test_a_process_that_died_says_nothing_of_the_database(hands: Hands) -> None:
    bench = DispatcherHarness(shards=2)
    bench.dispatcher.take(bench.entries_of(0, 30))
    _, _, lost = bench.pool.jobs.pop()
    try:
        raise WorkerLostError("exited prematurely")
    except WorkerLostError:
        lost(ExceptionInfo())
    wait_until(lambda: bench.pool.jobs, 5, "the next chunk")
    assert bench.dispatcher.shard_health.info()[0]["is_up"]
    assert bench.events.counts["chunk.failed"] == 1


class Processes:
    """Simulate the process list of a pool, and record the processes that the dispatcher ends."""

    def __init__(
        self, bench: DispatcherHarness, monkeypatch: pytest.MonkeyPatch, *pids: int
    ) -> None:
        self.ended: list[int] = []
        bench.pool._pool = SimpleNamespace(_pool=[process_of(pid) for pid in pids])  # type: ignore[attr-defined]
        monkeypatch.setattr(pool_module.os, "kill", lambda pid, number: self.ended.append(pid))  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_the_databases", [False, True])
@pytest.mark.parametrize("others_succeed", [False, True])
def test_a_process_in_which_every_chunk_fails_is_replaced_unless_it_may_be_the_database(
    bench: DispatcherHarness,
    monkeypatch: pytest.MonkeyPatch,
    hands: Hands,
    is_the_databases: bool,
    others_succeed: bool,
) -> None:
    processes = Processes(bench, monkeypatch, 1, 2)
    for _ in range(MAX_FAILED_CHUNKS):
        assert processes.ended == []
        hands.at += 60
        bench.dispatcher.take(bench.entries(2))
        bench.pool.end(
            Report(error="RecursionError: too deep", pid=1, is_stores_error=is_the_databases)
        )
        bench.pool.end(
            Report(1, 1, 0.01, pid=2)
            if others_succeed
            else Report(error="away", is_stores_error=True)
        )
    assert processes.ended == ([] if is_the_databases and not others_succeed else [1])


def test_a_process_in_which_some_chunks_fail_stays(
    bench: DispatcherHarness, monkeypatch: pytest.MonkeyPatch, hands: Hands
) -> None:
    processes = Processes(bench, monkeypatch, 1)
    for number in range(3 * MAX_FAILED_CHUNKS):
        hands.at += 60
        bench.dispatcher.take(bench.entries(1))
        bench.pool.end(
            Report(error="RecursionError: too deep" if number % MAX_FAILED_CHUNKS else "", pid=1)
        )
    assert processes.ended == []


def test_a_pool_without_processes_of_its_own_ends_none(
    bench: DispatcherHarness, hands: Hands
) -> None:
    for _ in range(2 * MAX_FAILED_CHUNKS):
        hands.at += 60
        bench.dispatcher.take(bench.entries(1))
        bench.pool.end(Report(error="RecursionError: too deep", pid=os.getpid()))
    assert bench.events.counts["process.replaced"] == 0


class Sent:
    """A job that is registered in billiard's pool and that no process has started yet."""

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
def test_a_chunk_that_the_pool_forgets_with_the_broker_is_remembered_or_holds_no_process(
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
    [job, *_] = bench.pool.jobs[0]
    assert bench.dispatcher.recall() == ([] if is_written else list(job.entries))
    assert books.get(0) is (first if is_written else None)
    assert busy == ({101} if is_written else set()), "Celery before 5.7 forgets this, too"
    assert len(bench.dispatcher.in_flight) == (2 if is_written else 1)
    bench.dispatcher.take(bench.entries(5, start=100))
    assert len(bench.pool.jobs) == (2 if is_written else 3)
    # The report arrives after all, or the process was busy with another job for a long time.
    bench.pool.end(Report(10, 10, 0.05))
    assert bench.events.counts["chunk.failed"] == 0


def test_a_job_arrives_in_its_process_as_it_was_sent() -> None:
    job = Job(
        (Entry(1, 0, 5), Entry(2, 3, 6, "mail", 4)), limit=7, waitlist=("mail", "tag"), serve_s=0.5
    )
    arrived = pickle.loads(pickle.dumps(job))
    assert arrived == job
    assert [type(entry) for entry in arrived.entries] == [Entry, Entry]


def test_a_job_has_no_limits_of_celerys(bench: DispatcherHarness) -> None:
    class Result:
        """Simulate billiard's result object of a job that has not ended."""

        _on_timeout_set, _timeout, _soft_timeout = print, 3.0, 2.0

    result = Result()
    bench.pool.apply_async = lambda *args, **options: result  # type: ignore[method-assign]
    bench.dispatcher.take(bench.entries(1))
    assert (result._on_timeout_set, result._timeout, result._soft_timeout) == (
        None,
        float("inf"),
        float("inf"),
    )


def test_early_entries_go_back_to_the_wheel(bench: DispatcherHarness) -> None:
    bench.dispatcher.take(bench.entries(1))
    early = Entry(7, 0, bench.clock.now_us() + 1_000_000)
    bench.pool.end(Report(0, early=(early,)))
    assert bench.held == [early]


def test_the_capacity_is_a_chunk_and_the_next_one_of_each_process(bench: DispatcherHarness) -> None:
    assert bench.dispatcher.capacity() == 400, "two processes, of which nothing is known yet"
    bench.dispatcher.take(bench.entries(20))
    bench.pool.end(Report(10, 10, 10 * 0.005))
    bench.pool.end(Report(10, 10, 10 * 0.005))
    assert bench.dispatcher.capacity() == 40, "ten rows each in a time box"
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
    while bench.pool.jobs:
        job = bench.pool.end(Report(10, 10, 10 * 0.005))
        ran += [entry.id for entry in job.entries]
    assert ran[20:] == [200, *ids, 90, 1]


def test_a_process_that_will_be_busy_for_long_adds_no_capacity(bench: DispatcherHarness) -> None:
    bench.dispatcher.take(bench.entries(20))
    bench.clock.advance(0.5)
    assert bench.dispatcher.capacity() == 0, "its chunk takes longer than the time box"
    bench.pool.end(Report(10, 10, 10.0))
    assert bench.dispatcher.capacity() == 1, (
        "a second each: the free process takes one, and the next one when that is over"
    )
    bench.dispatcher.take(bench.entries(1, start=100))
    assert bench.dispatcher.capacity() == 0


def test_new_capacity_is_reported_when_a_chunk_ends(bench: DispatcherHarness) -> None:
    bench.dispatcher.take(bench.entries(40))
    bench.capacities.clear()
    bench.pool.end(Report(10, 10, 0.01))
    assert bench.capacities[-1] > 0


def test_a_closed_dispatcher_hands_out_what_waits_and_starts_no_more(
    bench: DispatcherHarness,
) -> None:
    bench.dispatcher.take(bench.entries(25))
    assert len(bench.dispatcher.close().entries) == 5
    bench.pool.end(Report(10, 10, 0.001))
    assert len(bench.pool.jobs) == 1


def test_work_that_a_chunk_found_after_the_close_is_left_to_others(
    bench: DispatcherHarness,
) -> None:
    bench.dispatcher.take(bench.entries(12))
    bench.pool.end(Report(10, 10, 0.001, lines=(WaitlistState("default", "test.first"),)))
    assert not bench.sent_back, "this worker continues with them"
    bench.dispatcher.close()
    tags = "test.first", "test.second"
    [early] = bench.entries(1, start=50)
    bench.pool.end(
        Report(
            2, 2, 0.001, early=(early,), lines=tuple(WaitlistState("default", tag) for tag in tags)
        )
    )
    assert bench.sent_back == [UnfinishedWork([early], [("default", set(), 0)])]
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

    def hold(entries: Sequence[Entry]) -> None:
        closing.append(threading.Thread(target=close))
        closing[0].start()
        closing[0].join(0.2)  # `close` waits for the end of the chunk
        bench.held += entries
        assert not closed, "what is held now would be lost"

    bench.dispatcher._hold = hold
    bench.dispatcher.take(bench.entries(1))
    early = Entry(7, 0, bench.clock.now_us() + 1_000_000)
    bench.pool.end(Report(0, early=(early,)))
    closing[0].join(10)
    assert (bench.held, closed, bench.sent_back) == ([early], [True], [])


def test_entries_that_come_due_after_the_close_are_sent_back(bench: DispatcherHarness) -> None:
    bench.dispatcher.close()
    late = bench.entries(2)
    bench.dispatcher.take(late)
    assert bench.sent_back == [UnfinishedWork(late, [])]
    assert (bench.dispatcher.waiting, bench.pool.jobs) == (0, [])


# -- several shards -------------------------------------------------------------------------------


def test_a_chunk_has_rows_of_one_shard_and_shards_take_turns() -> None:
    bench = DispatcherHarness(shards=2)
    bench.dispatcher.take([*bench.entries_of(0, 30), *bench.entries_of(1, 30)])
    bench.pool.end(Report(10, 10, 0.05))
    bench.pool.end(Report(10, 10, 0.05))
    assert [job.shard for job, _, _ in bench.pool.jobs] == [0, 1]
    assert [{shard_of(entry.id) for entry in job.entries} for job, _, _ in bench.pool.jobs] == [
        {0},
        {1},
    ]


class Hands:
    """Replace the monotonic clock of the shard queues by one that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = 1000.0
        for module in (queue_drain, shard_queue):
            monkeypatch.setattr(module, "monotonic", lambda: self.at)


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    return Hands(monkeypatch)


def test_a_shard_that_failed_gets_no_chunk_until_it_answers_and_others_do(hands: Hands) -> None:
    bench = DispatcherHarness(shards=2)
    bench.dispatcher.take(bench.entries_of(1, 1))
    bench.pool.end(Report(error="StoreUnavailableError: away"))
    hands.at += 60
    bench.dispatcher.take([*bench.entries_of(1, 1), *bench.entries_of(0, 1)])
    assert [job.shard for job, _, _ in bench.pool.jobs] == [0]

    def refuse() -> None:
        raise StoreUnavailableError("shard 1 is away", 1)

    assert not bench.dispatcher.shard_health.check(1, refuse)
    assert not bench.dispatcher.shard_health.check(1, refuse)
    assert (
        bench.events.counts["store.down"],
        bench.dispatcher.shard_health.info()[1]["is_up"],
    ) == (1, False)
    hands.at += 1
    assert bench.dispatcher.shard_health.check(1, lambda: None)
    assert (bench.events.counts["store.up"], bench.dispatcher.shard_health.info()[1]["is_up"]) == (
        1,
        True,
    )
    assert [job.shard for job, _, _ in bench.pool.jobs] == [0, 1]


def test_a_shard_that_owes_an_answer_gets_no_chunk(hands: Hands) -> None:
    bench = DispatcherHarness(shards=2)
    bench.pool.limit = 4
    bench.dispatcher.take(bench.entries_of(1, 1))

    def never(waits_s: float, jobs: int) -> None:
        hands.at += waits_s
        bench.dispatcher.shard_health.check_answers()
        bench.dispatcher.take(bench.entries_of(1, 1))
        assert len(bench.pool.jobs) == jobs

    assert bench.dispatcher.shard_health.check(1, lambda: (never(1, 2), never(2, 2)))
    assert (bench.events.counts["store.down"], bench.events.counts["store.up"]) == (1, 1)
    assert len(bench.pool.jobs) == 3, "it answered"


def test_a_shard_leaves_the_last_process_to_the_others(hands: Hands) -> None:
    bench = DispatcherHarness(shards=2)
    bench.pool.limit = 3
    bench.dispatcher.take(bench.entries_of(0, 100))
    assert [job.shard for job, _, _ in bench.pool.jobs] == [0, 0]
    bench.dispatcher.take(bench.entries_of(1, 1))
    assert [job.shard for job, _, _ in bench.pool.jobs] == [0, 0, 1]


def test_a_shard_that_answers_has_the_last_process_too_when_its_chunks_take_long(
    hands: Hands,
) -> None:
    bench = DispatcherHarness(shards=2)
    bench.dispatcher.take(bench.entries_of(0, 100))
    hands.at += 0.5
    bench.dispatcher.shard_health.check(0, lambda: None)
    assert len(bench.pool.jobs) == 1, "it answered, but that chunk may be at its claim"
    hands.at += 1
    bench.dispatcher.take(bench.entries_of(0, 1))
    assert len(bench.pool.jobs) == 1, "nobody knows whether it answers still"
    bench.dispatcher.shard_health.check(0, lambda: None)
    assert [job.shard for job, _, _ in bench.pool.jobs] == [0, 0]


def test_a_single_shard_is_not_asked_and_may_use_all_processes(
    hands: Hands, bench: DispatcherHarness
) -> None:
    def fail() -> None:
        raise AssertionError("it was asked")

    bench.dispatcher.take(bench.entries(100))
    assert len(bench.pool.jobs) == 2
    assert bench.dispatcher.shard_health.check(0, fail)
    bench.pool.end("StoreUnavailableError: away")
    hands.at += 1
    bench.dispatcher.take([])
    assert len(bench.pool.jobs) == 2, "after its rest it is tried again"


def test_a_drain_is_of_the_shard_that_its_token_names() -> None:
    bench = DispatcherHarness(shards=2)
    bench.dispatcher.drain("default", [0], shard=1)
    bench.dispatcher.drain("default", [0], shard=7)
    assert [(job.drain, job.shard) for job, _, _ in bench.pool.jobs] == [("default", 1)]


def test_entries_of_a_shard_that_is_not_known_yet_are_left_to_others() -> None:
    bench = DispatcherHarness(shards=2)
    bench.dispatcher.take(bench.entries_of(2, 5))
    assert (bench.dispatcher.waiting, bench.pool.jobs) == (0, [])


# -- batch processors -----------------------------------------------------------------------------


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


def test_rows_that_run_on_are_known_until_their_process_says_otherwise(
    bench: DispatcherHarness,
) -> None:
    [shard_queue] = bench.dispatcher.shard_queues
    bench.dispatcher.take(bench.entries(400))
    bench.pool.end(Report(10, 8, 0.01, pid=1, left=(4, 5)))
    bench.pool.end(Report(10, 9, 0.01, pid=2, left=(9,)))
    assert shard_queue.running_on == {1: (4, 5), 2: (9,)}
    assert len(bench.pool.jobs) == 2, "and the next chunks come"
    bench.pool.end(Report(1, 3, 0.01, pid=1))
    bench.pool.end(Report(error="StoreUnavailableError: away", pid=2, left=(9, 12)))
    assert shard_queue.running_on == {2: (9, 12)}
