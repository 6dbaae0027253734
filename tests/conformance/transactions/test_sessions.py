"""Rows that are written in a session, or in an asynchronous one."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from delaytasks import DelayTask, NewTask
from delaytasks.core.clock import to_us
from delaytasks.core.errors import (
    SessionUnusableError,
)
from delaytasks.runtime import runtime_of
from delaytasks.storage.store import Store
from tests.conformance.transactions.shop import SessionCaller
from tests.recording import delays_on, record


def test_a_row_is_seen_and_armed_after_the_commit_and_its_id_known_before(
    shop: SessionCaller,
) -> None:
    with shop.session() as session:
        task = shop.schedule(session)
        many: list[DelayTask] = []
        shop.delays.schedule_many(
            [("mail", n, 5) for n in range(3)], session=session, on_batch=many.extend
        )
        assert task.id
        assert shop.delays.get(task, session=session).body == {"n": 1}
        assert (shop.seen(), shop.timer.ids) == (set(), [])
        session.commit()
        ids = [task.id, *(one.id for one in many)]
        assert (shop.seen(), shop.timer.ids) == (set(ids), ids)


def test_a_session_can_be_used_for_the_next_transaction(shop: SessionCaller) -> None:
    with shop.session() as session:
        first = shop.schedule(session)
        session.rollback()
        second = shop.schedule(session)
        session.commit()
        third = shop.schedule(session)
        session.commit()
        session.commit()
    assert shop.seen() == {second.id, third.id}
    assert shop.timer.ids == [second.id, third.id]
    assert first.id not in shop.seen()


def test_a_scoped_session_is_taken_for_the_session_it_stands_for(shop: SessionCaller) -> None:
    scope = scoped_session(sessionmaker(shop.engine))
    rolled_back = shop.schedule(scope)
    scope.rollback()
    task = shop.schedule(scope)
    scope.commit()
    scope.remove()
    assert (shop.seen(), shop.timer.ids) == ({task.id}, [task.id])
    assert rolled_back.id != task.id


def end_by_rollback(session: Session) -> None:
    session.rollback()


def end_by_close(session: Session) -> None:
    session.close()


def end_by_reset(session: Session) -> None:
    session.reset()


def end_by_invalidation(session: Session) -> None:
    session.invalidate()


def end_by_losing_the_connection(session: Session) -> None:
    session.connection().invalidate()
    session.rollback()


ENDS = [
    end_by_rollback,
    end_by_close,
    end_by_reset,
    end_by_invalidation,
    end_by_losing_the_connection,
]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_without_a_commit_there_is_no_row_and_nothing_is_armed(
    shop: SessionCaller, end: Callable[[Session], None]
) -> None:
    session = shop.session()
    shop.schedule(session)
    shop.schedule(session, key="k")
    shop.delays.schedule_many([("mail", {}, 5), NewTask("mail", {}, 5, key="l")], session=session)
    end(session)
    session.commit()
    session.close()
    assert (shop.seen(), shop.keys(), shop.timer.ids) == (set(), 0, [])


def test_an_exception_in_the_callers_block_undoes_what_it_scheduled(shop: SessionCaller) -> None:
    def buy() -> None:
        with shop.session() as session, session.begin():
            shop.schedule(session)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        buy()
    assert (shop.seen(), shop.timer.ids) == (set(), [])


def test_a_flush_that_fails_undoes_what_was_scheduled(shop: SessionCaller) -> None:
    with shop.session() as session:
        shop.schedule(session)
        with pytest.raises(Exception, match="no_such_table"):
            session.execute(text("INSERT INTO no_such_table VALUES (1)"))
        session.rollback()
        session.commit()
    assert (shop.seen(), shop.timer.ids) == (set(), [])


def test_a_savepoint_rolled_back_in_a_session_leaves_no_row_and_arms_nothing(
    shop: SessionCaller,
) -> None:
    with shop.session() as session:
        before = shop.schedule(session)
        with suppress(ZeroDivisionError), session.begin_nested():
            shop.schedule(session)
            raise ZeroDivisionError
        with session.begin_nested():
            kept = shop.schedule(session, delay=0)
        nested = session.begin_nested()
        shop.schedule(session)
        nested.rollback()
        after = shop.schedule(session)
        assert shop.timer.ids == [], "the end of a savepoint is not the commit"
        session.commit()
    ids = [before.id, kept.id, after.id]
    assert (shop.seen(), shop.timer.ids) == (set(ids), ids)
    assert shop.timer.armed[1].due_us == to_us(kept.expected_time), (
        "a session tells of the commit after it"
    )


def test_rolling_back_an_outer_savepoint_includes_the_inner_ones(shop: SessionCaller) -> None:
    with shop.session() as session:
        with session.begin_nested() as outer:
            shop.schedule(session)
            with session.begin_nested():
                shop.schedule(session, key="k")
                with session.begin_nested():
                    shop.delays.schedule_many([("mail", {}, 5)], session=session)
            outer.rollback()
        kept = shop.schedule(session, key="k")
        session.commit()
    assert (shop.seen(), shop.timer.ids, shop.keys()) == ({kept.id}, [kept.id], 1)


def test_rolling_back_an_inner_savepoint_undoes_only_its_own_tasks(shop: SessionCaller) -> None:
    with shop.session() as session:
        with session.begin_nested():
            outer = shop.schedule(session)
            inner = session.begin_nested()
            shop.schedule(session)
            inner.rollback()
        session.commit()
    assert (shop.seen(), shop.timer.ids) == ({outer.id}, [outer.id])


def test_a_session_joined_to_an_outer_transaction_arms_after_the_outer_commit(
    shop: SessionCaller,
) -> None:
    with shop.joined() as (connection, session):
        shop.schedule(session)
        session.commit()
        assert shop.timer.ids == []
        connection.get_transaction().rollback()  # type: ignore[union-attr]
    assert (shop.seen(), shop.timer.ids) == (set(), [])

    with shop.joined() as (connection, session):
        task = shop.schedule(session)
        session.commit()
        shop.schedule(session)
        session.rollback()
        connection.commit()
    assert (shop.seen(), shop.timer.ids) == ({task.id}, [task.id])


def test_two_interleaved_sessions_keep_their_tasks_separate(shop: SessionCaller) -> None:
    one, other = shop.session(), shop.session()
    first = shop.schedule(one)
    if shop.engine.dialect.name != "sqlite":  # SQLite has one writer at a time
        shop.schedule(other)
    other.rollback()
    one.commit()
    second = shop.schedule(other)
    one.rollback()
    other.commit()
    assert shop.timer.ids == [first.id, second.id]
    one.close()
    other.close()


def test_far_tasks_are_not_armed_at_the_commit(shop: SessionCaller) -> None:
    with shop.session() as session:
        shop.schedule(session, delay=3600)
        session.commit()
    assert shop.timer.ids == []


@pytest.mark.slow
@pytest.mark.parametrize("on", ["session", "connection"])
def test_many_far_tasks_are_not_held_in_memory_until_the_commit(
    shop: SessionCaller, on: str
) -> None:
    with shop.session() if on == "session" else shop.engine.connect() as caller:
        assert (
            shop.delays.schedule_many((("far", n, 86_400) for n in range(20)), session=caller) == 20
        )
        gc.collect()
        assert not [it for it in gc.get_objects() if type(it) is DelayTask and it.tag == "far"]
        caller.commit()
    assert len(shop.seen()) == 20


def test_a_task_that_comes_within_the_horizon_before_the_commit_is_armed_at_it(
    shop: SessionCaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shop.session() as session:
        task = shop.schedule(session, delay=600)
        clock = runtime_of(shop.delays).clock
        later_us = clock.now_us() + 590_000_000
        monkeypatch.setattr(clock, "now_us", lambda: later_us)
        session.commit()
    assert shop.timer.ids == [task.id]


# -- asyncio -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_an_async_session_is_given_as_its_sync_session(store: Store, database_url: str) -> None:
    if not database_url.startswith("sqlite"):
        pytest.skip("the async driver in the test extra is SQLite's")
    aio = pytest.importorskip("sqlalchemy.ext.asyncio")
    delays = delays_on(database_url, table_prefix="s_")
    timer = record(delays)

    def schedule(session: Any) -> DelayTask:
        return delays.schedule_delay("mail", {}, 5, session=session)

    async def go() -> tuple[DelayTask, DelayTask, DelayTask]:
        engine = aio.create_async_engine(database_url.replace("sqlite:", "sqlite+aiosqlite:"))
        async with aio.AsyncSession(engine) as session:
            await session.run_sync(schedule)
            await session.rollback()
            first = await session.run_sync(schedule)
            second = await session.run_sync(lambda _: schedule(session))  # the AsyncSession itself
            await session.run_sync(lambda s: delays.schedule_many([("mail", {}, 5)], session=s))
            assert timer.ids == []
            await session.commit()
            # Outside of run_sync no driver can wait, and the error message explains this.
            for given in (session, session.sync_session):
                with pytest.raises(SessionUnusableError, match=r"await delays\.aschedule_delay\("):
                    schedule(given)
            gc.collect()  # unawaited coroutines cause warnings here
            await session.rollback()
        async with engine.connect() as connection:
            third = await connection.run_sync(schedule)
            await connection.run_sync(lambda _: schedule(connection))
            await connection.commit()
            with pytest.raises(SessionUnusableError, match=r"await delays\.aschedule_delay"):
                schedule(connection)
        await engine.dispose()
        return first, second, third

    first, second, third = asyncio.run(go())
    assert timer.ids[:2] == [first.id, second.id]
    assert timer.ids[3] == third.id
    assert len(timer.ids) == 5
    assert len(delays.find()) == 5
    delays.close()
