"""Rows run concurrently in one process, in threads and on an event loop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from celery.exceptions import WorkerShutdown

from delaytasks import DelayTask, Status
from delaytasks.core.clock import monotonic
from delaytasks.core.errors import NotRunningError, StoreError, StoreUnavailableError
from delaytasks.core.interfaces import Settlement
from delaytasks.core.workers import ChunkSize
from delaytasks.processors.registry import MAX_SLOTS, EventLoop, ThreadSlots
from tests.recording import RunnerHarness
from tests.unit.conftest import Make
from tests.waiting import wait_until


class ForkGate:
    """Block each caller until the gate is open, and count the callers."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.inside = self.most = 0
        self._lock = threading.Lock()

    def __call__(self, body: Any) -> None:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        assert self.is_open.wait(10)
        with self._lock:
            self.inside -= 1


@pytest.fixture
def gate() -> Iterator[ForkGate]:
    made = ForkGate()
    yield made
    made.is_open.set()


# -- slots ----------------------------------------------------------------------------------------


def test_the_chunks_of_a_process_share_the_thread_slots_of_a_tag(
    bench: RunnerHarness, gate: ForkGate
) -> None:
    bench.registry.processor("wait", in_flight=3)(gate)
    chunks = [[bench.schedule("wait") for _ in range(2)] for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(bench.run, *tasks) for tasks in chunks]
        wait_until(lambda: gate.inside == 3, 5, "the places to be taken")
        time.sleep(0.05)
        gate.is_open.set()
        assert sum(one.result(10).ran for one in running) == 6
    assert gate.most == 3


def test_concurrent_rows_begin_first_and_other_rows_run_meanwhile(
    bench: RunnerHarness, gate: ForkGate
) -> None:
    bench.registry.processor("wait", in_flight=5)(gate)

    def opens(body: Any) -> None:
        wait_until(lambda: gate.inside == 2, 5, "the others to have begun")
        gate.is_open.set()

    bench.registry.processor("open")(opens)
    tasks = [bench.schedule("open", priority=9), bench.schedule("wait"), bench.schedule("wait")]
    bench.run(*tasks)
    assert bench.statuses(tasks) == ["DONE"] * 3


@pytest.mark.parametrize("option", ["in_flight", "batch"])
@pytest.mark.parametrize("number", [0, -1, 1001, True, 2.0, "5"])
def test_an_invalid_number_is_refused_by_the_registration(
    bench: RunnerHarness, option: str, number: Any
) -> None:
    with pytest.raises(ValueError, match=f"{option}=.*from 1 to 1000"):
        bench.registry.processor("wait", **{option: number})


