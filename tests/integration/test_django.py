"""Test Django: transactions and statements on its own connection."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from delaytasks.db.engines import create_sqlite_file

pytest.importorskip("django")

from asgiref.sync import sync_to_async
from celery import signals as celery_signals
from celery.app.utils import find_app
from celery.fixups.django import DjangoWorkerFixup
from django.core import signals
from django.core.exceptions import SynchronousOnlyOperation
from django.core.management import call_command
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext, override_settings

import delaytasks as e
from delaytasks import DelayedTask, Status
from delaytasks.contrib.django.django_connection import DjangoConnection
from delaytasks.contrib.django.instance import DjangoDelays, project_delays
from delaytasks.model.body import key_name
from delaytasks.model.filters import Filter
from delaytasks.model.task import Entry
from delaytasks.runtime import runtime_of
from tests.integration import django_settings
from tests.world.recording import new_key, runner_of

DUE = datetime(2031, 2, 3, 4, 5, 6, tzinfo=timezone.utc)


@pytest.fixture(scope="module", autouse=True)
def django() -> Iterator[None]:
    with django_settings.configured():
        yield


@pytest.fixture(scope="module")
def alias(django: None, database_url: str) -> Iterator[str]:
    name = "test_" + database_url.partition(":")[0].partition("+")[0]
    django_settings.add_database(name, database_url)
    yield name
    django_settings.remove_database(name)


@pytest.fixture(scope="module")
def module_delays(alias: str) -> Iterator[DjangoDelays]:
    prefix = "d" + secrets.token_hex(3) + "_"
    delays = DjangoDelays(django_settings.new_celery_app(), alias, table_prefix=prefix)
    create_sqlite_file(runtime_of(delays).store.database.url)
    runtime_of(delays).store.schema.metadata.create_all(runtime_of(delays).store.database.tx)
    yield delays
    runtime_of(delays).store.schema.metadata.drop_all(runtime_of(delays).store.database.tx)
    delays.close()


@pytest.fixture
def armed(module_delays: DjangoDelays, monkeypatch: pytest.MonkeyPatch) -> list[Entry]:
    entries: list[Entry] = []
    monkeypatch.setattr(runtime_of(module_delays).producer_timer, "arm", entries.extend)
    return entries


@pytest.fixture
def delays(module_delays: DjangoDelays, armed: list[Entry]) -> Iterator[DjangoDelays]:
    yield module_delays
    connection = connections[module_delays.alias]
    assert not connection.in_atomic_block
    with connection.cursor() as cursor:
        for table in runtime_of(module_delays).store.schema.metadata.sorted_tables:
            cursor.execute(f"DELETE FROM {table.name}")


class UndoneError(Exception):
    """End an atomic block with a rollback."""


@contextmanager
def rolled_back(alias: str) -> Iterator[None]:
    try:
        with transaction.atomic(alias):
            yield
            raise UndoneError
    except UndoneError:
        pass


def rows(delays: DjangoDelays) -> list[Any]:
    """Return the rows that a connection of delaytasks' own reads."""
    return runtime_of(delays).store.tasks.find(Filter(), 1000).tasks


# -- transactions --------------------------------------------------------------------------------


def test_one_query_writes_a_task_in_the_atomic_block_and_it_is_armed_after_the_commit(
    delays: DjangoDelays, armed: list[Entry]
) -> None:
    # The call reads the database's time again, and the count excludes that query.
    runtime_of(delays).clock.forget()
    with transaction.atomic(delays.alias):
        with CaptureQueriesContext(connections[delays.alias]) as queries:
            task = delays.schedule_delay("order.close", {"order": 7}, 1)
        assert len(queries) == 1, queries.captured_queries
        assert delays.get(task).body == {"order": 7}
        due = task.expected_time
        names = {"tag": "order.close", "status": "not_complete"}
        [found] = delays.find(**names, since=due, until=due + timedelta(1))
        assert found.id == task.id
        assert not delays.find(until=due).tasks
        assert not armed
        # On SQLite a reader would wait, or would read the last commit.
        if connections[delays.alias].vendor != "sqlite":
            assert not rows(delays)
    assert [entry.id for entry in armed] == [task.id]
    assert rows(delays) == [delays.get(task)]


def remind_customer(order: int) -> None: ...


