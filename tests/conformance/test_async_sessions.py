"""The asynchronous twins on the caller's session or connection."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
)
from sqlalchemy.orm import Session

from delaytasks import DelayTask, DelayTasks, Status
from delaytasks.core.errors import SessionUnusableError, TaskNotFoundError
from delaytasks.runtime import runtime_of
from tests.recording import (
    LIMIT_S,
    MOST_BLOCKED_S,
    RecordingTimer,
    WaitingTimer,
    engine_at,
    let_arm,
    own_threads,
    run,
    run_timed,
)
from tests.waiting import wait_until


def test_a_row_in_an_async_session_exists_and_is_armed_after_its_commit(
    delays: DelayTasks, timer: RecordingTimer, database_url: str
) -> None:
    async def go() -> None:
        async with engine_at(database_url) as engine, AsyncSession(engine) as session:
            await delays.aschedule_delay("mail", {}, 5, session=session)
            await session.rollback()
            assert len(await delays.afind()) == 0
            task = await delays.aschedule_delay("mail", {}, 5, session=session)
            async with session.begin_nested() as savepoint:
                await delays.aschedule_delay("mail", {}, 5, session=session)
                await savepoint.rollback()
            assert timer.ids == []
            await session.commit()
            assert timer.ids == [task.id]
            assert [found.id for found in (await delays.afind()).tasks] == [task.id]

    run(go())


def test_a_row_on_an_async_connection_exists_and_is_armed_after_its_commit(
    delays: DelayTasks, timer: RecordingTimer, database_url: str
) -> None:
    async def go() -> None:
        async with engine_at(database_url) as engine, engine.connect() as connection:
            await delays.aschedule_delay("mail", {}, 5, session=connection)
            await connection.rollback()
            task = await delays.aschedule_delay("mail", {}, 5, session=connection)
            assert (timer.ids, len(await delays.afind())) == ([], 0)
            await connection.commit()
            assert (timer.ids, len(await delays.afind())) == ([task.id], 1)

    run(go())


def test_calls_in_a_block_of_using_take_part_in_its_async_session(
    delays: DelayTasks, timer: RecordingTimer, database_url: str
) -> None:
    async def go() -> None:
        async with engine_at(database_url) as engine, AsyncSession(engine) as session:
            with delays.using(session):
                await delays.aschedule_delay("mail", {}, 5)
                await session.rollback()
                task = await delays.aschedule_delay("mail", {}, 5)
            assert (timer.ids, len(await delays.afind())) == ([], 0)
            await session.commit()
            assert (timer.ids, len(await delays.afind())) == ([task.id], 1)

    run(go())


def test_each_method_with_a_session_works_on_an_async_session(
    delays: DelayTasks, timer: RecordingTimer, database_url: str
) -> None:
    async def use(session: Any) -> None:
        first = await delays.aschedule_delay("mail", {}, 3600, key="a", session=session)
        assert await delays.aschedule_many([("mail", {}, 3600)] * 3, session=session) == 3
        moved = await delays.areschedule(first, 60, session=session)
        assert moved.expected_time < first.expected_time
        assert await delays.atouch(tag="mail", key="a", delay=90, session=session)
        touched = await delays.atouch_many(tag="mail", keys=["a", "b"], delay=95, session=session)
        assert touched.gone == ["b"]
        assert await delays.acancel(tag="mail", key="a", session=session)
        assert (await delays.aget(first.id, session=session)).status is Status.CANCELLED
        assert (await delays.arerun(first.id, 60, session=session)).id == first.id
        assert await delays.aattempts(first.id, session=session) == []
        assert len(await delays.afind(tag="mail", session=session)) == 4
        with pytest.raises(TaskNotFoundError):
            await delays.aget(1, session=session)
        assert len(await delays.afind(tag="mail")) == 0

    async def go() -> None:
        async with engine_at(database_url) as engine:
            async with AsyncSession(engine) as session:
                await use(session)
                await session.rollback()
            async with engine.connect() as connection:
                await use(connection)
            scoped = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)
            await use(scoped)
            await scoped.remove()

    run(go())


def test_aiomysql_works_as_asyncmy_does(
    delays: DelayTasks, timer: RecordingTimer, database_url: str
) -> None:
    if not database_url.startswith("mysql"):
        pytest.skip("a driver of MySQL")

    async def go() -> None:
        async with (
            engine_at(database_url, "aiomysql") as engine,
            AsyncSession(engine) as session,
            session.begin(),
        ):
            task = await delays.aschedule_delay("mail", {}, 5, key="a", session=session)
        assert timer.ids == [task.id]

    run(go())


def test_a_session_that_is_not_asynchronous_is_refused_with_the_remedy(
    delays: DelayTasks, timer: RecordingTimer, database_url: str
) -> None:
    async def go() -> None:
        with (
            Session(runtime_of(delays).store.database.tx) as session,
            pytest.raises(SessionUnusableError, match="call the synchronous method"),
        ):
            await delays.aschedule_delay("mail", {}, 5, session=session)
        async with engine_at(database_url) as engine:
            for wrong in (engine, AsyncConnection(engine)):
                with pytest.raises(SessionUnusableError):
                    await delays.aschedule_delay("mail", {}, 5, session=wrong)

    run(go())


def test_the_event_loop_continues_while_a_committed_task_is_armed(
    delays: DelayTasks, waiting_timer: WaitingTimer, database_url: str
) -> None:
    async def go() -> None:
        async with engine_at(database_url) as engine, AsyncSession(engine) as session:
            task = await delays.aschedule_delay("mail", {}, 5, session=session)
            await let_arm(waiting_timer, session.commit())
        assert waiting_timer.ids == [task.id]

    run(go())


def test_a_commit_that_is_cancelled_while_its_task_is_sent_has_committed(
    delays: DelayTasks, waiting_timer: WaitingTimer, database_url: str
) -> None:
    async def schedule(engine: AsyncEngine) -> None:
        async with AsyncSession(engine) as session, session.begin():
            await delays.aschedule_delay("mail", {}, 5, session=session)

    async def go() -> None:
        async with engine_at(database_url) as engine:
            task = asyncio.create_task(schedule(engine))
            while not waiting_timer.is_arming.is_set():
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            waiting_timer.loop_goes_on.set()
            assert len(await delays.afind()) == 1
            waiting_timer.is_arming.clear()
            await schedule(engine)  # the engine can still be used

    run(go())
    wait_until(lambda: len(waiting_timer.ids) == 2, LIMIT_S, "both tasks to be armed")


@pytest.mark.slow
def test_five_hundred_calls_on_sessions_do_not_block_the_event_loop(
    delays: DelayTasks,
    timer: RecordingTimer,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = own_threads(delays)

    async def one(engine: AsyncEngine, n: int) -> DelayTask:
        async with AsyncSession(engine) as session:
            task = await delays.aschedule_delay("mail", {"n": n}, 5, session=session)
            await session.commit()
            return task

    async def go(took: list[float]) -> list[DelayTask]:
        async with engine_at(database_url) as engine:
            first = await one(engine, 0)  # SQLAlchemy connects, and compiles the statement
            took.clear()
            return [first, *await asyncio.gather(*(one(engine, n) for n in range(500)))]

    tasks, longest_s = run_timed(monkeypatch, go)
    assert sorted(timer.ids) == sorted(task.id for task in tasks)
    assert threading.get_ident() not in seen
    assert longest_s < MOST_BLOCKED_S


def test_the_engine_of_a_test_that_fails_is_closed(database_url: str) -> None:
    """Otherwise the garbage collector reports its connections in another test."""
    engines: list[AsyncEngine] = []

    async def fail() -> None:
        async with engine_at(database_url) as engine:
            engines.append(engine)
            async with engine.connect():
                pass
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(fail())
    pool: Any = engines[0].sync_engine.pool
    assert pool.checkedin() == 0
