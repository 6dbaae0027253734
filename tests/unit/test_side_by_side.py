"""Rows run concurrently in one process, in threads, on an event loop and in batches."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import timedelta
from itertools import repeat
from typing import Any

import pytest
from celery.exceptions import WorkerShutdown

import delaytasks
from delaytasks import Cancel, DelayedTask, Done, Fail, Retry, Snooze, Status
from delaytasks.model.clock import monotonic
from delaytasks.model.inputs import MAX_SLOTS
from delaytasks.run.calls import ThreadSlots
from tests.unit.conftest import Gate, fail_settlements
from tests.waiting import wait_until
from tests.world import MakeWorld, World
from tests.world.recording import ManualClock

# -- rows run concurrently in one process, in threads and on an event loop ------------------------


@pytest.fixture
def detaching(make_world: MakeWorld, gate: Gate) -> World:
    """A world whose rows of the tag `wait` may outlast their chunks."""
    world = make_world(_chunk_time_budget_s=0.2)
    world.worker(may_detach=True, keeps_time_limits=True)
    world.delays.processor("wait", in_flight=5)(gate)
    return world


# -- slots ----------------------------------------------------------------------------------------


def test_chunks_share_the_slots_of_a_tag(world: World, gate: Gate, pool: Executor) -> None:
    world.delays.processor("wait", in_flight=3)(gate)
    chunks = [[world.schedule("wait") for _ in range(2)] for _ in range(3)]
    running = [pool.submit(world.run, *tasks) for tasks in chunks]
    gate.wait_for(3)
    time.sleep(0.05)
    gate.is_open.set()
    assert sum(one.result(10).ran for one in running) == 6
    assert gate.most == 3


def test_all_tags_together_have_at_most_max_slots_thread_slots() -> None:
    slots = ThreadSlots()
    assert all(slots.take(tag, MAX_SLOTS, 0) for tag in "ab" for _ in range(MAX_SLOTS // 2))
    assert not slots.take("c", 5, monotonic() + 0.01)
    assert slots.free("c", 5) == 0
    slots.give_back("a")
    assert slots.take("c", 5, 0)


def test_concurrent_rows_begin_first_and_other_rows_run_meanwhile(world: World, gate: Gate) -> None:
    world.delays.processor("wait", in_flight=5)(gate)
    world.delays.processor("open")(lambda body: gate.wait_for(2) or gate.is_open.set())
    tasks = [world.schedule("open", priority=9), world.schedule("wait"), world.schedule("wait")]
    world.run(*tasks)
    assert world.statuses(tasks) == ["DONE"] * 3


@pytest.mark.parametrize("option", ["in_flight", "batch"])
@pytest.mark.parametrize("number", [0, -1, 1001, True, 2.0, "5"])
def test_an_invalid_number_is_refused(world: World, option: str, number: Any) -> None:
    with pytest.raises(ValueError, match=f"{option} is an integer from 1 to "):
        world.delays.processor("wait", **{option: number})


# -- how concurrent rows end ----------------------------------------------------------------------


def test_a_concurrent_row_that_raises_worker_shutdown_fails(world: World) -> None:
    def stop(body: Any) -> None:
        raise WorkerShutdown(0)

    world.delays.processor("stop", in_flight=2)(stop)
    world.run(*(tasks := [world.schedule("stop"), world.schedule()]))
    assert world.statuses(tasks) == ["FAILED", "DONE"]


def test_rows_without_a_thread_slot_within_the_time_budget_are_given_back(
    make_world: MakeWorld, gate: Gate, pool: Executor
) -> None:
    world = make_world(_chunk_time_budget_s=0.2)
    world.delays.processor("wait", in_flight=2)(gate)
    tasks = [world.schedule("wait") for _ in range(5)]
    world.broker.lose()
    running = pool.submit(world.run, *tasks)
    gate.wait_for(2)
    left = ["RUNNING"] * 2 + ["NOT_COMPLETE"] * 3
    wait_until(lambda: world.statuses(tasks) == left, 5, "the others to be given back")
    gate.is_open.set()
    assert running.result(5).ran == 2
    assert [world.read(task).runs for task in tasks] == [1, 1, 0, 0, 0]
    assert len(world.broker.armed) == 3


# -- rows that outlast their chunk ----------------------------------------------------------------


def test_a_long_row_delays_no_settlement_and_no_chunk(detaching: World, gate: Gate) -> None:
    world = detaching
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


def test_a_chunk_ends_when_a_slot_is_free(detaching: World, gate: Gate, pool: Executor) -> None:
    running = pool.submit(detaching.run, *[detaching.schedule("wait") for _ in range(5)])
    gate.wait_for(5)
    time.sleep(0.6)
    assert not running.done(), "all places are taken: it would only bring rows to give them back"
    gate.is_open.set()
    running.result(5)
    detaching.worker().finish()


def test_a_detached_row_that_fails_to_settle_keeps_its_lease(detaching: World, gate: Gate) -> None:
    world = detaching
    world.run(task := world.schedule("wait"))
    fail_settlements(world, repeat(delaytasks.StoreError("refused")))
    gate.is_open.set()
    world.worker().finish()
    assert world.statuses([task]) == ["RUNNING"]
    assert world.run().detached == (), "so nobody renews it"
    wait_until(lambda: world.told("loop.failed"), 5, "it to be told")
    assert [fields["loop"] for fields in world.told("loop.failed")] == ["time budget"]


RISKY = [({"in_flight": 5}, 1), ({"time_limit": 60}, 0)]


@pytest.mark.parametrize(("options", "lapses"), RISKY, ids=["recovered", "limited"])
def test_a_row_that_may_end_its_process_runs_when_no_other_row_runs(
    detaching: World, gate: Gate, pool: Executor, options: dict[str, Any], lapses: int
) -> None:
    world, seen = detaching, list[tuple[int, list[str]]]()
    others = [world.schedule("wait")]
    world.delays.processor("risky", **options)(
        lambda body: seen.append((gate.inside, world.statuses(others)))
    )
    world.run(*others)
    others += [world.schedule("wait")] * (not lapses)
    risky = world.schedule("risky", priority=9)
    world.change(risky, lapses=lapses)
    running = pool.submit(world.drain)
    gate.wait_for(len(others))
    wait_until(lambda: world.read(risky).status is Status.RUNNING, 5, "it to be claimed")
    time.sleep(0.1)
    assert seen == []
    gate.is_open.set()
    assert running.result(5).detached == ()
    assert seen == [(0, ["DONE"] * len(others))], "what is finished is settled, too"
    assert world.statuses([risky]) == ["DONE"]


class LostClock(ManualClock):
    """A clock that needs a measurement while the database is away."""

    is_lost = False

    def now_us(self) -> int:
        if self.is_lost:
            raise delaytasks.StoreUnavailableError("what time is it?")
        return super().now_us()


def test_a_row_of_unknown_outcome_lapses_and_frees_its_thread_slot(world: World) -> None:
    clock = LostClock(world.now())
    world.set_clock(clock)

    @world.delays.processor("wait", in_flight=1, retries="1m")
    def work(is_lost: bool) -> None:
        clock.is_lost = is_lost
        assert not is_lost

    first, second = world.schedule("wait", True), world.schedule("wait", False)
    world.run(first)
    clock.is_lost = False
    world.run(second)
    assert world.statuses([first, second]) == ["RUNNING", "DONE"]
    assert [fields["loop"] for fields in world.told("loop.failed")] == ["concurrent calls"]


# -- how many rows the next chunk should have -----------------------------------------------------


def test_a_chunk_requests_as_many_rows_as_can_start_together(world: World) -> None:
    world.delays.processor("wait", in_flight=20)(lambda body: time.sleep(0.1))
    world.delays.processor("batch", batch=100)(lambda tasks: None)
    report = world.run(*[world.schedule("wait") for _ in range(20)])
    assert 0.1 <= report.seconds < 1.9, "20 rows of 100 ms in 20 places take as long as one"
    assert report.wanted == 20
    assert world.run(*[world.schedule("batch") for _ in range(10)]).wanted == 100
    mostly_others = [world.schedule("wait"), world.schedule(), world.schedule()]
    assert world.run(*mostly_others).wanted == 0


# -- coroutines -----------------------------------------------------------------------------------


def test_coroutines_run_concurrently_on_one_loop_and_a_hundred_by_default(world: World) -> None:
    loops: set[int] = set()
    inside, most, awaited = 0, 0, 100

    async def work(body: Any) -> None:
        nonlocal inside, most
        loops.add(id(asyncio.get_running_loop()))
        inside += 1
        most = max(most, inside)
        until = time.monotonic() + 10
        while most < awaited and time.monotonic() < until:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.02)  # an additional row would start in this time
        inside -= 1

    world.delays.processor("async")(work)
    world.delays.processor("few", in_flight=3)(work)
    world.run(*(tasks := [world.schedule("async") for _ in range(120)]))
    assert world.statuses(tasks) == ["DONE"] * 120
    assert (most, len(loops)) == (100, 1)
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
        with pytest.raises(delaytasks.TaskStateError, match="this is a run of"):
            tasks[0 if task.id != tasks[0].id else 1].complete()

    world.delays.processor("async")(work)
    world.run(*(tasks := [world.schedule("async") for _ in range(5)]))
    assert seen == {task.id: (0, task.id) for task in tasks}


ERRORS = [ValueError("x"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError("x")]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_coroutine_that_raises_fails_only_its_row(world: World, error: BaseException) -> None:
    async def fail(body: Any) -> None:
        await asyncio.sleep(0)
        if body:
            raise error

    world.delays.processor("async")(fail)
    world.run(*(tasks := [world.schedule("async", body) for body in (0, 1, 0)]))
    assert world.statuses(tasks) == ["DONE", "FAILED", "DONE"]
    text = world.read(tasks[1]).error or ""
    assert type(error).__name__ in text
    assert "in fail" in text
    world.run(after := world.schedule("async"))
    assert world.statuses([after]) == ["DONE"]


def test_time_limits_are_refused_for_concurrent_processors(world: World) -> None:
    async def work(body: Any) -> None: ...

    with pytest.raises(ValueError, match=r"work is async or has in_flight: use timeouts instead"):
        world.delays.processor("wait", time_limit=5)(work)
    with pytest.raises(ValueError, match="has in_flight"):
        world.delays.processor("wait", soft_time_limit=5, in_flight=5)(lambda body: None)


# -- the tasks that a batch processor receives ----------------------------------------------------


def run_batch(
    world: World, work: Callable[..., Any], bodies: int | Sequence[Any] = 4, **options: Any
) -> list[DelayedTask]:
    """Run tasks with these bodies, or 0, 1, 2, …, and return each task as stored afterwards."""
    world.delays.processor("batch", **{"batch": 100, **options})(work)
    bodies = range(bodies) if isinstance(bodies, int) else bodies
    world.run(*(tasks := [world.schedule("batch", body) for body in bodies]))
    return [world.read(task) for task in tasks]


def statuses(tasks: list[DelayedTask]) -> list[str]:
    return [task.status.name for task in tasks]


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
    ordered = [("note", "a"), ("batch", 1), ("note", "b"), ("batch", 2)]
    world.run(*[world.schedule(*each, priority=9 - n) for n, each in enumerate(ordered)])
    assert world.notes == ["a", [1, 2], "b"]


def test_of_two_arguments_the_first_one_has_the_bodies_by_the_schema(world: World) -> None:
    @dataclass
    class Order:
        order: int

    got: list[Any] = []

    def work(orders: list[Order], tasks: list[DelayedTask]) -> None:
        got.extend((order, task.id) for order, task in zip(orders, tasks, strict=True))

    first, second = run_batch(world, work, [{"order": 7}, {"order": 8}], schema=Order)
    assert got == [(Order(7), first.id), (Order(8), second.id)]


def test_a_refused_body_and_a_body_that_is_not_json_affect_no_other_task(world: World) -> None:
    def even(body: Any) -> Any:
        if body % 2:
            raise ValueError("odd")
        return body

    got: list[int] = []
    options: Any = {"schema": even, "retries": "10s"}
    world.delays.processor("batch", batch=10, **options)(lambda b, t: got.extend(b))
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
    late, fine, only = (world.schedule("batch", body) for body in (1, 2, 3))
    for task in (late, only):
        world.change(task, expected_time=world.now() - timedelta(seconds=60))
    world.run(world.read(late), fine)
    assert world.statuses([late, fine]) == ["CANCELLED", "DONE"]
    world.run(world.read(only))
    assert got == [2], "nor is it called for none"


def test_a_function_with_other_arguments_is_refused(world: World) -> None:
    for function in (lambda: None, lambda a, b, c: None):
        with pytest.raises(TypeError, match=r"\(tasks\) or \(bodies, tasks\)"):
            world.delays.processor("batch", batch=10)(function)


# -- the outcomes that a batch processor returns --------------------------------------------------

OUTCOMES = [None, Done(), Retry(after="5m"), Snooze("30m"), Cancel("closed"), Fail("no")]
ENDS = ["DONE", "DONE", "NOT_COMPLETE", "NOT_COMPLETE", "CANCELLED", "FAILED"]
EACH = (ENDS, [1, 1, 1, 0, 1, 1])
SNOOZED, RETRIED = ((ENDS[2:3] * 6, [attempts] * 6) for attempts in (0, 1))


def by_id(tasks: list[DelayedTask]) -> dict[int, Any]:
    """Return the outcomes, without those that are None."""
    return {task.id: end for task, end in zip(tasks, OUTCOMES, strict=True) if end is not None}


#: What a processor returns for six tasks, their statuses and attempts, and a part of their errors.
RETURNED: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "a list": (lambda tasks: OUTCOMES, EACH, ""),
    "a tuple": (lambda tasks: tuple(OUTCOMES), EACH, ""),
    "a dict": (by_id, EACH, ""),
    "one for all": (lambda tasks: Snooze("30m"), SNOOZED, ""),
    "too few": (lambda tasks: [None], RETRIED, "returned 1 outcome for 6 tasks"),
    "too many": (lambda tasks: [None] * 7, RETRIED, "returned 7 outcomes for 6 tasks"),
    "a stranger": (lambda tasks: {7: Done()}, RETRIED, "for 1 unknown id, such as 7"),
    "ids as text": (lambda tasks: {str(tasks[0].id): Done()}, RETRIED, "the keys are task.id"),
    "a number": (lambda tasks: 4, RETRIED, "returned a int"),
    "a generator": (lambda tasks: (None for _ in tasks), RETRIED, "returned a generator"),
    "text": (lambda tasks: "done", RETRIED, "returned a str"),
}


@pytest.mark.parametrize("name", RETURNED)
def test_each_task_has_the_outcome_that_is_returned_for_it(world: World, name: str) -> None:
    """A return value of another form retries all of them."""
    work, (ends, runs), said = RETURNED[name]
    tasks = run_batch(world, work, 6, retries="10s")
    assert (statuses(tasks), [task.runs for task in tasks]) == (ends, runs)
    for task in tasks if said else ():
        assert "InvalidInputError: the batch's processor returned" in (task.error or "")
        assert said in (task.error or "")


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


def test_batches_run_concurrently_and_as_coroutines(world: World) -> None:
    both = threading.Barrier(2, timeout=10)
    world.delays.processor("concurrent", batch=5, in_flight=2)(
        lambda tasks: world.notes.append(both.wait())
    )
    tasks = [world.schedule("concurrent") for _ in range(10)]
    assert world.run(*tasks).wanted == 10
    assert world.statuses(tasks) == ["DONE"] * 10

    async def work(tasks: list[DelayedTask]) -> list[Any]:
        await asyncio.sleep(0.01)
        return [Fail("odd") if task.body % 2 else None for task in tasks]

    assert statuses(run_batch(world, work, 10, batch=5)) == ["DONE", "FAILED"] * 5