def test_a_delayed_celery_task_is_written_in_the_atomic_block(delays: DjangoDelays) -> None:
    remind = runtime_of(delays).celery.task(remind_customer, name="django.remind")
    with rolled_back(delays.alias):
        remind.apply_async((1,), countdown=60, durable_eta=True)
    with transaction.atomic(delays.alias):
        kept = remind.apply_async((2,), countdown=60, durable_eta=True)
    assert [row.key for row in rows(delays)] == [kept.id]


def test_a_rollback_leaves_no_row_and_no_entry(delays: DjangoDelays, armed: list[Entry]) -> None:
    with rolled_back(delays.alias):
        delays.schedule_delay("order.close", 1, 1)
        delays.schedule_delay("order.close", 2, 1, key="k")
        delays.schedule_many([("order.close", n, 1) for n in range(700)])
    assert not rows(delays)
    assert not armed
    # The rollback released the key, and that of a savepoint removes its tasks.
    with transaction.atomic(delays.alias):
        kept = delays.schedule_delay("order.close", 1, 1, key="k")
        with rolled_back(delays.alias):
            delays.schedule_delay("order.close", 2, 1)
        with transaction.atomic(delays.alias):
            inner = delays.schedule_delay("order.close", 3, 1)
    ids = [kept.id, inner.id]
    assert sorted(task.id for task in rows(delays)) == [entry.id for entry in armed] == ids


def test_a_commit_by_hand_writes_the_tasks(delays: DjangoDelays, armed: list[Entry]) -> None:
    connection = connections[delays.alias]
    connection.set_autocommit(False, force_begin_transaction_with_broken_autocommit=True)
    try:
        delays.schedule_delay("order.close", 1, 1)
        connection.rollback()
        delays.schedule_delay("order.close", 2, 1)
        connection.commit()
    finally:
        connection.set_autocommit(True)
    assert [task.body for task in rows(delays)] == [2]
    # Django does not call `on_commit` functions for such a commit, so the sweep arms the row.
    assert not armed


# -- statements on Django's cursor ---------------------------------------------------------------


@pytest.mark.parametrize("is_atomic", [True, False])
def test_a_task_is_read_as_it_was_written(delays: DjangoDelays, is_atomic: bool) -> None:
    body = {"rate": "100 % %s %(x)s %%", "quote": "it's \\ \"", "text": "Zoë 🕐", "number": 2**60}
    for when in (DUE, DUE.replace(microsecond=1), DUE.astimezone(timezone(timedelta(hours=-5)))):
        with transaction.atomic(delays.alias) if is_atomic else nullcontext():
            task = delays.schedule_delay("%s", body, at=when, key="%", priority=3, queue="q")
            read = delays.get(tag="%s", key="%")
            delays.cancel(task)
        assert (read.id, read.tag, read.body, read.key) == (task.id, "%s", body, "%")
        assert (read.priority, read.queue, read.status) == (3, "q", Status.NOT_COMPLETE)
        assert read.expected_time == when
        assert read.expected_time.utcoffset() == timedelta(0)
        assert read.create_time == task.create_time
        # The store reads on a connection of delaytasks' own.
        own = runtime_of(delays).store.tasks.get(task.id)
        assert own is not None
        assert (own.expected_time, own.body) == (when, body)


def test_without_use_tz_instants_are_the_same(delays: DjangoDelays) -> None:
    connection = connections[delays.alias]

    def renew() -> None:
        connection.close()
        for name in ("timezone", "timezone_name"):
            connection.__dict__.pop(name, None)

    with override_settings(USE_TZ=False, TIME_ZONE="Asia/Kolkata"):
        renew()
        with transaction.atomic(delays.alias):
            task = delays.schedule_delay("order.close", 1, at=DUE)
            assert delays.get(task).expected_time == DUE
        runtime = runtime_of(delays)
        runtime.clock.forget()
        assert abs(runtime.clock.now() - runtime.store.tasks.now()) < timedelta(seconds=1)
    renew()
    assert rows(delays)[0].expected_time == DUE


