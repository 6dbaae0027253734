"""Rows run concurrently in one process, in threads, on an event loop and in batches."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from datetime import timedelta
from itertools import repeat
from typing import Any

import pytest

import delaytasks
from delaytasks import Cancel, DelayedTask, Done, Fail, Retry, Snooze, Status
from tests.unit.conftest import Gate, fail_settlements
from tests.waiting import wait_until, within
from tests.world import MakeWorld, World


def run(body: Any) -> None: ...


async def wait(body: Any) -> None: ...


NO_NUMBERS: list[Any] = [0, -1, 1001, True, 2.0, "5"]
#: Functions and options that do not fit, and the reason.
REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (wait, {"time_limit": 5}, "wait is async or has in_flight: use timeouts instead"),
    (run, {"soft_time_limit": 5, "in_flight": 5}, "has in_flight"),
    (lambda: None, {"batch": 10}, r"\(tasks\) or \(bodies, tasks\)"),
    (lambda a, b, c: None, {"batch": 10}, r"\(tasks\) or \(bodies, tasks\)"),
    *((run, {"in_flight": number}, "in_flight is an integer from 1 to ") for number in NO_NUMBERS),
    *((run, {"batch": number}, "batch is an integer from 1 to ") for number in NO_NUMBERS),
]


@pytest.mark.parametrize(("function", "options", "said"), REFUSED)
def test_a_processor_whose_options_do_not_fit_is_refused(
    world: World, function: Any, options: Any, said: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        world.delays.processor("wait", **options)(function)


# -- slots ----------------------------------------------------------------------------------------


def test_chunks_share_the_slots_of_a_tag(world: World, gate: Gate, pool: Executor) -> None:
    world.delays.processor("wait", in_flight=3)(gate)
    chunks = [[world.schedule("wait") for _ in range(2)] for _ in range(3)]
    running = [pool.submit(world.run, *tasks) for tasks in chunks]
    gate.wait_for(3)
    time.sleep(0.05)  # an additional row would start in this time
    gate.is_open.set()
    assert sum(one.result(10).ran for one in running) == 6
    assert gate.most == 3


def test_concurrent_rows_begin_first_and_other_rows_run_meanwhile(world: World, gate: Gate) -> None:
    world.delays.processor("wait", in_flight=5)(gate)
    world.delays.processor("open")(lambda body: gate.wait_for(2) or gate.is_open.set())
    tasks = [world.schedule("open", priority=9), world.schedule("wait"), world.schedule("wait")]
    world.run(*tasks)
    assert world.statuses(tasks) == ["DONE"] * 3


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


@pytest.fixture
def detaching(make_world: MakeWorld, gate: Gate) -> World:
    """A world whose rows of the tag `wait` may outlast their chunks."""
    world = make_world(_chunk_time_budget_s=0.2)
    world.worker(may_detach=True, keeps_time_limits=True)
    world.delays.processor("wait", in_flight=5)(gate)
    return world


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


def test_a_detached_row_that_fails_to_settle_keeps_its_lease(detaching: World, gate: Gate) -> None:
    world = detaching
    world.run(task := world.schedule("wait"))
    fail_settlements(world, repeat(delaytasks.StoreError("refused")))
    gate.is_open.set()
    world.worker().finish()
    assert (world.statuses([task]), world.run().detached) == (["RUNNING"], ()), "nobody renews it"
    wait_until(lambda: world.told("loop.failed"), 5, "the report of the failure")


def test_a_process_that_cannot_settle_ends_after_a_lease(make_world: MakeWorld, gate: Gate) -> None:
    world = make_world(_chunk_time_budget_s=0.1, lease=1)
    world.worker(may_detach=True)
    world.delays.processor("wait", in_flight=5)(gate)
    world.run(task := world.schedule("wait"))
    fail_settlements(world, repeat(delaytasks.StoreUnavailableError("away")))
    gate.is_open.set()
    within(10, world.worker().finish)
    assert world.statuses([task]) == ["RUNNING"]


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


def test_a_recovered_row_of_a_waitlist_runs_when_no_other_row_runs(
    detaching: World, gate: Gate, pool: Executor
) -> None:
    world, seen = detaching, list[int]()
    world.delays.processor("risky")(lambda body: seen.append(gate.inside))
    world.limit("risky", concurrency=1)
    assert len(world.claim(world.schedule("risky"))) == 1
    world.change(risky := world.schedule("risky"), lapses=1)
    assert (world.worker().claim_recovered(), world.statuses([risky])) == ([], ["HELD"])
    world.limit("risky", concurrency=2)
    world.run(world.schedule("wait"))
    running = pool.submit(world.worker().run_waitlist, "risky", 10, 0.1)
    wait_until(lambda: world.read(risky).status is Status.RUNNING, 5, "it to be admitted")
    time.sleep(0.1)
    assert seen == []
    gate.is_open.set()
    running.result(5)
    assert seen == [0]


# -- coroutines -----------------------------------------------------------------------------------


def test_a_soft_time_limit_ends_a_coroutine_that_a_function_returned(world: World) -> None:
    ended = list[str]()

    async def wait_long() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            ended.append("cancelled")

    world.worker(keeps_time_limits=True)
    world.delays.processor("wraps", soft_time_limit=0.2)(lambda body: wait_long())
    world.run(task := world.schedule("wraps"))
    assert "SoftTimeLimitExceeded" in (world.read(task).error or "")
    wait_until(lambda: ended == ["cancelled"], 5, "the coroutine to end")


def test_coroutines_run_concurrently_on_one_loop_and_a_hundred_by_default(world: World) -> None:
    loops, inside, most, awaited = set[int](), 0, 0, 100

    async def work(body: Any) -> None:
        nonlocal inside, most
        loops.add(id(asyncio.get_running_loop()))
        inside += 1
        most, until = max(most, inside), time.monotonic() + 10
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


# -- the tasks that a batch processor receives ----------------------------------------------------


def run_batch(
    world: World, work: Callable[..., Any], bodies: Sequence[Any] = range(4), **options: Any
) -> list[DelayedTask]:
    """Run tasks with these bodies, and return each task as stored afterwards."""
    world.delays.processor("batch", **{"batch": 100, **options})(work)
    world.run(*(tasks := [world.schedule("batch", body) for body in bodies]))
    return [world.read(task) for task in tasks]


def statuses(tasks: list[DelayedTask]) -> list[str]:
    return [task.status.name for task in tasks]


def test_a_batch_is_called_once_for_as_many_tasks_of_its_tag_as_it_takes(world: World) -> None:
    settled: list[int] = []
    world.before_settle = lambda settlements: settled.append(len(settlements))
    world.delays.processor("batch", batch=10)(
        lambda tasks: world.notes.append([task.body for task in tasks])
    )
    tasks = [world.schedule("batch", number, priority=5) for number in range(25)]
    tasks[3:3] = [world.schedule(body="a", priority=9), world.schedule(body="b")]
    world.run(*tasks)
    assert world.notes == ["a", [*range(10)], [*range(10, 20)], [*range(20, 25)], "b"]
    assert {(task.status, task.runs) for task in map(world.read, tasks)} == {(Status.DONE, 1)}
    assert settled == [27]


def test_a_batch_has_bodies_by_the_schema_and_no_task_that_cannot_run(world: World) -> None:
    def tens(body: Any) -> Any:
        if body % 2:
            raise ValueError("odd")
        return 10 * body

    options: Any = {"schema": tens, "retries": "10s", "max_late": 10}
    world.delays.processor("batch", batch=10, **options)(
        lambda bodies, tasks: world.notes.extend(zip(bodies, tasks, strict=True))
    )
    tasks = [world.schedule("batch", body) for body in (0, 2, 4, 6, 8)]
    only = world.schedule("batch", 8)
    world.change(tasks[1], message_body="3")
    world.change(tasks[2], message_body="{nope")
    for late in (tasks[4], only):
        world.change(late, expected_time=world.now() - timedelta(seconds=60))
    world.run(*map(world.read, tasks))
    world.run(world.read(only))
    assert world.statuses(tasks) == ["DONE", "FAILED", "NOT_COMPLETE", "DONE", "CANCELLED"]
    assert "odd" in (world.read(tasks[1]).error or "")
    assert "JSONDecodeError" in (world.read(tasks[2]).error or "")
    ran = [(body, task.id) for body, task in world.notes]
    assert ran == [(0, tasks[0].id), (60, tasks[3].id)], "and it is called for no empty batch"


# -- the outcomes that a batch processor returns --------------------------------------------------

OUTCOMES = [None, Done(), Retry(after="5m"), Snooze("30m"), Cancel("closed"), Fail("no")]
ENDS = ["DONE", "DONE", "NOT_COMPLETE", "NOT_COMPLETE", "CANCELLED", "FAILED"]
EACH = (ENDS, [1, 1, 1, 0, 1, 1])
SNOOZED, RETRIED = ((ENDS[2:3] * 6, [attempts] * 6) for attempts in (0, 1))


def by_id(tasks: list[DelayedTask]) -> dict[int, Any]:
    """Return the outcomes, without those that are None."""
    return {task.id: end for task, end in zip(tasks, OUTCOMES, strict=True) if end is not None}


def fail(tasks: list[DelayedTask]) -> None:
    raise ConnectionError("busy")


WRONG = "InvalidInputError: the batch's processor returned"
#: What a processor does with six tasks, their statuses and attempts, and a part of their errors.
RETURNED: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "a list": (lambda tasks: OUTCOMES, EACH, ""),
    "a tuple": (lambda tasks: tuple(OUTCOMES), EACH, ""),
    "a dict": (by_id, EACH, ""),
    "one for all": (lambda tasks: Snooze("30m"), SNOOZED, ""),
    "too few": (lambda tasks: [None], RETRIED, f"{WRONG} 1 outcome for 6 tasks"),
    "too many": (lambda tasks: [None] * 7, RETRIED, f"{WRONG} 7 outcomes for 6 tasks"),
    "a stranger": (lambda tasks: {7: Done()}, RETRIED, "for 1 unknown id, such as 7"),
    "ids as text": (lambda tasks: {str(tasks[0].id): Done()}, RETRIED, "the keys are task.id"),
    "a number": (lambda tasks: 4, RETRIED, f"{WRONG} a int"),
    "a generator": (lambda tasks: (None for _ in tasks), RETRIED, f"{WRONG} a generator"),
    "text": (lambda tasks: "done", RETRIED, f"{WRONG} a str"),
    "an error": (fail, RETRIED, 'in fail\n    raise ConnectionError("busy")'),
}


@pytest.mark.parametrize("name", RETURNED)
def test_each_task_has_the_outcome_that_is_returned_for_it(world: World, name: str) -> None:
    """An error, or a return value of another form, retries all of them."""
    work, (ends, runs), said = RETURNED[name]
    tasks = run_batch(world, work, range(6), retries="10s")
    assert (statuses(tasks), [task.runs for task in tasks]) == (ends, runs)
    for task in tasks if said else ():
        assert said in (task.error or "")


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

    assert statuses(run_batch(world, work, range(10), batch=5)) == ["DONE", "FAILED"] * 5
