"""`result` returns when a task has ended, on each database."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

import delaytasks as e
from delaytasks import DelayedTask, Fail, Status
from tests.waiting import wait_until
from tests.world import MonkeyPatch, World
from tests.world.recording import engine_at, run


def begin_wait(pool: ThreadPoolExecutor, world: World, task: DelayedTask) -> Future[Any]:
    future = pool.submit(world.delays.result, task, 20)
    wait_until(future.running, 5, "the thread to wait")
    return future


@pytest.fixture
def reads(world: World, monkeypatch: MonkeyPatch) -> list[int]:
    """Return the ids of the rows that calls have read, in their order."""
    tasks, read = world.store.tasks, list[int]()
    read_row = tasks.read

    def note(id: int, on: Any = None) -> DelayedTask:
        found = read_row(id, on)
        read.append(id)
        return found

    monkeypatch.setattr(tasks, "read", note)
    return read


def test_several_threads_wait_for_results(world: World) -> None:
    world.delays.processor("sum", keep_result=True)(sum)
    world.delays.processor("fails")(lambda body: Fail("no"))
    tasks = [world.schedule("sum", [n, 1]) for n in range(3)]
    fails = world.schedule("fails", None)
    with ThreadPoolExecutor(5) as pool:
        futures = [begin_wait(pool, world, task) for task in [*tasks, tasks[0], fails]]
        world.run(*tasks, fails)
        ended = [future.exception(20) or future.result() for future in futures]
    assert ended[:4] == [1, 2, 3, 1]
    assert str(ended[4]) == f"task {fails.id} (fails) is FAILED: no"
    assert isinstance(ended[4], e.TaskFailedError)
    assert ended[4].id == fails.id
    assert world.delays.result(tasks[0].id, 0) == 1, "it has ended before"


def test_a_cancelled_task_has_ended(world: World, reads: list[int]) -> None:
    task = world.schedule(delay=60, key="k")
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(world.delays.result, tag="note", key="k", timeout="20s")
        wait_until(lambda: bool(reads), 5, "the thread to find the task by its key")
        world.delays.cancel(task)
        with pytest.raises(e.TaskCancelledError, match=r"is CANCELLED$") as caught:
            future.result(20)
    assert (caught.value.id, caught.value.status) == (task.id, Status.CANCELLED)


def test_a_task_that_does_not_end_in_time_is_a_timeout(world: World) -> None:
    task = world.schedule(delay=60)
    for timeout in (0, 0.05, "50ms"):
        with pytest.raises(e.WaitTimeoutError, match="NOT_COMPLETE") as caught:
            world.delays.result(task, timeout)
        assert caught.value.id == task.id
        assert isinstance(caught.value, TimeoutError)
    with pytest.raises(e.TaskNotFoundError):
        world.delays.result(7, 1)


def test_several_coroutines_wait_for_results(world: World, reads: list[int]) -> None:
    world.delays.processor("sum", keep_result=True)(sum)
    world.delays.processor("fails")(lambda body: Fail("no"))
    tasks = [world.schedule("sum", [n, 1], key=str(n)) for n in range(3)]
    fails = world.schedule("fails", None)
    reads.clear()

    async def go() -> list[Any]:
        named = asyncio.ensure_future(world.delays.aresult(tag="sum", key="1", timeout="20s"))
        while not reads:  # the key has no task any more after the task has run
            await asyncio.sleep(0.01)
        waits = [world.delays.aresult(task, 20) for task in [*tasks, tasks[0], fails]]
        together = asyncio.gather(*waits, named, return_exceptions=True)
        await asyncio.wait([together], timeout=0.1)
        assert not together.done(), "they wait for tasks that have not run"
        await asyncio.to_thread(world.run, *tasks, fails)
        return await together

    ended = run(go())
    assert isinstance(ended.pop(4), e.TaskFailedError)
    assert ended == [1, 2, 3, 1, 2]
    assert run(world.delays.aresult(tasks[0].id, 0)) == 1, "it has ended before"


def test_a_coroutines_pauses_between_reads_grow(world: World, monkeypatch: MonkeyPatch) -> None:
    world.delays.processor("sum", keep_result=True)(sum)
    task = world.schedule("sum", [1])
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 12:
            world.run(task)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    assert run(world.delays.aresult(task)) == 1
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.02, 0.5)
    pauses.clear()
    monkeypatch.setattr("delaytasks.operate.task_calls.monotonic", lambda: sum(pauses))
    with pytest.raises(e.WaitTimeoutError):
        run(world.delays.aresult(world.schedule(delay=60), 0.1))
    assert sum(pauses) == pytest.approx(0.1), "none is longer than the timeout"


def test_no_coroutine_reads_in_its_sessions_transaction(world: World, database_url: str) -> None:
    """That transaction may never see the end of the task."""
    world.delays.processor("sum", keep_result=True)(sum)
    task = world.schedule("sum", [1])

    async def go() -> Any:
        async with engine_at(database_url) as engine, AsyncSession(engine) as session:
            with world.delays.transaction(session):
                await world.delays.afind()
                assert session.in_transaction()
                await session.rollback()
                waiting = asyncio.ensure_future(world.delays.aresult(task, 20))
                await asyncio.wait([waiting], timeout=0.1)
                assert not session.in_transaction()
            await asyncio.to_thread(world.run, task)
            return await waiting

    assert run(go()) == 1
