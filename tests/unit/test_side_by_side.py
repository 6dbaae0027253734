"""Rows run concurrently in one process, in threads, on an event loop and in batches."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from celery.exceptions import WorkerShutdown

from delaytasks import (
    Cancel,
    DelayedTask,
    Done,
    Fail,
    Retry,
    Snooze,
    Status,
    StoreError,
    StoreUnavailableError,
    TaskStateError,
)
from delaytasks.core.clock import monotonic
from delaytasks.core.interfaces import Settlement
from delaytasks.core.workers import ChunkSize
from delaytasks.execution.executor import TaskExecutor
from delaytasks.processors.registry import MAX_SLOTS, EventLoop, Registry, ThreadSlots
from tests.waiting import wait_until
from tests.world import MakeWorld, World

# -- rows run concurrently in one process, in threads and on an event loop ------------------------


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
    world: World, gate: ForkGate
) -> None:
    world.delays.processor("wait", in_flight=3)(gate)
    chunks = [[world.schedule("wait") for _ in range(2)] for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(world.run, *tasks) for tasks in chunks]
        wait_until(lambda: gate.inside == 3, 5, "the places to be taken")
        time.sleep(0.05)
        gate.is_open.set()
        assert sum(one.result(10).ran for one in running) == 6
    assert gate.most == 3


def test_concurrent_rows_begin_first_and_other_rows_run_meanwhile(
    world: World, gate: ForkGate
) -> None:
    world.delays.processor("wait", in_flight=5)(gate)

    def opens(body: Any) -> None:
        wait_until(lambda: gate.inside == 2, 5, "the others to have begun")
        gate.is_open.set()

    world.delays.processor("open")(opens)
    tasks = [world.schedule("open", priority=9), world.schedule("wait"), world.schedule("wait")]
    world.run(*tasks)
    assert world.statuses(tasks) == ["DONE"] * 3


@pytest.mark.parametrize("option", ["in_flight", "batch"])
@pytest.mark.parametrize("number", [0, -1, 1001, True, 2.0, "5"])
def test_an_invalid_number_is_refused_by_the_registration(
    world: World, option: str, number: Any
) -> None:
    with pytest.raises(ValueError, match=f"{option} is a number from 1 to "):
        world.delays.processor("wait", **{option: number})


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


def test_a_concurrent_row_that_raises_worker_shutdown_fails(world: World) -> None:
    def stop(body: Any) -> None:
        raise WorkerShutdown(0)

    world.delays.processor("stop", in_flight=2)(stop)
    tasks = [world.schedule("stop"), world.schedule()]
    world.run(*tasks)
    assert world.statuses(tasks) == ["FAILED", "DONE"]


def test_rows_without_a_thread_slot_within_the_time_budget_are_given_back(
    make_world: MakeWorld, gate: ForkGate
) -> None:
    world = make_world(_chunk_time_budget_s=0.5)
    world.delays.processor("wait", in_flight=2)(gate)
    tasks = [world.schedule("wait") for _ in range(5)]
    world.broker.lose()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(world.run, *tasks)
        wait_until(lambda: gate.inside == 2, 5, "two to begin: all are claimed")
        wait_until(
            lambda: world.statuses(tasks).count("NOT_COMPLETE") == 3,
            5,
            "the others to be given back",
        )
        gate.is_open.set()
        assert running.result(5).ran == 2
    assert [world.read(task).runs for task in tasks] == [1, 1, 0, 0, 0]
    assert len(world.broker.armed) == 3


# -- rows that outlast their chunk ----------------------------------------------------------------


def test_a_long_row_delays_neither_other_settlements_nor_the_next_chunk(
    make_world: MakeWorld, gate: ForkGate
) -> None:
    world = make_world(_chunk_time_budget_s=0.5)
    world.worker(may_detach=True)
    world.delays.processor("wait", in_flight=5)(gate)
    world.delays.processor("quick", in_flight=5)(lambda body: None)
    slow, quick = world.schedule("wait"), [world.schedule("quick") for _ in range(3)]
    report = world.run(slow, *quick)
    assert report.detached == (slow.id,)
    assert world.statuses([slow, *quick]) == ["RUNNING", "DONE", "DONE", "DONE"]
    after = world.run(*[world.schedule() for _ in range(3)])
    assert (after.ran, after.detached) == (3, (slow.id,))
    gate.is_open.set()
    world.worker().finish()
    assert world.statuses([slow]) == ["DONE"]
    last = world.run()
    assert (last.ran, last.detached) == (1, ()), "the next report tells of it"


def test_detached_rows_that_end_together_are_settled_soon_in_one_call(
    make_world: MakeWorld,
) -> None:
    world = make_world(_chunk_time_budget_s=0.5)
    world.worker(may_detach=True)
    doors = [threading.Event() for _ in range(2)]
    inside: list[int] = []

    def wait(body: int) -> None:
        inside.append(body)
        doors[body].wait(10)

    world.delays.processor("wait", in_flight=20)(wait)
    tasks = [world.schedule("wait", n % 2) for n in range(20)]
    settled: list[int] = []
    world.before_settle = lambda settlements: settled.append(len(settlements))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(world.run, *tasks)  # the rows occupy all slots
        try:
            wait_until(lambda: len(inside) == 20, 5, "all to run")
            doors[0].set()
            running.result(5)
            wait_until(
                lambda: world.statuses(tasks).count("DONE") == 10, 5, "the first half to be settled"
            )
            assert len(settled) <= 3, "in bulk"
        finally:
            doors[1].set()
    world.worker().finish()
    assert world.statuses(tasks) == ["DONE"] * 20


def test_a_chunk_is_reported_when_a_thread_slot_is_free(
    make_world: MakeWorld, gate: ForkGate
) -> None:
    world = make_world(_chunk_time_budget_s=0.2)
    world.worker(may_detach=True)
    world.delays.processor("wait", in_flight=2)(gate)
    tasks = [world.schedule("wait") for _ in range(2)]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(world.run, *tasks)
        wait_until(lambda: gate.inside == 2, 5, "both to run")
        time.sleep(0.6)
        assert not running.done(), (
            "all places are taken: it would only bring rows to give them back"
        )
        gate.is_open.set()
        running.result(5)
    world.worker().finish()


def test_a_detached_row_that_cannot_be_settled_is_left_to_its_lease(
    make_world: MakeWorld, gate: ForkGate
) -> None:
    world = make_world(_chunk_time_budget_s=0.2)
    world.worker(may_detach=True)
    world.delays.processor("wait", in_flight=5)(gate)
    task = world.schedule("wait")
    world.run(task)

    def refuse(settlements: Sequence[Settlement]) -> None:
        raise StoreError("refused")

    world.before_settle = refuse
    gate.is_open.set()
    world.worker().finish()
    assert world.statuses([task]) == ["RUNNING"]
    assert world.run().detached == (), "so nobody renews it"
    wait_until(lambda: world.told("loop.failed"), 5, "it to be told")
    assert [fields["loop"] for fields in world.told("loop.failed")] == ["time budget"]


def test_a_recovered_row_runs_when_no_other_row_runs(make_world: MakeWorld, gate: ForkGate) -> None:
    world = make_world(_chunk_time_budget_s=0.2)
    world.worker(may_detach=True)
    world.delays.processor("wait", in_flight=5)(gate)
    others_inside: list[int] = []
    world.delays.processor("suspect", in_flight=5)(lambda body: others_inside.append(gate.inside))
    world.run(world.schedule("wait"))
    assert gate.inside == 1
    abandoned_row = world.schedule("suspect")
    world.change(abandoned_row, lapses=1)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(world.drain)
        wait_until(
            lambda: world.read(abandoned_row).status is Status.RUNNING, 5, "it to be claimed"
        )
        time.sleep(0.1)
        gate.is_open.set()
        assert running.result(5).detached == ()
    assert others_inside == [0]
    assert world.statuses([abandoned_row]) == ["DONE"]


def test_a_row_whose_outcome_cannot_be_determined_lapses_and_frees_its_thread_slot(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise StoreUnavailableError("what time is it?")

    world.delays.processor("wait", in_flight=1)(lambda body: None)
    first, second = world.schedule("wait"), world.schedule("wait")
    with monkeypatch.context() as patch:
        patch.setattr(TaskExecutor, "run", broken)
        patch.setattr(TaskExecutor, "failed", broken)
        world.run(first)
    world.run(second)
    assert world.statuses([first, second]) == ["RUNNING", "DONE"]
    assert [fields["loop"] for fields in world.told("loop.failed")] == ["concurrent calls"]


# -- the size of a chunk --------------------------------------------------------------------------


def test_the_chunk_size_follows_the_thread_slots_and_not_the_duration_of_a_row(
    world: World,
) -> None:
    world.delays.processor("wait", in_flight=20)(lambda body: time.sleep(0.1))
    report = world.run(*[world.schedule("wait") for _ in range(20)])
    assert 0.1 <= report.seconds <= 0.5, "20 rows of 100 ms in 20 places take as long as one"
    assert report.wanted == 20
    size = ChunkSize(0.05, 200)
    size.learn(report.ran, report.seconds, report.wanted)
    assert size.rows == 20, "all places, though a row does not fit the time budget"
    assert size.fits


def test_a_chunk_of_mostly_other_rows_requests_no_more_rows(world: World) -> None:
    world.delays.processor("wait", in_flight=20)(lambda body: None)
    report = world.run(world.schedule("wait"), world.schedule(), world.schedule())
    assert report.wanted == 0


# -- coroutines -----------------------------------------------------------------------------------


def test_coroutines_run_concurrently_on_one_loop_and_a_hundred_by_default(world: World) -> None:
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

    world.delays.processor("async")(work)
    world.delays.processor("few", in_flight=3)(work)
    tasks = [world.schedule("async") for _ in range(50)]
    world.run(*tasks)
    assert world.statuses(tasks) == ["DONE"] * 50
    assert (most, len(loops)) == (50, 1)
    specs = {spec.tag: spec for spec in world.runtime.registry}
    places = [specs[tag].in_flight for tag in ("async", "few", "note")]
    assert places == [100, 3, None]
    most, awaited = 0, 3
    world.run(*[world.schedule("few") for _ in range(9)])
    assert (most, len(loops)) == (3, 1)


def test_a_coroutine_has_the_context_of_its_row(world: World) -> None:
    seen: dict[int, Any] = {}
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)

    async def work(body: Any, task: DelayedTask) -> None:
        before = variable.get()
        variable.set(task.id)
        await asyncio.sleep(0.01)
        seen[task.id] = before, variable.get()
        with pytest.raises(TaskStateError, match="this is a run of"):
            tasks[0 if task.id != tasks[0].id else 1].complete()

    world.delays.processor("async")(work)
    tasks = [world.schedule("async") for _ in range(5)]
    world.run(*tasks)
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
    world: World, error: BaseException
) -> None:
    async def fail(body: Any) -> None:
        await asyncio.sleep(0)
        if body:
            raise error

    world.delays.processor("async")(fail)
    tasks = [world.schedule("async", body) for body in (0, 1, 0)]
    world.run(*tasks)
    assert world.statuses(tasks) == ["DONE", "FAILED", "DONE"]
    text = world.read(tasks[1]).error or ""
    assert type(error).__name__ in text
    assert "in fail" in text
    world.run(after := world.schedule("async"))
    assert world.statuses([after]) == ["DONE"]


def test_a_coroutine_that_a_function_returns_is_awaited(world: World) -> None:
    async def work(body: Any) -> dict[str, Any]:
        return {"got": body}

    world.delays.processor("handed", keep_result=True)(lambda body: work(body))
    world.run(task := world.schedule("handed", 7))
    assert world.read(task).result == {"got": 7}


def test_a_forked_child_has_its_own_event_loop() -> None:
    async def work() -> int:
        return id(asyncio.get_running_loop())

    coroutines = EventLoop()
    first = coroutines.result_of(work())
    assert coroutines.result_of(work()) == first
    coroutines.after_fork()
    assert coroutines.result_of(work()) != first


# -- rows with time limits ------------------------------------------------------------------------


def test_time_limits_are_refused_for_concurrent_processors(world: World) -> None:
    async def work(body: Any) -> None: ...

    with pytest.raises(ValueError, match=r"work is async: use timeouts instead"):
        world.delays.processor("wait", time_limit=5)(work)
    with pytest.raises(ValueError, match="has in_flight"):
        world.delays.processor("wait", soft_time_limit=5, in_flight=5)(lambda body: None)


def test_a_row_that_its_time_limit_may_kill_waits_for_the_concurrent_rows(
    make_world: MakeWorld, gate: ForkGate
) -> None:
    world = make_world(_chunk_time_budget_s=1)
    world.worker(may_detach=True, keeps_time_limits=True)
    world.delays.processor("wait", in_flight=5)(gate)
    others_inside: list[Any] = []
    world.delays.processor("limited", time_limit=60)(
        lambda body: others_inside.append((gate.inside, world.statuses([first, second])))
    )
    world.run(first := world.schedule("wait"))
    second = world.schedule("wait")
    limited = world.schedule("limited", priority=9)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(world.run, limited, second)
        wait_until(lambda: gate.inside == 2, 5, "the others to run")
        time.sleep(0.1)
        assert others_inside == []
        gate.is_open.set()
        running.result(5)
    assert others_inside == [(0, ["DONE", "DONE"])], "what is finished is settled, too"
    assert world.statuses([limited]) == ["DONE"]


# -- batches --------------------------------------------------------------------------------------


Work = Callable[[list[DelayedTask]], Any]


def run_batch(world: World, work: Work, count: int = 4, **options: Any) -> list[DelayedTask]:
    """Run `count` tasks whose bodies are 0, 1, 2, …, and return each task as stored afterwards."""
    world.delays.processor("batch", **{"batch": 100, **options})(work)
    tasks = [world.schedule("batch", body) for body in range(count)]
    world.run(*tasks)
    return [world.read(task) for task in tasks]


def statuses(tasks: list[DelayedTask]) -> list[str]:
    return [task.status.name for task in tasks]


# -- the tasks that a batch processor receives ----------------------------------------------------


def test_a_batch_is_called_once_for_as_many_tasks_as_it_takes(world: World) -> None:
    got: list[list[int]] = []
    settled: list[int] = []
    world.before_settle = lambda settlements: settled.append(len(settlements))
    tasks = run_batch(world, lambda tasks: got.append([task.body for task in tasks]), 25, batch=10)
    assert got == [list(range(10)), list(range(10, 20)), list(range(20, 25))]
    assert statuses(tasks) == ["DONE"] * 25
    assert settled == [25]
    assert {(task.runs, task.version) for task in tasks} == {(1, 2)}


def test_only_tasks_of_its_tag_are_in_a_batch_and_the_others_keep_their_order(world: World) -> None:
    world.delays.processor("batch", batch=10)(
        lambda tasks: world.notes.append([task.body for task in tasks])
    )
    tasks = [
        world.schedule(tag, body, priority=priority)
        for tag, body, priority in [
            ("note", "a", 9),
            ("batch", 1, 8),
            ("note", "b", 7),
            ("batch", 2, 6),
        ]
    ]
    world.run(*tasks)
    assert world.notes == ["a", [1, 2], "b"]


def test_with_two_arguments_the_first_one_has_the_bodies_converted_by_the_schema(
    world: World,
) -> None:
    @dataclass
    class Order:
        order: int

    got: list[Any] = []

    def work(orders: list[Order], tasks: list[DelayedTask]) -> None:
        got.append(
            [(type(order), order.order, task.id) for order, task in zip(orders, tasks, strict=True)]
        )

    world.delays.processor("orders", batch=10, schema=Order)(work)
    tasks = [world.schedule("orders", {"order": 7}), world.schedule("orders", {"order": 8})]
    world.run(*tasks)
    assert got == [[(Order, 7, tasks[0].id), (Order, 8, tasks[1].id)]]


def test_a_refused_body_and_a_body_that_is_not_json_affect_no_other_task(world: World) -> None:
    def even(body: Any) -> Any:
        if body % 2:
            raise ValueError("odd")
        return body

    got: list[int] = []
    world.delays.processor("batch", batch=10, schema=even, retries="10s")(
        lambda b, t: got.extend(b)
    )
    tasks = [world.schedule("batch", body) for body in (0, 2, 4, 6)]
    world.change(tasks[1], message_body="3")
    world.change(tasks[2], message_body="{nope")
    world.run(*tasks)
    assert world.statuses(tasks) == ["DONE", "FAILED", "NOT_COMPLETE", "DONE"]
    assert "odd" in (world.read(tasks[1]).error or "")
    assert "JSONDecodeError" in (world.read(tasks[2]).error or "")
    assert got == [0, 6]


def test_an_expired_task_is_not_in_the_batch(world: World) -> None:
    got: list[int] = []
    world.delays.processor("batch", batch=10, max_late=10)(
        lambda tasks: got.extend(task.body for task in tasks)
    )
    late, fine = world.schedule("batch", 1), world.schedule("batch", 2)
    world.change(late, expected_time=world.now() - timedelta(seconds=60))
    world.run(world.read(late), fine)
    assert world.statuses([late, fine]) == ["CANCELLED", "DONE"]
    assert got == [2]
    world.change(
        only := world.schedule("batch", 3), expected_time=world.now() - timedelta(seconds=60)
    )
    world.run(world.read(only))
    assert got == [2], "nor is it called for none"


def test_a_function_with_other_arguments_is_refused() -> None:
    for function in (lambda: None, lambda a, b, c: None):
        with pytest.raises(TypeError, match=r"\(tasks\) or \(bodies, tasks\)"):
            Registry().processor("batch", batch=10)(function)


# -- the outcomes that a batch processor returns --------------------------------------------------

OUTCOMES = [None, Done(), Retry(after="5m"), Snooze("30m"), Cancel("closed"), Fail("no")]
ENDS = ["DONE", "DONE", "NOT_COMPLETE", "NOT_COMPLETE", "CANCELLED", "FAILED"]


@pytest.mark.parametrize("said", [list, tuple, dict])
def test_each_task_has_the_outcome_that_the_processor_returned_for_it(
    world: World, said: Any
) -> None:
    def work(tasks: list[DelayedTask]) -> Any:
        if said is dict:
            return {
                task.id: outcome
                for task, outcome in zip(tasks, OUTCOMES, strict=True)
                if outcome is not None
            }
        return said(OUTCOMES)

    tasks = run_batch(world, work, len(OUTCOMES))
    assert statuses(tasks) == ENDS
    assert [task.runs for task in tasks] == [1, 1, 1, 0, 1, 1]


def test_one_outcome_is_for_all(world: World) -> None:
    tasks = run_batch(world, lambda tasks: Snooze("30m"))
    assert statuses(tasks) == ["NOT_COMPLETE"] * 4
    assert {task.runs for task in tasks} == {0}


WRONG = {
    "too few": (lambda tasks: [None], "returned 1 outcome for 4 tasks"),
    "too many": (lambda tasks: [None] * 5, "returned 5 outcomes for 4 tasks"),
    "a stranger": (lambda tasks: {7: Done()}, "for 1 unknown id, such as 7"),
    "ids as text": (lambda tasks: {str(tasks[0].id): Done()}, "the keys are task.id"),
    "a number": (lambda tasks: 4, "returned a int"),
    "a generator": (lambda tasks: (None for _ in tasks), "returned a generator"),
    "text": (lambda tasks: "done", "returned a str"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_return_value_without_an_outcome_for_each_task_retries_all(
    world: World, name: str
) -> None:
    work, says = WRONG[name]
    tasks = run_batch(world, work, retries="10s")
    assert statuses(tasks) == ["NOT_COMPLETE"] * 4
    for task in tasks:
        assert "InvalidInputError: the batch's processor returned" in (task.error or "")
        assert says in (task.error or "")


def test_an_error_of_the_processor_fails_all_tasks_by_the_usual_rules(world: World) -> None:
    def fail(tasks: list[DelayedTask]) -> None:
        raise ConnectionError("busy")

    tasks = run_batch(world, fail, retries={ConnectionError: "10s"})
    assert statuses(tasks) == ["NOT_COMPLETE"] * 4
    assert {task.runs for task in tasks} == {1}
    for task in tasks:
        world.change(task, expected_time=world.now() - timedelta(milliseconds=10))
    world.run(*map(world.read, tasks))
    assert world.statuses(tasks) == ["FAILED"] * 4
    error = world.read(tasks[3]).error or ""
    assert "ConnectionError: busy" in error
    assert "in fail" in error


def test_an_invalid_outcome_fails_only_its_own_task(world: World) -> None:
    tasks = run_batch(world, lambda tasks: [None, Retry(), Snooze(-1), None])
    assert statuses(tasks) == ["DONE", "FAILED", "FAILED", "DONE"]
    assert "needs a retry schedule" in (tasks[1].error or "")


# -- other properties of a run -------------------------------------------------------------------


def test_a_batch_that_stops_the_worker_does_not_affect_other_rows(world: World) -> None:
    def stop(tasks: list[DelayedTask]) -> None:
        raise WorkerShutdown(0)

    world.delays.processor("batch", batch=10)(stop)
    tasks = [
        world.schedule(priority=9),
        world.schedule("batch"),
        world.schedule("batch"),
        world.schedule(),
    ]
    with pytest.raises(WorkerShutdown):
        world.run(*tasks)
    assert world.statuses(tasks) == ["DONE", "RUNNING", "RUNNING", "NOT_COMPLETE"]


def test_batches_run_concurrently_and_as_coroutines(world: World) -> None:
    both = threading.Barrier(2, timeout=10)

    def wait(tasks: list[DelayedTask]) -> None:
        both.wait()

    world.delays.processor("concurrent", batch=5, in_flight=2)(wait)

    async def work(tasks: list[DelayedTask]) -> list[Any]:
        await asyncio.sleep(0.01)
        return [Fail("odd") if task.body % 2 else None for task in tasks]

    world.delays.processor("async", batch=5)(work)
    tasks = [world.schedule("concurrent") for _ in range(10)]
    assert world.run(*tasks).wanted == 10
    assert world.statuses(tasks) == ["DONE"] * 10
    tasks = [world.schedule("async", body) for body in range(10)]
    world.run(*tasks)
    assert world.statuses(tasks) == ["DONE", "FAILED"] * 5


def test_chunks_have_the_size_of_a_batch_even_beyond_the_time_budget(world: World) -> None:
    size = ChunkSize(0.05, 200)
    world.delays.processor("batch", batch=100)(lambda tasks: time.sleep(0.2))
    report = world.run(*[world.schedule("batch") for _ in range(10)])
    assert report.wanted == 100
    for _ in range(20):
        size.learn(report.ran, report.seconds, report.wanted)
    assert (size.rows, size.least) == (100, 100)
    size.learn(10, 0.2, 0)
    assert size.rows < 5, "others came, who want none of that"
    size.learn(0, 0.0, 0)
    assert size.least == 1
