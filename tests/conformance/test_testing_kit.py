"""The testing kit, on every database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import time_machine
from celery import Celery
from sqlalchemy import Column, Integer, MetaData, Table, create_engine, insert, select, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session, sessionmaker

import delaytasks as e
from delaytasks import DelayTasks
from delaytasks.testing import DelaysTester, create_tables
from tests.conformance.test_transactions import own_engine
from tests.world import World
from tests.world.recording import engine_at, run

Start = Callable[..., DelaysTester]
Sessions = sessionmaker[Session]


class Shop:
    """A project whose processors note what they did."""

    def __init__(self, url: str) -> None:
        #: Nothing listens at this address: a test that contacts the broker fails.
        app = Celery("shop", broker="amqp://localhost:1//", set_as_current=False)
        app.conf.update(broker_connection_retry=False, broker_connection_timeout=0.1)
        self.celery = app
        self.delays = DelayTasks(app, url, table_prefix="s_")
        self.noted: list[Any] = []
        #: The errors that the next runs of `order.pay` and `order.bill` raise.
        self.errors: list[Exception] = []
        self.delays.processor("order.close")(self.noted.append)
        self.delays.processor("order.pay", retries="1m 5m")(self._pay)
        self.delays.processor("order.bill")(self._pay)

    def _pay(self, body: Any) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.noted.append(body)


@pytest.fixture
def shop(world: World, database_url: str) -> Iterator[Shop]:
    made = Shop(database_url)
    yield made
    made.delays.close()


@pytest.fixture
def start(shop: Shop) -> Iterator[Start]:
    """Start testers of the shop, which the test need not stop."""
    with ExitStack() as started:
        yield lambda **options: started.enter_context(DelaysTester(shop.delays, **options))


@pytest.fixture
def tester(start: Start) -> DelaysTester:
    return start()


# A tester finds scheduled tasks. The integration tests of docs/testing.md show differences and
# errors, and use a tester with each framework


def test_a_task_is_found_by_each_of_its_values(shop: Shop, tester: DelaysTester) -> None:
    of: Any = {"key": "7", "queue": "q", "priority": 3, "meta": {"tenant": "a"}}
    task = shop.delays.schedule_delay("order.close", {"order": 7}, "30m", **of)
    found = tester.assert_scheduled("order.close", body={"order": mock.ANY}, within="30m", **of)
    assert found.id == tester.assert_scheduled("order.close", at=task.due).id == task.id
    others: Any = {"key": "8", "queue": "r", "priority": 4, "within": "20m", "at": NEW_YEAR}
    for name, other in (others | {"body": {"order": 8}, "meta": {}}).items():
        with pytest.raises(AssertionError, match=f"{name}: expected "):
            tester.assert_scheduled("order.close", **{name: other})
    tester.assert_not_scheduled("order.close", key="8")
    with pytest.raises(AssertionError, match=r"key='7' body=\{'order': 7\}"):
        tester.assert_not_scheduled("order.close", key="7")


# A tester replaces parts of an instance and restores them afterwards


NEW_YEAR = datetime(2031, 1, 1, tzinfo=timezone.utc)


def test_time_travels_forward_and_back_until_the_tester_is_stopped(shop: Shop) -> None:
    before = shop.delays._runtime
    with DelaysTester(shop.delays) as tester:
        tester.travel_to(NEW_YEAR)
        task = shop.delays.schedule_delay("order.close", 1, "1h")
        assert timedelta(0) <= task.due - NEW_YEAR - timedelta(hours=1) < timedelta(minutes=1)
        tester.travel_to(NEW_YEAR - timedelta(days=1))
        tester.fast_forward("1h")
        assert shop.noted == []
        tester.travel_to(NEW_YEAR + timedelta(hours=2))
        tester.run_due()
        assert shop.noted == [1]
        assert shop.delays.get(task.id).update_time > NEW_YEAR  # type: ignore[operator]
    assert shop.delays._runtime is before
    assert shop.delays.schedule_delay("order.close", 1, "1h").due < NEW_YEAR
    with pytest.raises(RuntimeError, match="not started"):
        tester.run_due()


def test_a_library_sets_the_time_and_moves_it(shop: Shop) -> None:
    """docs/testing.md does this with freezegun."""
    with time_machine.travel(NEW_YEAR, tick=False) as frozen, DelaysTester(shop.delays) as tester:
        seen = []
        shop.delays.processor("look")(lambda body: seen.append(datetime.now(timezone.utc)))
        task = shop.delays.schedule_delay("look", 1, "1h")
        assert task.due == NEW_YEAR + timedelta(hours=1)
        frozen.move_to(NEW_YEAR + timedelta(hours=2))
        tester.run_due()
        assert seen == [tester.now] == [NEW_YEAR + timedelta(hours=2)]


def test_live_tasks_of_before_are_refused_in_the_database_of_the_test(tmp_path: Path) -> None:
    """They are those of a running application, whose tasks a test must not run."""
    url = f"sqlite:///{tmp_path}/shop.sqlite3"
    shop, own = Shop(url), create_engine(url)
    with own.begin() as connection:
        create_tables(connection, shop.delays)
    shop.delays.schedule_delay("order.close", 7, "30m")
    with own.begin() as link:
        link.execute(text("UPDATE s_yb_delay_task_message SET create_time = '2026-01-01 00:00:00'"))
    with DelaysTester(shop.delays) as tester:
        for run_tasks in (tester.run_due, lambda: tester.fast_forward("1h")):
            with pytest.raises(e.ConfigError, match=r"tag 'order.close'.*database of their own"):
                run_tasks()
        tester.clear()
        shop.delays.schedule_delay("order.close", 9, "30m")
        tester.fast_forward("1h")
    assert shop.noted == [9]
    shop.delays.close()
    own.dispose()


def test_what_would_be_sent_is_checked_and_kept(shop: Shop, tester: DelaysTester) -> None:
    with pytest.raises(e.ForbiddenURLError):
        shop.delays.callbacks.post("http://localhost/", 1, 60)
    shop.delays.callbacks.post("https://1.1.1.1/paid", {"order": 7}, 60)
    shop.delays.callbacks.publish("invoices", {"order": 7}, 60)
    tester.fast_forward("20m")
    assert [sent.url for sent in tester.sent_callbacks] == ["https://1.1.1.1/paid"]
    assert [(sent.to, sent.body) for sent in tester.sent_messages] == [("invoices", {"order": 7})]


# A tester runs tasks in the order of their due times


def test_each_task_runs_at_its_due_time_with_its_retries_and_new_tasks_and_in_recurrence(
    shop: Shop, tester: DelaysTester
) -> None:
    delays = shop.delays
    delays.processor("chain")(lambda body: delays.schedule_delay("order.pay", body, 60) and None)
    shop.errors = [ValueError("first"), ValueError("second")]
    delays.schedule_delay("chain", 7, 60)
    for minutes in (20, 5):
        delays.schedule_delay("order.close", minutes, minutes * 60, queue=f"q{minutes}")
    runs = tester.fast_forward("30m")
    tags = ["chain", "order.pay", "order.pay", "order.close", "order.pay", "order.close"]
    assert [run.task.tag for run in runs] == tags
    assert [str(run.error) for run in runs if run.error] == ["first", "second"]
    assert all(timedelta(0) <= run.at - run.task.due < timedelta(seconds=30) for run in runs)
    assert shop.noted == [5, 7, 20]
    delays.recurring(every="1h")(delays.processor("order.count")(lambda body: None))
    runs = tester.fast_forward("1d")
    assert len(runs) in (23, 24)
    gaps = {round((second.at - first.at).total_seconds() / 60) for first, second in pairwise(runs)}
    assert gaps == {60}


def test_paused_tasks_wait_until_the_pause_ends(shop: Shop, tester: DelaysTester) -> None:
    shop.delays.policies.pause(tag="order.close", until="1h")
    shop.delays.schedule_delay("order.close", 1, 60)
    assert tester.fast_forward("59m") == []
    [run] = tester.fast_forward("1h")
    assert timedelta(minutes=58) < run.at - run.task.expected_time < timedelta(minutes=60)


# -- errors ---------------------------------------------------------------------------------------


def test_a_task_without_a_processor_is_an_error(shop: Shop, tester: DelaysTester) -> None:
    shop.delays.processor("gone")(shop.noted.append)
    shop.delays.schedule_delay("gone", 1, 60)
    del shop.delays._registry._processors["gone"]
    another = r"tag=gone.*; if the task is of another application, give the tests a database"
    with pytest.raises(e.UnknownTagError, match=another):
        tester.fast_forward("1d")


def test_a_task_that_schedules_itself_forever_is_an_error(shop: Shop, tester: DelaysTester) -> None:
    shop.delays.processor("loop")(lambda body: shop.delays.schedule_delay("loop", 1, 0) and None)
    shop.delays.schedule_delay("loop", 1, 0)
    again = pytest.raises(AssertionError, match="schedule its own task again")
    with mock.patch("delaytasks.testing.tester.MAX_RUNS", 20), again:
        tester.run_due()


# A tester inside the test's own transaction, which is rolled back at the end


orders = Table("s_orders", MetaData(), Column("id", Integer, primary_key=True))


@pytest.fixture
def connection(shop: Shop, database_url: str) -> Iterator[Any]:
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
def sessions(connection: Any) -> Sessions:
    return sessionmaker(connection, join_transaction_mode="create_savepoint")


@pytest.fixture
def bound(connection: Any, start: Start) -> DelaysTester:
    return start(bind=connection)


def place(shop: Shop, sessions: Sessions, number: int, **options: Any) -> None:
    """Write an order and the task that closes it."""
    with sessions.begin() as session:
        session.execute(insert(orders).values(id=number))
        shop.delays.schedule_delay("order.close", number, 1800, session=session, **options)


def test_tasks_run_in_the_transaction_of_the_test(
    shop: Shop, sessions: Sessions, bound: DelaysTester, world: World, connection: Any
) -> None:
    def cancel(body: Any) -> None:
        with sessions.begin() as session:
            session.execute(insert(orders).values(id=body))  # exists already

    shop.delays.processor("order.cancel", retries="1m")(cancel)
    place(shop, sessions, 7, key="7")
    bound.assert_scheduled("order.close", key="7", body=7, within="30m")
    shop.delays.schedule_delay("order.close", 8, 60, key="8")  # a call without a session
    for number in (7, 8):
        shop.delays.schedule_delay("order.cancel", number, 0)
    [failed, succeeded] = bound.run_due(raises=False)
    assert (failed.outcome, succeeded.outcome) == ("schedule_retry", "succeed")
    with sessions() as session:
        assert sorted(session.execute(select(orders.c.id)).scalars()) == [7, 8]
    shop.delays.policies.set(tag="order.close", rate="6/m")
    shop.delays.schedule_delay("order.close", 9, 60, key="8", on_conflict="replace")
    bound.fast_forward("30m", raises=False)
    assert (shop.noted, bound.scheduled()) == ([9, 7], [])
    connection.rollback()
    assert sum(world.counted().values()) == 0


def test_coroutines_run_in_the_loop_of_a_test(shop: Shop, world: World, database_url: str) -> None:
    async def close(body: Any) -> None:
        async with AsyncSession(connection, join_transaction_mode="create_savepoint") as session:
            await session.execute(insert(orders).values(id=body))
            await session.commit()

    shop.delays.processor("order.async")(close)
    connection: AsyncConnection

    async def go() -> None:
        nonlocal connection
        async with engine_at(database_url) as engine, engine.connect() as connection:
            await connection.begin()
            await connection.run_sync(orders.metadata.create_all)
            with DelaysTester(shop.delays, bind=connection) as bound:
                await shop.delays.aschedule_delay("order.async", 7, 60)
                await shop.delays.aschedule_delay("order.close", 8, 60)
                await bound.aassert_scheduled("order.async", body=7, within="1m")
                await bound.afast_forward("2m")
                with pytest.raises(e.SessionUnusableError, match="such as arun_due"):
                    bound.run_due()
            assert shop.noted == [8]
            assert (await connection.execute(select(orders.c.id))).scalar_one() == 7
            await connection.rollback()
        async with engine_at(database_url) as engine, engine.begin() as own:
            await own.run_sync(orders.metadata.drop_all)
        assert sum(world.counted().values()) == 0

    run(go())
