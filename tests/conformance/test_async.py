"""Asynchronous calls and sessions, and waiting for results, on every database."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.ext import asyncio as sqla
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

import delaytasks as e
from delaytasks import DelayedTask, DelayTasks, Fail, Status
from tests.waiting import wait_until, within
from tests.world import World
from tests.world.broker import RecordingTimer
from tests.world.recording import LIMIT_S, WaitingTimer, engine_at, run

# The asynchronous twins in threads


def test_many_calls_empty_no_pool_and_block_no_loop(world: World) -> None:
    delays, database = world.delays, world.store.database
    used, most_used, threads = set[int](), [0], set[int]()

    def take(link: Any, *_: Any) -> None:
        used.add(id(link))
        most_used[0] = max(most_used[0], len(used))

    for engine in (database.auto, database.tx):
        event.listen(engine, "checkout", take)
        event.listen(engine, "checkin", lambda link, *_: used.discard(id(link)))
        event.listen(engine, "before_cursor_execute", lambda *_: threads.add(threading.get_ident()))

    async def go() -> list[DelayedTask]:
        calls = (delays.aschedule_delay("mail", {"n": n}, 5) for n in range(500))
        return await asyncio.gather(*calls)

    tasks = run(go())
    assert len({task.id for task in tasks}) == 500
    assert sorted(world.broker.ids) == sorted(task.id for task in tasks)
    assert most_used[0] <= delays.settings.pool_size
    assert threading.get_ident() not in threads


async def begin_to_arm(call: Awaitable[Any], timer: WaitingTimer) -> asyncio.Future[Any]:
    """Begin a call, and return it when its row is committed, while the timer arms it."""
    task = asyncio.ensure_future(call)
    while not timer.is_arming.is_set():
        await asyncio.sleep(0)
    return task


async def cancel_as_it_arms(call: Awaitable[Any], timer: WaitingTimer) -> None:
    task = await begin_to_arm(call, timer)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_call_cancelled_later_completes(delays: DelayTasks, waiting_timer: WaitingTimer) -> None:
    async def go() -> None:
        await cancel_as_it_arms(delays.aschedule_delay("mail", {}, 5), waiting_timer)
        assert len(await delays.afind()) == 1
        waiting_timer.loop_goes_on.set()

    run(go())
    wait_until(lambda: waiting_timer.ids, LIMIT_S, "the task to be armed")


def test_a_coroutine_that_stops_the_event_loop_stops_no_other_one(world: World) -> None:
    began = list[str]()

    @world.delays.processor("waits")
    async def waits(body: str) -> None:
        began.append(body)
        while len(began) < 2:
            await asyncio.sleep(0)
        if body == "stops":
            asyncio.get_running_loop().stop()
        await asyncio.sleep(0.01)

    tasks = [world.schedule("waits", body) for body in ("stops", "waits")]
    within(20, partial(world.run, *tasks))
    assert world.statuses(tasks) == ["DONE"] * 2


def test_several_event_loops_share_an_instance(delays: DelayTasks) -> None:
    with ThreadPoolExecutor(3) as threads:
        calls = [delays.aschedule_many([("mail", {}, 5)] * 10) for _ in range(3)]
        assert list(threads.map(run, calls)) == [10] * 3
    assert len(delays.find()) == 30


# The asynchronous twins on the caller's session or connection


@pytest.mark.parametrize("place", ["session", "connection", "block", "aiomysql"])
def test_a_row_on_an_async_connection_exists_and_is_armed_after_its_commit(
    delays: DelayTasks, timer: RecordingTimer, database_url: str, place: str
) -> None:
    if place == "aiomysql" and not database_url.startswith("mysql"):
        pytest.skip("a driver of MySQL")

    async def use(own: Any) -> None:
        of = {} if place == "block" else {"session": own}
        with delays.transaction(own) if place == "block" else nullcontext():
            await delays.aschedule_delay("mail", {}, 5, **of)
            await own.rollback()
            assert len(await delays.afind()) == 0
            task = await delays.aschedule_delay("mail", {}, 5, **of)
            async with own.begin_nested() as savepoint:
                await delays.aschedule_delay("mail", {}, 5, **of)
                await savepoint.rollback()
        assert (timer.ids, len(await delays.afind())) == ([], 0)
        await own.commit()
        assert timer.ids == [found.id for found in await delays.afind()] == [task.id]

    async def go() -> None:
        async with engine_at(database_url, "aiomysql" if place == "aiomysql" else None) as engine:
            own = engine.connect() if place == "connection" else AsyncSession(engine)
            async with own:
                await use(own)

    run(go())


def test_each_method_works_on_an_async_session(delays: DelayTasks, database_url: str) -> None:
    async def use(session: Any) -> None:
        first = await delays.aschedule_delay("mail", {}, 3600, key="a", session=session)
        assert await delays.aschedule_many([("mail", {}, 3600)] * 3, session=session) == 3
        moved = await delays.areschedule(first, 60, session=session)
        assert moved.expected_time < first.expected_time
        assert await delays.atouch(tag="mail", key="a", delay=90, session=session)
        touched = await delays.atouch(tag="mail", key=["a", "b"], delay=95, session=session)
        assert touched.gone == ["b"]
        assert await delays.acancel(tag="mail", key="a", session=session)
        assert (await delays.aget(first.id, session=session)).status is Status.CANCELLED
        assert (await delays.arerun(first.id, 60, session=session)).id == first.id
        assert (await delays.aget(first.id, attempts=True, session=session)).attempts == ()
        assert len(await delays.afind(tag="mail", session=session)) == 4
        with pytest.raises(e.TaskNotFoundError):
            await delays.aget(1, session=session)
        assert len(await delays.afind(tag="mail")) == 0

    async def go() -> None:
        async with engine_at(database_url) as engine:
            async with engine.connect() as connection:
                await use(connection)
            local = sqla.async_scoped_session(sqla.async_sessionmaker(engine), asyncio.current_task)
            await use(local)
            await local.remove()

    run(go())


def test_a_synchronous_session_is_refused_with_the_remedy(world: World, database_url: str) -> None:
    delays = world.delays

    async def go() -> None:
        refused = pytest.raises(e.SessionUnusableError, match="call the synchronous method")
        with Session(world.engine) as session, refused:
            await delays.aschedule_delay("mail", {}, 5, session=session)
        async with engine_at(database_url) as engine:
            for wrong in (engine, sqla.AsyncConnection(engine)):
                with pytest.raises(e.SessionUnusableError):
                    await delays.aschedule_delay("mail", {}, 5, session=wrong)

    run(go())


def test_arming_blocks_no_event_loop_and_a_commit_that_is_cancelled_meanwhile_is_one(
    delays: DelayTasks, waiting_timer: WaitingTimer, database_url: str
) -> None:
    async def schedule(engine: AsyncEngine) -> None:
        async with AsyncSession(engine) as session, session.begin():
            await delays.aschedule_delay("mail", {}, 5, session=session)

    async def go() -> None:
        async with engine_at(database_url) as engine:
            call = await begin_to_arm(schedule(engine), waiting_timer)
            waiting_timer.loop_goes_on.set()
            await call
            assert len(waiting_timer.ids) == 1
            waiting_timer.is_arming.clear()
            waiting_timer.loop_goes_on.clear()
            await cancel_as_it_arms(schedule(engine), waiting_timer)
            waiting_timer.loop_goes_on.set()
            assert len(await delays.afind()) == 2
            await schedule(engine)  # the engine can still be used

    run(go())
    wait_until(lambda: len(waiting_timer.ids) == 3, LIMIT_S, "all tasks to be armed")


# `result` and its twin return when a task has ended


def test_threads_and_coroutines_wait_for_results(world: World) -> None:
    delays = world.delays
    delays.processor("sum", keep_result=True)(sum)
    delays.processor("fails")(lambda body: Fail("no"))
    tasks = [world.schedule("sum", [n, 1]) for n in range(3)] + [world.schedule("fails")]
    far = world.schedule(delay=60, key="k")

    async def go() -> list[Any]:
        in_thread = partial(asyncio.get_running_loop().run_in_executor, pool)
        by_key: Any = {"tag": "note", "key": "k", "timeout": "20s"}
        waits: list[Any] = [in_thread(partial(delays.result, **by_key))]
        waits += [in_thread(delays.result, one, 20) for one in tasks]
        waits += [asyncio.ensure_future(delays.aresult(**by_key))]
        waits += [asyncio.ensure_future(delays.aresult(one, 20)) for one in tasks]
        together = asyncio.gather(*waits, return_exceptions=True)
        while sum("delay_task_key" in statement for statement in seen) < 2:
            await asyncio.sleep(0.01)  # a key has no task any more after the task has ended
        await asyncio.wait([together], timeout=0.1)
        assert not any(one.done() for one in waits), "they wait for tasks that have not ended"
        await in_thread(world.run, *tasks)
        await in_thread(delays.cancel, far)
        return await together

    with ThreadPoolExecutor(6) as pool, world.statements() as seen:
        found = run(go())
    for cancelled, *results, failed in (found[:5], found[5:]):
        assert isinstance(cancelled, e.TaskCancelledError)
        assert (cancelled.id, cancelled.status) == (far.id, Status.CANCELLED)
        assert results == [1, 2, 3]
        assert isinstance(failed, e.TaskFailedError)
        assert str(failed) == f"task {tasks[3].id} (fails) is FAILED: no"
    assert delays.result(tasks[0].id, 0) == run(delays.aresult(tasks[0].id, 0)) == 1


def test_a_task_that_does_not_end_in_time_is_a_timeout(world: World) -> None:
    task = world.schedule(delay=60)
    for timeout in (0, 0.05, "50ms"):
        with pytest.raises(e.WaitTimeoutError, match="NOT_COMPLETE") as caught:
            world.delays.result(task, timeout)
        assert caught.value.id == task.id
        assert isinstance(caught.value, TimeoutError)
    with pytest.raises(e.TaskNotFoundError):
        world.delays.result(7, 1)


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
