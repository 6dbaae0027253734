"""A tester inside the test's own transaction, which is rolled back at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Column, Integer, MetaData, Table, create_engine, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import StaticPool

from delaytasks import DelayTasks
from delaytasks.core.errors import ConfigError, SessionUnusableError, StoreError
from delaytasks.storage.store import Store
from delaytasks.testing import DelaysTester
from tests.conformance.testing_kit.conftest import KitShop
from tests.conformance.transactions.shop import own_engine
from tests.recording import engine_at, run

orders = Table("s_orders", MetaData(), Column("id", Integer, primary_key=True))


@pytest.fixture
def connection(shop: KitShop, database_url: str) -> Iterator[Any]:
    """A connection with a transaction of the test, and a table of the project in it."""
    engine = own_engine(database_url)
    orders.metadata.create_all(engine)
    with engine.connect() as connection:
        connection.begin()
        yield connection
        connection.rollback()
    orders.metadata.drop_all(engine)
    engine.dispose()


@pytest.fixture
def sessions(connection: Any) -> sessionmaker[Session]:
    return sessionmaker(connection, join_transaction_mode="create_savepoint")


@pytest.fixture
def tester(connection: Any, start: Callable[..., DelaysTester]) -> DelaysTester:
    return start(bind=connection)


def count(store: Store) -> int:
    """Return the number of rows that other transactions see."""
    with store.database.begin() as own:
        return len(own.execute(select(store.schema.tasks.c.id)).all())


def place(shop: KitShop, sessions: sessionmaker[Session], number: int, **options: Any) -> None:
    """Write an order and the task that closes it."""
    with sessions.begin() as session:
        session.execute(insert(orders).values(id=number))
        shop.delays.schedule_delay("order.close", number, 1800, session=session, **options)


def test_tasks_of_a_session_run_in_the_transaction_of_the_test(
    shop: KitShop, sessions: sessionmaker[Session], tester: DelaysTester, store: Store
) -> None:
    place(shop, sessions, 7, key="7")
    tester.assert_scheduled("order.close", key="7", body=7, within="30m")
    tester.fast_forward("30m")
    assert (shop.noted, tester.scheduled()) == ([7], [])
    if store.database.url.get_backend_name() != "sqlite":  # which lets no other transaction read
        assert count(store) == 0


def test_a_call_without_a_session_is_in_the_transaction_of_the_test_too(
    shop: KitShop, tester: DelaysTester, store: Store, connection: Any
) -> None:
    shop.delays.schedule_delay("order.close", 7, 60, key="7")
    shop.delays.schedule_many([("order.pay", number, 60) for number in range(3)])
    tester.fast_forward("1m")
    assert sorted(shop.noted) == [0, 1, 2, 7]
    connection.rollback()
    assert count(store) == 0


def test_the_rollback_of_a_session_takes_its_task_with_it(
    shop: KitShop, sessions: sessionmaker[Session], tester: DelaysTester
) -> None:
    with sessions() as session:
        shop.delays.schedule_delay("order.close", 7, 60, session=session)
        session.rollback()
    tester.assert_not_scheduled("order.close")


def test_a_processor_has_sessions_of_its_own_and_its_failure_undoes_only_them(
    shop: KitShop, sessions: sessionmaker[Session], tester: DelaysTester
) -> None:
    def cancel(body: Any) -> None:
        with sessions.begin() as session:
            session.execute(insert(orders).values(id=body))  # exists already

    shop.delays.processor("order.cancel", retries="1m")(cancel)
    place(shop, sessions, 7)
    shop.delays.schedule_delay("order.cancel", 7, 0)
    shop.delays.schedule_delay("order.cancel", 8, 0)
    [failed, succeeded] = tester.run_due(raises=False)
    assert (failed.outcome, succeeded.outcome) == ("schedule_retry", "succeed")
    with sessions() as session:
        assert sorted(session.execute(select(orders.c.id)).scalars()) == [7, 8]
    tester.assert_scheduled("order.cancel", body=7, within="1m")


def test_the_session_of_a_test_may_be_bound(
    shop: KitShop, sessions: sessionmaker[Session], start: Callable[..., DelaysTester]
) -> None:
    for bind in (sessions(), scoped_session(sessions)):
        tester = start(bind=bind)
        place(shop, sessions, 7 + len(shop.noted))
        tester.fast_forward("30m")
        tester.stop()
    assert shop.noted == [7, 8]


def test_a_task_runs_inline_when_its_session_commits(
    shop: KitShop,
    connection: Any,
    sessions: sessionmaker[Session],
    start: Callable[..., DelaysTester],
) -> None:
    start(bind=connection, run_inline=True)
    with sessions() as session:
        shop.delays.schedule_delay("order.close", 7, 1800, session=session)
        assert shop.noted == []
        session.commit()
        assert shop.noted == [7]
        shop.delays.schedule_delay("order.close", 8, 1800, session=session)
        session.rollback()
    assert shop.noted == [7]


def test_limits_keys_and_recurring_schedules_work_in_the_transaction_of_the_test(
    shop: KitShop, tester: DelaysTester
) -> None:
    shop.delays.set_policy(tag="order.close", concurrency=1)
    for number in range(3):
        shop.delays.schedule_delay("order.close", number, 0, key=str(number))
    shop.delays.schedule_delay("order.close", 1, 0, key="1", on_conflict="keep")
    shop.delays.schedule_delay("order.close", 9, 60, key="1", on_conflict="replace")
    shop.delays.recurring.set("hourly", "order.pay", "hour", every="1h")
    tester.fast_forward("90m")
    assert [one for one in shop.noted if one != "hour"] == [0, 2, 9]
    assert "hour" in shop.noted


# -- asynchronous ---------------------------------------------------------------------------------


def test_an_async_session_schedules_and_coroutines_run_in_the_loop_of_the_test(
    shop: KitShop, store: Store, database_url: str
) -> None:
    async def close(body: Any) -> None:
        async with session_of_test() as session:
            await session.execute(insert(orders).values(id=body))
            await session.commit()
        shop.noted.append(body)

    shop.delays.processor("order.async")(close)
    connection: AsyncConnection

    def session_of_test() -> AsyncSession:
        return AsyncSession(connection, join_transaction_mode="create_savepoint")

    async def go() -> None:
        nonlocal connection
        async with engine_at(database_url) as engine, engine.connect() as connection:
            await connection.begin()
            await connection.run_sync(orders.metadata.create_all)
            with DelaysTester(shop.delays, bind=connection) as tester:
                async with session_of_test() as session:
                    await shop.delays.aschedule_delay("order.async", 7, 60, session=session)
                    await session.commit()
                await shop.delays.aschedule_delay("order.close", 8, 60)
                await tester.aassert_scheduled("order.async", body=7, within="1m")
                await tester.aassert_not_scheduled("order.async", body=8)
                assert len(await tester.ascheduled()) == 2
                await tester.afast_forward("2m")
                assert await tester.arun_due() == []
            assert sorted(shop.noted) == [7, 8]
            async with session_of_test() as session:
                assert (await session.execute(select(orders.c.id))).scalar_one() == 7
            await connection.rollback()
        async with engine_at(database_url) as engine, engine.begin() as own:
            await own.run_sync(orders.metadata.drop_all)
        assert count(store) == 0

    run(go())


def test_an_async_test_may_commit(shop: KitShop, tester_of_settings: DelaysTester) -> None:
    async def go() -> None:
        await shop.delays.aschedule_delay("order.mail", 7, 60)
        await tester_of_settings.afast_forward("1m")

    run(go())
    assert shop.noted == [("mail", 7)]


@pytest.fixture
def tester_of_settings(start: Callable[..., DelaysTester]) -> DelaysTester:
    return start()


# -- other binds ----------------------------------------------------------------------------------


def test_a_database_in_memory_is_bound_by_its_engine() -> None:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    with engine.begin() as connection:
        delays = DelayTasks(Celery("shop", set_as_current=False), "sqlite://")
        delays.create_tables(connection)
    noted: list[Any] = []
    delays.processor("order.close")(noted.append)
    with DelaysTester(delays, bind=engine) as tester:
        delays.schedule_delay("order.close", 7, 60)
        tester.fast_forward("1m")
    assert noted == [7]
    engine.dispose()


def test_other_objects_cannot_be_bound(shop: KitShop) -> None:
    with pytest.raises(ConfigError, match="Engine, Connection or Session"):
        DelaysTester(shop.delays, bind="sqlite://")


def test_missing_tables_are_made_by_a_call_in_the_test() -> None:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    delays = DelayTasks(Celery("shop", set_as_current=False), "sqlite:///elsewhere.sqlite3")
    remedy = r"call create_tables\(connection\) of the DelayTasks in the test, or run: delaytasks"
    with DelaysTester(delays, bind=engine), Session(engine) as session:
        for error, options in ((StoreError, {}), (SessionUnusableError, {"session": session})):
            with pytest.raises(error, match=f"; {remedy}") as raised:
                delays.schedule_delay("order.close", 7, 60, **options)
            assert type(raised.value) is error
    engine.dispose()