def test_bodies_are_encrypted_on_djangos_connection_and_the_model_reads_them(
    delays: DjangoDelays, monkeypatch: pytest.MonkeyPatch
) -> None:
    from delaytasks.contrib.django import models

    prefix, key = delays.settings.table_prefix, new_key()
    own = DjangoDelays(
        django_settings.new_celery_app(), delays.alias, table_prefix=prefix, encryption_keys=[key]
    )
    monkeypatch.setattr(runtime_of(own).producer_timer, "arm", list[Entry]().extend)
    body = {"card": "cAnArY", "percent": "100 %"}
    with transaction.atomic(own.alias):
        own.schedule_delay("order.close", body, 60)
        own.schedule_delay("order.close", body, 60, key="k")
        own.schedule_delay("order.close", body, 60, key="k", on_conflict="replace")
        own.schedule_many([("order.close", body, 60)] * 3)
        assert [task.body for task in own.find()] == [body] * 5
    table = runtime_of(own).store.schema.tasks.name
    with connections[own.alias].cursor() as cursor:
        cursor.execute(f"SELECT message_body, id, tag FROM {table}")
        rows = cursor.fetchall()
    stored = [row[0] for row in rows]
    assert [text[:16] for text in stored] == [f"aesgcm:{key_name(key)}:"] * 5
    assert "cAnArY" not in repr(stored)
    row = models.DelayTaskRow(id=rows[0][1], tag=rows[0][2], message_body=stored[0])
    with pytest.raises(e.BodyEncryptedError):
        _ = row.body
    monkeypatch.setattr(models, "project_delays", lambda: own)
    assert row.body == body
    own.close()


def test_the_command_celery_finds_the_app_of_the_project(delays: DjangoDelays) -> None:
    assert find_app("delaytasks.contrib.django") is runtime_of(project_delays()).celery


def test_the_model_has_the_columns_of_the_table(delays: DjangoDelays) -> None:
    from delaytasks.contrib.django.models import DelayTaskRow

    columns = [column.name for column in runtime_of(delays).store.schema.tasks.columns]
    assert [field.column for field in DelayTaskRow._meta.concrete_fields] == columns


# -- keys and status changes ---------------------------------------------------------------------


def test_operators_moves_are_in_the_transaction(delays: DjangoDelays, armed: list[Entry]) -> None:
    task = delays.schedule_delay("order.close", 1, at=DUE, key="k")
    with rolled_back(delays.alias):
        assert delays.cancel(tag="order.close", key="k")
    assert delays.get(task).status is Status.NOT_COMPLETE
    with transaction.atomic(delays.alias):
        delays.reschedule(task, 3)
        assert delays.touch(tag="order.close", key="k", delay=5)
        assert delays.touch([task.id, 7], 6).gone == [7]
        assert delays.touch(tag="order.close", key=["k", "l"], delay=8).gone == ["l"]
        assert not armed
    assert [(entry.id, entry.version) for entry in armed] == [(task.id, 1)]
    with transaction.atomic(delays.alias):
        assert delays.cancel(task)
        assert not delays.cancel(task)
        assert delays.rerun(task, 7).version == 3
    assert delays.get(tag="order.close", key="k").status is Status.NOT_COMPLETE
    assert len(armed) == 2


# -- errors --------------------------------------------------------------------------------------