def test_all_tags_together_have_at_most_max_slots_thread_slots() -> None:
    thread_slots = ThreadSlots()
    for tag in ("a", "b"):
        for _ in range(MAX_SLOTS // 2):
            assert thread_slots.take(tag, MAX_SLOTS, 0)
    assert not thread_slots.take("c", 5, monotonic() + 0.01)
    assert thread_slots.free("c", 5) == 0
    thread_slots.give_back("a")
    assert thread_slots.take("c", 5, 0)


# -- how concurrent rows end ----------------------------------------------------------------------


def test_a_concurrent_row_that_raises_worker_shutdown_fails(
    bench: RunnerHarness,
) -> None:
    def stop(body: Any) -> None:
        raise WorkerShutdown(0)

    bench.registry.processor("stop", in_flight=2)(stop)
    tasks = [bench.schedule("stop"), bench.schedule()]
    bench.run(*tasks)
    assert bench.statuses(tasks) == ["FAILED", "DONE"]


def test_rows_without_a_thread_slot_within_the_time_budget_are_given_back(
    make: Make, gate: ForkGate
) -> None:
    bench = make(chunk_time_budget_s=0.5)
    bench.registry.processor("wait", in_flight=2)(gate)
    tasks = [bench.schedule("wait") for _ in range(5)]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(bench.run, *tasks)
        wait_until(lambda: gate.inside == 2, 5, "two to begin: all are claimed")
        wait_until(
            lambda: bench.statuses(tasks).count("NOT_COMPLETE") == 3,
            5,
            "the others to be given back",
        )
        gate.is_open.set()
        assert running.result(5).ran == 2
    assert [bench.now(task).attempts for task in tasks] == [1, 1, 0, 0, 0]
    assert len(bench.timer.armed) == 3


# -- rows that outlast their chunk ----------------------------------------------------------------


def test_a_long_row_delays_neither_other_settlements_nor_the_next_chunk(
    make: Make, gate: ForkGate
) -> None:
    bench = make(may_detach=True, chunk_time_budget_s=0.5)
    bench.registry.processor("wait", in_flight=5)(gate)
    bench.registry.processor("quick", in_flight=5)(lambda body: None)
    slow, quick = bench.schedule("wait"), [bench.schedule("quick") for _ in range(3)]
    report = bench.run(slow, *quick)
    assert report.detached == (slow.id,)
    assert bench.statuses([slow, *quick]) == ["RUNNING", "DONE", "DONE", "DONE"]
    after = bench.run(*[bench.schedule() for _ in range(3)])
    assert (after.ran, after.detached) == (3, (slow.id,))
    gate.is_open.set()
    bench.runner.finish()
    assert bench.statuses([slow]) == ["DONE"]
    last = bench.run()
    assert (last.ran, last.detached) == (1, ()), "the next report tells of it"


def test_detached_rows_that_end_together_are_settled_soon_in_one_call(make: Make) -> None:
    bench = make(may_detach=True, chunk_time_budget_s=0.5)
    doors = [threading.Event() for _ in range(2)]
    bench.registry.processor("wait", in_flight=20)(lambda body: doors[body].wait(10))
    tasks = [bench.schedule("wait", n % 2) for n in range(20)]
    settled: list[int] = []
    bench.claims.before_settle = lambda settlements: settled.append(len(settlements))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(bench.run, *tasks)  # the rows occupy all slots
        try:
            wait_until(
                lambda: bench.runner._chunks._thread_slots.free("wait", 20) == 0, 5, "all to run"
            )
            doors[0].set()
            running.result(5)
            wait_until(
                lambda: bench.statuses(tasks).count("DONE") == 10, 5, "the first half to be settled"
            )
            assert len(settled) <= 3, "in bulk"
        finally:
            doors[1].set()
    bench.runner.finish()
    assert bench.statuses(tasks) == ["DONE"] * 20


def test_a_chunk_is_reported_when_a_thread_slot_is_free(make: Make, gate: ForkGate) -> None:
    bench = make(may_detach=True, chunk_time_budget_s=0.2)
    bench.registry.processor("wait", in_flight=2)(gate)
    tasks = [bench.schedule("wait") for _ in range(2)]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(bench.run, *tasks)
        wait_until(lambda: gate.inside == 2, 5, "both to run")
        time.sleep(0.6)
        assert not running.done(), (
            "all places are taken: it would only bring rows to give them back"
        )
        gate.is_open.set()
        running.result(5)
    bench.runner.finish()


def test_a_detached_row_that_cannot_be_settled_is_left_to_its_lease(
    make: Make, gate: ForkGate
) -> None:
    bench = make(may_detach=True, chunk_time_budget_s=0.2)
    bench.registry.processor("wait", in_flight=5)(gate)
    task = bench.schedule("wait")
    bench.run(task)

    def refuse(settlements: Sequence[Settlement]) -> None:
        raise StoreError("refused")

    bench.claims.before_settle = refuse
    gate.is_open.set()
    bench.runner.finish()
    assert bench.statuses([task]) == ["RUNNING"]
    assert bench.run().detached == (), "so nobody renews it"
    wait_until(lambda: bench.named("loop.failed"), 5, "it to be told")
    assert [fields["loop"] for fields in bench.named("loop.failed")] == ["time budget"]


def test_a_recovered_row_runs_when_no_other_row_runs(make: Make, gate: ForkGate) -> None:
    bench = make(may_detach=True, chunk_time_budget_s=0.2)
    bench.registry.processor("wait", in_flight=5)(gate)
    others_inside: list[int] = []
    bench.registry.processor("suspect", in_flight=5)(lambda body: others_inside.append(gate.inside))
    bench.run(bench.schedule("wait"))
    assert gate.inside == 1
    abandoned_row = bench.schedule("suspect")
    bench.change(abandoned_row, lapses=1)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(bench.runner.run_due, "default", [0], 10)
        wait_until(lambda: bench.now(abandoned_row).status is Status.RUNNING, 5, "it to be claimed")
        time.sleep(0.1)
        gate.is_open.set()
        assert running.result(5).detached == ()
    assert others_inside == [0]
    assert bench.statuses([abandoned_row]) == ["DONE"]


def test_a_row_whose_outcome_cannot_be_determined_lapses_and_frees_its_thread_slot(
    bench: RunnerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise StoreUnavailableError("what time is it?")

    bench.registry.processor("wait", in_flight=1)(lambda body: None)
    first, second = bench.schedule("wait"), bench.schedule("wait")
    with monkeypatch.context() as patch:
        patch.setattr(bench.runner._chunks._executor, "run", broken)
        patch.setattr(bench.runner._chunks._executor, "failed", broken)
        bench.run(first)
    bench.run(second)
    assert bench.statuses([first, second]) == ["RUNNING", "DONE"]
    assert [fields["loop"] for fields in bench.named("loop.failed")] == ["concurrent calls"]


# -- the size of a chunk --------------------------------------------------------------------------


def test_the_chunk_size_follows_the_thread_slots_and_not_the_duration_of_a_row(
    bench: RunnerHarness,
) -> None:
    bench.registry.processor("wait", in_flight=20)(lambda body: time.sleep(0.1))
    report = bench.run(*[bench.schedule("wait") for _ in range(20)])
    assert 0.1 <= report.seconds <= 0.5, "20 rows of 100 ms in 20 places take as long as one"
    assert report.wanted == 20
    size = ChunkSize(0.05, 200)
    size.learn(report.ran, report.seconds, report.wanted)
    assert size.rows == 20, "all places, though a row does not fit the time budget"
    assert size.fits


def test_a_chunk_of_mostly_other_rows_requests_no_more_rows(bench: RunnerHarness) -> None:
    bench.registry.processor("wait", in_flight=20)(lambda body: None)
    report = bench.run(bench.schedule("wait"), bench.schedule(), bench.schedule())
    assert report.wanted == 0


# -- coroutines -----------------------------------------------------------------------------------


def test_coroutines_run_concurrently_on_one_loop_and_a_hundred_by_default(
    bench: RunnerHarness,
) -> None:
    loops: set[int] = set()
    inside, most, awaited = 0, 0, 50

    async def work(body: Any) -> None:
        nonlocal inside, most
        loops.add(id(asyncio.get_running_loop()))
        inside += 1
        most = max(most, inside)
        until = monotonic() + 10
        while most < awaited and monotonic() < until:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.02)  # an additional row would start in this time
        inside -= 1

    bench.registry.processor("async")(work)
    bench.registry.processor("few", in_flight=3)(work)
    tasks = [bench.schedule("async") for _ in range(50)]
    bench.run(*tasks)
    assert bench.statuses(tasks) == ["DONE"] * 50
    assert (most, len(loops)) == (50, 1)
    specs = {spec.tag: spec for spec in bench.registry}
    places = [specs[tag].in_flight for tag in ("async", "few", "note")]
    assert places == [100, 3, None]
    most, awaited = 0, 3
    bench.run(*[bench.schedule("few") for _ in range(9)])
    assert (most, len(loops)) == (3, 1)


def test_a_coroutine_has_the_context_of_its_row(bench: RunnerHarness) -> None:
    seen: dict[int, Any] = {}
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)

    async def work(body: Any, task: DelayTask) -> None:
        before = variable.get()
        variable.set(task.id)
        await asyncio.sleep(0.01)
        seen[task.id] = before, variable.get()
        with pytest.raises(NotRunningError, match="this is a run of"):
            tasks[0 if task.id != tasks[0].id else 1].complete()

    bench.registry.processor("async")(work)
    tasks = [bench.schedule("async") for _ in range(5)]
    bench.run(*tasks)
    assert seen == {task.id: (0, task.id) for task in tasks}


