"""Asynchronous calls and sessions, and waiting for results, on every database."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import ContextVar
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
from tests.world import MonkeyPatch, World
from tests.world.broker import RecordingTimer
from tests.world.recording import LIMIT_S, WaitingTimer, engine_at, run, run_now

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


def test_the_thread_has_the_context_variables_of_the_caller(delays: DelayTasks) -> None:
    tenant, seen = ContextVar("tenant", default="none"), list[str]()
    delays.events.subscribe(lambda name, fields: seen.append(tenant.get()))

    async def go(name: str) -> None:
        tenant.set(name)
        await delays.aschedule_delay("mail", {}, 5)

    for name in ("acme", "umbrella"):
        run(go(name))
    assert seen == ["acme", "umbrella"]


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


def test_an_asynchronous_processor_awaits_the_twins(delays: DelayTasks) -> None:
    async def follow_up(body: Any) -> None:
        await delays.aschedule_delay("second", body, 60)

    delays.processor("first")(follow_up)
    assert run_now(delays, delays.schedule_delay("first", {"n": 1}, 0)).status is Status.DONE
    assert [task.body for task in delays.find(tag="second")] == [{"n": 1}]


@pytest.mark.parametrize("how", ["stop", "exit"])
def test_a_coroutine_that_stops_the_event_loop_stops_no_other_one(world: World, how: str) -> None:
    began = list[str]()

    async def exit_in_a_task() -> None:
        raise SystemExit

    @world.delays.processor("waits")
    async def waits(body: str) -> None:
        began.append(body)
        while len(began) < 2:
            await asyncio.sleep(0)
        if body == "stops" and how == "stop":
            asyncio.get_running_loop().stop()
        elif body == "stops":
            asyncio.create_task(exit_in_a_task())  # noqa: RUF006
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
            async with AsyncSession(engine) as session:
                await use(session)
                await session.rollback()
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


def test_threads_and_coroutines_wait_for_results(world: World, reads: list[int]) -> None:
    delays = world.delays
    delays.processor("sum", keep_result=True)(sum)
    delays.processor("fails")(lambda body: Fail("no"))
    tasks = [world.schedule("sum", [n, 1], key=str(n)) for n in range(3)]
    fails, far = world.schedule("fails", None), world.schedule(delay=60, key="k")
    reads.clear()

    async def go() -> list[Any]:
        in_thread = partial(asyncio.get_running_loop().run_in_executor, pool)
        by_key = partial(delays.result, tag="note", key="k", timeout="20s")
        waits: list[Any] = [in_thread(by_key)]
        waits += [asyncio.ensure_future(delays.aresult(tag="sum", key="1", timeout="20s"))]
        while not {tasks[1].id, far.id} <= {*reads}:
            await asyncio.sleep(0.01)  # a key has no task any more after the task has ended
        waits += [in_thread(delays.result, one, 20) for one in (*tasks, fails)]
        waits += [asyncio.ensure_future(delays.aresult(one, 20)) for one in (*tasks, fails)]
        together = asyncio.gather(*waits, return_exceptions=True)
        await asyncio.wait([together], timeout=0.1)
        assert not any(one.done() for one in waits), "they wait for tasks that have not ended"
        await in_thread(world.run, *tasks, fails)
        await in_thread(delays.cancel, far)
        return await together

    with ThreadPoolExecutor(6) as pool:
        cancelled, two, *ended = run(go())
    assert isinstance(cancelled, e.TaskCancelledError)
    assert str(cancelled).endswith("is CANCELLED")
    assert (cancelled.id, cancelled.status) == (far.id, Status.CANCELLED)
    assert two == 2
    for *results, failed in (ended[:4], ended[4:]):
        assert results == [1, 2, 3]
        assert isinstance(failed, e.TaskFailedError)
        assert (str(failed), failed.id) == (f"task {fails.id} (fails) is FAILED: no", fails.id)
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