def test_outside_of_atomic_each_call_is_a_transaction_and_bulk_calls_always_are(
    delays: DjangoDelays, armed: list[Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(runtime_of(delays).store.tasks.new, "add", fail_in_sql)
        with pytest.raises(e.StoreError):
            delays.schedule_delay("many", 1, 60, key="k")
    # The key is free, since the call that failed has left nothing.
    made = [delays.schedule_delay("many", {}, 1), delays.schedule_delay("many", {}, 1, key="k")]
    ids = [task.id for task in made]
    assert sorted(task.id for task in rows(delays)) == [entry.id for entry in armed] == ids
    # SQLite has one writer, so the caller's block must end before the second write.
    is_sqlite = connections[delays.alias].vendor == "sqlite"
    with nullcontext() if is_sqlite else rolled_back(delays.alias):
        assert delays.bulk.cancel(tag="many").changed == 2
    assert {task.status for task in rows(delays)} == {Status.CANCELLED}
    assert [entry.changed for entry in delays.bulk.log(limit=1)] == [2]


def test_a_database_error_rolls_back_the_callers_block_even_if_it_is_caught(
    delays: DjangoDelays, armed: list[Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    with transaction.atomic(delays.alias):
        delays.schedule_delay("order.close", 1, 1)
        with monkeypatch.context() as patch:
            patch.setattr(runtime_of(delays).store.tasks.new, "insert", fail_in_sql)
            with pytest.raises(e.SessionUnusableError, match="no_such_table"):
                delays.schedule_delay("order.close", 2, 1)
        with pytest.raises(e.SessionUnusableError, match="leave the atomic block"):
            delays.schedule_delay("order.close", 3, 1)
    assert not rows(delays)
    assert not armed


def fail_in_sql(*arguments: Any) -> bool:
    connection = next(argument for argument in arguments if isinstance(argument, DjangoConnection))
    connection.exec_driver_sql("SELECT 1 FROM no_such_table")
    return True


def test_the_error_about_missing_tables_names_the_command_that_creates_them(alias: str) -> None:
    delays = DjangoDelays(django_settings.new_celery_app(), alias, table_prefix="nowhere_")
    try:
        with pytest.raises(
            e.StoreError, match=r"nowhere_yb_delay_task_message.*manage\.py migrate"
        ):
            delays.schedule_delay("order.close", 1, 1)
        refused = pytest.raises(e.SessionUnusableError, match=r"manage\.py migrate")
        with refused, transaction.atomic(alias):
            delays.schedule_delay("order.close", 1, 1)
        with pytest.raises(
            e.ConfigError, match=r"missing or old.*; run: python manage\.py migrate$"
        ):
            runtime_of(delays).checks.check_ready()  # as a worker does at its start
    finally:
        delays.close()


def test_a_broken_connection_is_reported_and_during_a_commit_with_the_id(
    delays: DjangoDelays, armed: list[Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    from django.db import OperationalError

    def broken(*_: Any, **__: Any) -> None:
        raise OperationalError("server closed the connection unexpectedly\nsecret")

    connection = connections[delays.alias]
    with monkeypatch.context() as patch:
        patch.setattr(runtime_of(delays).store.tasks.new, "insert", broken)
        with pytest.raises(e.StoreUnavailableError, match="closed the connection") as error:
            delays.schedule_delay("order.close", 1, 1)
        assert "secret" not in str(error.value)
    with monkeypatch.context() as patch:
        patch.setattr(connection, "commit", broken)
        with pytest.raises(e.OutcomeUnknownError) as many:
            delays.schedule_many([("order.close", 1, 1)])
        with pytest.raises(e.OutcomeUnknownError) as unknown:
            delays.schedule_delay("order.close", 1, 1)
    assert many.value.id is not None
    assert unknown.value.id is not None
    assert delays.schedule_delay("order.close", 1, 1, id=unknown.value.id).id == unknown.value.id


# -- Requests of a Django project, and several databases ------------------------------------------


class OneDatabase:
    """A router that lets only one database have tables."""

    def allow_migrate(self, db: str, app_label: str, **_: Any) -> bool:
        return db == "orders"


@pytest.mark.parametrize("max_age_s", [0, 60, None])
def test_calls_work_with_any_conn_max_age(
    delays: DjangoDelays, monkeypatch: pytest.MonkeyPatch, max_age_s: float | None
) -> None:
    connection = connections[delays.alias]
    monkeypatch.setitem(connection.settings_dict, "CONN_MAX_AGE", max_age_s)
    connection.close()
    for number in range(3):
        signals.request_started.send(None)
        delays.schedule_delay("order.close", number, 60)
        signals.request_finished.send(None)
        assert (connection.connection is None) is (max_age_s == 0)
    assert [task.body for task in delays.find()] == [0, 1, 2]


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DjangoDelays]:
    """Return an instance on the second of two databases, both without tables."""
    for name in ("orders", "archive"):
        django_settings.add_database(name, f"sqlite:///{tmp_path / name}.sqlite3")
    made = DjangoDelays(django_settings.new_celery_app(), "orders")
    from delaytasks.contrib.django import apps, models

    for module in (apps, models):
        monkeypatch.setattr(module, "project_delays", lambda: made)
    yield made
    made.close()
    for name in ("orders", "archive"):
        django_settings.remove_database(name)


@pytest.mark.parametrize("routers", [[], [f"{__name__}.OneDatabase"]])
def test_only_the_configured_database_has_tables(orders: DjangoDelays, routers: list[str]) -> None:
    with override_settings(DATABASE_ROUTERS=routers):
        for name in ("orders", "archive"):
            call_command("migrate", database=name, verbosity=0)
        task = orders.schedule_delay("order.close", {"order": 7}, 60)
        from delaytasks.contrib.django.models import DelayTaskRow

        assert [row.id for row in DelayTaskRow.objects.all()] == [task.id]
    table = runtime_of(orders).store.schema.tasks.name
    assert table in connections["orders"].introspection.table_names()
    assert table not in connections["archive"].introspection.table_names()


# -- Connections of rows that run concurrently, which are closed after each row -------------------


@pytest.fixture
def fixup(module_delays: DjangoDelays) -> Iterator[None]:
    """Install the fixup that a worker of a Django project installs."""
    made = DjangoWorkerFixup(runtime_of(module_delays).celery).install()
    yield
    celery_signals.task_prerun.disconnect(made.on_task_prerun)
    celery_signals.task_postrun.disconnect(made.on_task_postrun)


def query(alias: str, used: list[tuple[int, Any]]) -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT 1")
    assert connections[alias].connection is not None
    used.append((threading.get_ident(), connections[alias]))


def run_six(delays: DjangoDelays, tag: str) -> list[DelayedTask]:
    tasks = [delays.schedule_delay(tag, None, 0) for _ in range(6)]
    # A row that finds no free slot within the time budget returns to the queue.
    while runner_of(delays).run_due("default", range(10), limit=100).claimed:
        pass
    return [delays.get(task) for task in tasks]


@pytest.mark.usefixtures("fixup")
@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "coroutines"])
def test_each_row_closes_its_connection(delays: DjangoDelays, alias: str, is_async: bool) -> None:
    """Django makes the connections of coroutines in a thread of its own."""
    used: list[tuple[int, Any]] = []

    def work(body: Any) -> None:
        query(alias, used)

    async def work_on_loop(body: Any) -> None:
        await sync_to_async(query)(alias, used)

    runtime_of(delays).registry._processors.pop("shop.concurrent", None)
    delays.processor("shop.concurrent", in_flight=2)(work_on_loop if is_async else work)
    assert {task.status for task in run_six(delays, "shop.concurrent")} == {Status.DONE}
    assert threading.get_ident() not in {thread for thread, _ in used}
    assert [connection.connection for _, connection in used] == [None] * 6


# -- Asynchronous methods run on the connection of the asynchronous ORM ---------------------------


@pytest.fixture
def async_delays(database_url: str) -> Iterator[DjangoDelays]:
    # The name is new because asgiref's thread keeps its connections.
    with django_settings.instance_on(database_url, f"async_{secrets.token_hex(3)}") as new:
        yield new


@pytest.fixture
def run(async_delays: DjangoDelays) -> Callable[[Any], Any]:
    """Run a coroutine, and close the connection that Django has in the thread of its ORM."""

    async def closing(coroutine: Any) -> Any:
        try:
            return await coroutine
        finally:
            await sync_to_async(lambda: connections[async_delays.alias].close())()

    return lambda coroutine: asyncio.run(closing(coroutine))


def test_concurrent_calls_use_the_connection_of_djangos_asynchronous_orm(
    async_delays: DjangoDelays, run: Callable[[Any], Any]
) -> None:
    statements: list[str] = []

    def log_queries() -> None:
        connections[async_delays.alias].force_debug_cursor = True

    def read_log() -> None:
        statements.extend(query["sql"] for query in connections[async_delays.alias].queries)

    async def go() -> set[int]:
        await sync_to_async(log_queries)()
        calls = (async_delays.aschedule_delay("order.close", {}, 60) for _ in range(5))
        ids = {task.id for task in await asyncio.gather(*calls)}
        await sync_to_async(read_log)()
        return ids

    ids = run(go())
    assert {task.id for task in async_delays.find()} == ids
    assert len([sql for sql in statements if sql.startswith("INSERT INTO")]) == len(ids) == 5
    connections[async_delays.alias].close()


def test_a_synchronous_call_in_a_coroutine_names_its_twin(
    async_delays: DjangoDelays, run: Callable[[Any], Any]
) -> None:
    async def go() -> None:
        async_delays.schedule_delay("order.close", {}, 60)

    with pytest.raises(SynchronousOnlyOperation, match="such as aschedule_delay"):
        run(go())