@pytest.mark.parametrize(
    "error",
    [
        ValueError("as asked"),
        SystemExit(3),
        KeyboardInterrupt(),
        asyncio.CancelledError("as asked"),
    ],
    ids=repr,
)
def test_a_coroutine_that_raises_fails_its_row_and_the_loop_continues(
    bench: RunnerHarness, error: BaseException
) -> None:
    async def fail(body: Any) -> None:
        await asyncio.sleep(0)
        if body:
            raise error

    bench.registry.processor("async")(fail)
    tasks = [bench.schedule("async", body) for body in (0, 1, 0)]
    bench.run(*tasks)
    assert bench.statuses(tasks) == ["DONE", "FAILED", "DONE"]
    text = bench.now(tasks[1]).error or ""
    assert type(error).__name__ in text
    assert "in fail" in text
    bench.run(after := bench.schedule("async"))
    assert bench.statuses([after]) == ["DONE"]


def test_a_coroutine_that_a_function_returns_is_awaited(bench: RunnerHarness) -> None:
    async def work(body: Any) -> dict[str, Any]:
        return {"got": body}

    bench.registry.processor("handed", keep_result=True)(lambda body: work(body))
    bench.run(task := bench.schedule("handed", 7))
    assert bench.now(task).result == {"got": 7}


