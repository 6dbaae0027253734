"""The testing kit, on every database."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import time_machine
from celery import Celery
from freezegun import freeze_time
from sqlalchemy import Column, Integer, MetaData, Table, create_engine, insert, select, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import StaticPool

import delaytasks as e
from delaytasks import Cancel, DelayTasks, Fail
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


# A tester finds scheduled tasks and describes differences


DIFFERENCES: list[tuple[dict[str, Any], str]] = [
    ({"key": "8"}, "key: expected '8', got '7'"),
    ({"body": {"order": 8}}, "body: expected {'order': 8}, got {'order': 7}"),
    ({"queue": "r"}, "queue: expected 'r', got 'q'"),
    ({"within": "20m"}, "within: expected 20m, got in "),
    ({"at": datetime(2099, 1, 1, tzinfo=timezone.utc)}, "at: expected datetime.datetime(2099"),
]


def test_a_task_is_found_by_each_of_its_values(shop: Shop, tester: DelaysTester) -> None:
    of: Any = {"key": "7", "queue": "q", "priority": 3, "meta": {"tenant": "a"}}
    task = shop.delays.schedule_delay("order.close", {"order": 7}, "30m", **of)
    found = tester.assert_scheduled("order.close", body={"order": mock.ANY}, within="30m", **of)
    assert found.id == task.id
    tester.assert_scheduled("order.close", at=task.due)
    tester.assert_scheduled("order.close", within=timedelta(hours=1))
    assert [one.id for one in tester.scheduled("order.close", key="7")] == [task.id]
    assert tester.scheduled("order.close", key="8") == []
    for expected, line in DIFFERENCES:
        with pytest.raises(AssertionError, match=re.escape(line)):
            tester.assert_scheduled("order.close", **expected)
    shop.delays.schedule_delay("order.close", {"order": 1}, "10m", key="1")
    with pytest.raises(AssertionError) as raised:
        tester.assert_scheduled("order.close", key="7", body={"order": 3})
    text = str(raised.value)
    first, second = "key='7' body={'order': 7}", "key='1' body={'order': 1}"
    assert text.index(first) < text.index(second), "the most similar task comes first"


def test_a_task_that_should_not_wait_is_shown(shop: Shop, tester: DelaysTester) -> None:
    tester.assert_not_scheduled("order.close")
    shop.delays.schedule_delay("order.close", {"order": 7}, 60, key="7")
    tester.assert_not_scheduled("order.close", key="8")
    with pytest.raises(AssertionError, match=r"key='7' body=\{'order': 7\}"):
        tester.assert_not_scheduled("order.close", key="7")
    tester.fast_forward("1m")
    tester.assert_not_scheduled("order.close")
    assert len(tester.scheduled("order.close", status="DONE")) == 1


# A tester replaces parts of an instance and restores them afterwards


NEW_YEAR = datetime(2031, 1, 1, tzinfo=timezone.utc)


def test_what_would_be_sent_is_checked_and_kept(shop: Shop, tester: DelaysTester) -> None:
    @shop.celery.task(name="mail.send", shared=False)
    def send(to: str, copies: int = 1) -> None:
        raise AssertionError("only a worker runs a Celery task")

    with pytest.raises(e.ForbiddenURLError):
        shop.delays.callbacks.post("http://localhost/", 1, 60)
    shop.delays.callbacks.post("https://1.1.1.1/paid", {"order": 7}, 60)
    shop.delays.callbacks.publish("invoices", {"order": 7}, 60)
    shop.delays.apply_async(send, ("a@b.example",), {"copies": 2}, countdown=1800)
    tester.fast_forward("20m")
    assert [sent.url for sent in tester.sent_callbacks] == ["https://1.1.1.1/paid"]
    assert [(sent.to, sent.body) for sent in tester.sent_messages] == [("invoices", {"order": 7})]
    assert tester.sent_tasks == []
    tester.fast_forward("20m")
    [sent] = tester.sent_tasks
    assert (sent.name, sent.args, sent.kwargs) == ("mail.send", ["a@b.example"], {"copies": 2})


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


@pytest.mark.parametrize(
    "freeze", [freeze_time, partial(time_machine.travel, tick=False)], ids=["freezegun", "machine"]
)
def test_a_library_sets_the_time_and_moves_it(shop: Shop, freeze: Any) -> None:
    with freeze(NEW_YEAR) as frozen, DelaysTester(shop.delays) as tester:
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
    in_memory = create_engine("sqlite://", poolclass=StaticPool)
    for engine in (own, in_memory):
        with engine.begin() as connection:
            create_tables(connection, shop.delays)
    shop.delays.schedule_delay("order.close", 7, "30m")
    with own.begin() as link:
        link.execute(text("UPDATE s_yb_delay_task_message SET create_time = '2026-01-01 00:00:00'"))
    with DelaysTester(shop.delays, bind=in_memory) as tester:
        shop.delays.schedule_delay("order.close", 8, 60)
        tester.fast_forward("1m")
    with DelaysTester(shop.delays) as tester:
        for run_tasks in (tester.run_due, lambda: tester.fast_forward("1h")):
            with pytest.raises(e.ConfigError, match=r"tag 'order.close'.*database of their own"):
                run_tasks()
        tester.clear()
        shop.delays.schedule_delay("order.close", 9, "30m")
        tester.fast_forward("1h")
    assert shop.noted == [8, 9]
    shop.delays.close()
    for engine in (own, in_memory):
        engine.dispose()


def test_clear_deletes_what_other_tests_have_committed(shop: Shop, tester: DelaysTester) -> None:
    shop.delays.schedule_delay("order.close", 1, 0, key="7")
    shop.delays.policies.set(tag="order.close", rate="2/m")
    tester.clear()
    assert (tester.run_due(), shop.delays.policies.list()) == ([], [])
    shop.delays.schedule_delay("order.close", 1, 0, key="7")


# A tester runs tasks in the order of their due times


def test_fast_forward_runs_all_at_due_times_in_order(shop: Shop, tester: DelaysTester) -> None:
    began = tester.now
    for minutes in (20, 5, 40, 10):
        shop.delays.schedule_delay("order.close", minutes, minutes * 60, queue=f"q{minutes}")
    runs = tester.fast_forward("30m")
    assert shop.noted == [5, 10, 20]
    late = [run.at - run.task.due for run in runs]
    assert all(timedelta(0) <= one < timedelta(seconds=30) for one in late)
    assert timedelta(minutes=30) <= tester.now - began < timedelta(minutes=31)


def test_fast_forward_runs_new_tasks_and_retries(shop: Shop, tester: DelaysTester) -> None:
    delays = shop.delays
    delays.processor("chain")(lambda body: delays.schedule_delay("order.pay", body, 60) and None)
    shop.errors = [ValueError("first"), ValueError("second")]
    shop.delays.schedule_delay("chain", 7, 60)
    runs = tester.fast_forward("1h")
    assert [run.outcome for run in runs] == [
        "succeed", "schedule_retry", "schedule_retry", "succeed",
    ]  # fmt: skip
    assert [str(run.error) for run in runs] == ["None", "first", "second", "None"]
    minutes = [round((run.at - runs[0].at).total_seconds() / 60) for run in runs]
    assert (minutes, shop.noted) == ([0, 1, 2, 7], [7])


# -- errors ---------------------------------------------------------------------------------------


def test_a_processors_error_is_raised_after_all_tasks(shop: Shop, tester: DelaysTester) -> None:
    shop.errors = [ValueError("no money"), ValueError("no money")]
    for tag, number in (("order.bill", 1), ("order.pay", 1), ("order.close", 2)):
        shop.delays.schedule_delay(tag, number, 0)
    with pytest.raises(ValueError, match="no money"):
        tester.run_due()
    assert shop.noted == [2]
    [failed] = tester.scheduled("order.bill", status="FAILED")
    assert "no money" in str(failed.error)
    tester.assert_scheduled("order.pay", within="1m")
    outcomes: list[Any] = [Fail("as asked"), Cancel("as asked")]
    shop.delays.processor("outcome")(lambda body: outcomes.pop(0))
    for number in range(2):
        shop.delays.schedule_delay("outcome", number, number)
    runs = tester.fast_forward(5)
    assert [run.outcome for run in runs] == ["fail", "withdraw"], "outcomes are no errors"


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


# -- pauses and schedules -------------------------------------------------------------------------


def test_paused_tasks_wait_until_the_pause_ends(shop: Shop, tester: DelaysTester) -> None:
    shop.delays.policies.pause(tag="order.close", until="1h")
    shop.delays.policies.pause(queue="slow")
    shop.delays.schedule_delay("order.close", 1, 60)
    shop.delays.schedule_delay("order.pay", 2, 60, queue="slow")
    assert tester.fast_forward("59m") == []
    [run] = tester.fast_forward("1h")
    assert timedelta(minutes=58) < run.at - run.task.expected_time < timedelta(minutes=60)
    shop.delays.policies.resume(queue="slow")
    tester.run_due()
    assert shop.noted == [1, 2]


def test_declared_schedules_run_at_each_occurrence(shop: Shop, tester: DelaysTester) -> None:
    @shop.delays.recurring(every="1h")
    @shop.delays.processor("order.count")
    def count_orders(body: Any) -> None:
        shop.noted.append("counted")

    runs = tester.fast_forward("1d")
    assert len(runs) == len(shop.noted) in (23, 24)
    gaps = {round((second.at - first.at).total_seconds() / 60) for first, second in pairwise(runs)}
    assert gaps == {60}


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
    place(shop, sessions, 7, key="7")
    bound.assert_scheduled("order.close", key="7", body=7, within="30m")
    shop.delays.schedule_delay("order.close", 8, 60, key="8")  # a call without a session
    shop.delays.schedule_many([("order.pay", number, 60) for number in range(3)])
    bound.fast_forward("30m")
    assert (sorted(shop.noted), bound.scheduled()) == ([0, 1, 2, 7, 8], [])
    connection.rollback()
    assert sum(world.counted().values()) == 0


def test_a_failure_undoes_its_work(shop: Shop, sessions: Sessions, bound: DelaysTester) -> None:
    def cancel(body: Any) -> None:
        with sessions.begin() as session:
            session.execute(insert(orders).values(id=body))  # exists already

    shop.delays.processor("order.cancel", retries="1m")(cancel)
    place(shop, sessions, 7)
    shop.delays.schedule_delay("order.cancel", 7, 0)
    shop.delays.schedule_delay("order.cancel", 8, 0)
    [failed, succeeded] = bound.run_due(raises=False)
    assert (failed.outcome, succeeded.outcome) == ("schedule_retry", "succeed")
    with sessions() as session:
        assert sorted(session.execute(select(orders.c.id)).scalars()) == [7, 8]
    bound.assert_scheduled("order.cancel", body=7, within="1m")


def test_the_session_of_a_test_may_be_bound(shop: Shop, sessions: Sessions, start: Start) -> None:
    for bind in (sessions(), scoped_session(sessions)):
        bound = start(bind=bind)
        place(shop, sessions, 7 + len(shop.noted))
        bound.fast_forward("30m")
        bound.stop()
    assert shop.noted == [7, 8]


def test_limits_keys_and_schedules_work_in_a_transaction(shop: Shop, bound: DelaysTester) -> None:
    shop.delays.policies.set(tag="order.close", concurrency=1, rate="6/m")
    for number in range(4):
        shop.delays.schedule_delay("order.close", number, 0, key=str(number))
    shop.delays.schedule_delay("order.close", 1, 0, key="1", on_conflict="keep")
    shop.delays.schedule_delay("order.close", 9, 60, key="1", on_conflict="replace")
    bound.run_due()
    assert len(shop.noted) < 3, "the rate allows fewer"
    shop.delays.recurring.set("hourly", "order.pay", "hour", every="1h")
    bound.fast_forward("90m")
    assert [one for one in shop.noted if one != "hour"] == [0, 2, 3, 9]
    assert "hour" in shop.noted


# -- asynchronous ---------------------------------------------------------------------------------


def test_coroutines_run_in_the_loop_of_a_test(shop: Shop, world: World, database_url: str) -> None:
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
            with DelaysTester(shop.delays, bind=connection) as bound:
                async with session_of_test() as session:
                    await shop.delays.aschedule_delay("order.async", 7, 60, session=session)
                    await session.commit()
                await shop.delays.aschedule_delay("order.close", 8, 60)
                await bound.aassert_scheduled("order.async", body=7, within="1m")
                await bound.aassert_not_scheduled("order.async", body=8)
                assert len(await bound.ascheduled()) == 2
                await bound.afast_forward("2m")
                assert await bound.arun_due() == []
                with pytest.raises(e.SessionUnusableError, match="such as arun_due"):
                    bound.run_due()
            assert sorted(shop.noted) == [7, 8]
            async with session_of_test() as session:
                assert (await session.execute(select(orders.c.id))).scalar_one() == 7
            await connection.rollback()
        async with engine_at(database_url) as engine, engine.begin() as own:
            await own.run_sync(orders.metadata.drop_all)
        assert sum(world.counted().values()) == 0

    run(go())


# -- errors of the arrangement --------------------------------------------------------------------


def test_a_wrong_bind_and_missing_tables_are_errors_with_a_remedy() -> None:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    delays = DelayTasks(Celery("shop", set_as_current=False), "sqlite:///elsewhere.sqlite3")
    with pytest.raises(e.ConfigError, match="Engine, Connection or Session"):
        DelaysTester(delays, bind="sqlite://")
    remedy = r"call delaytasks.testing.create_tables\(connection\) in the test, or run: delaytasks"
    with DelaysTester(delays, bind=engine), Session(engine) as session:
        for error, options in ((e.StoreError, {}), (e.SessionUnusableError, {"session": session})):
            with pytest.raises(error, match=f"; {remedy}") as raised:
                delays.schedule_delay("order.close", 7, 60, **options)
            assert type(raised.value) is error
    engine.dispose()