def test_a_forked_child_has_its_own_event_loop() -> None:
    async def work() -> int:
        return id(asyncio.get_running_loop())

    coroutines = EventLoop()
    first = coroutines.result_of(work())
    assert coroutines.result_of(work()) == first
    coroutines.after_fork()
    assert coroutines.result_of(work()) != first


def test_an_expired_task_is_not_run_concurrently_either(bench: RunnerHarness) -> None:
    ran: list[Any] = []
    bench.registry.processor("wait", in_flight=5, expires=10)(ran.append)
    late, fine = bench.schedule("wait", "late"), bench.schedule("wait", "fine")
    bench.change(late, expected_time=bench.clock.now() - timedelta(seconds=60))
    bench.run(bench.now(late), fine)
    assert bench.statuses([late, fine]) == ["CANCELLED", "DONE"]
    assert ran == ["fine"]


# -- rows with time limits ------------------------------------------------------------------------


def test_time_limits_are_refused_for_concurrent_processors(bench: RunnerHarness) -> None:
    async def work(body: Any) -> None: ...

    with pytest.raises(ValueError, match=r"work is async: use timeouts instead"):
        bench.registry.processor("wait", time_limit=5)(work)
    with pytest.raises(ValueError, match="has in_flight"):
        bench.registry.processor("wait", soft_time_limit=5, in_flight=5)(lambda body: None)


def test_a_row_that_its_time_limit_may_kill_waits_for_the_concurrent_rows(
    make: Make, gate: ForkGate
) -> None:
    bench = make(may_detach=True, chunk_time_budget_s=1)
    bench.registry.processor("wait", in_flight=5)(gate)
    others_inside: list[Any] = []
    bench.registry.processor("limited", time_limit=60)(
        lambda body: others_inside.append((gate.inside, bench.statuses([first, second])))  # type: ignore[has-type]
    )
    bench.run(first := bench.schedule("wait"))
    second = bench.schedule("wait")
    limited = bench.schedule("limited", priority=9)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(bench.run, limited, second)
        wait_until(lambda: gate.inside == 2, 5, "the others to run")
        time.sleep(0.1)
        assert others_inside == []
        gate.is_open.set()
        running.result(5)
    assert others_inside == [(0, ["DONE", "DONE"])], "what is finished is settled, too"
    assert bench.statuses([limited]) == ["DONE"]
