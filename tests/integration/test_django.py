"""Test Django: transactions on its own connection, its databases, and `manage.py`."""

from __future__ import annotations

import asyncio
import io
import json
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from datetime import datetime, timedelta, timezone
from pathlib import Path
from threading import get_ident
from typing import Any
from urllib.parse import unquote

import pytest

pytest.importorskip("django")

import psycopg
from asgiref.sync import sync_to_async
from celery import signals as celery_signals
from celery.app.utils import find_app
from celery.fixups.django import DjangoWorkerFixup
from django.core.checks import run_checks
from django.core.exceptions import SynchronousOnlyOperation
from django.core.management import CommandError, call_command
from django.db import DatabaseError, OperationalError, connections, transaction
from django.test.utils import override_settings
from sqlalchemy import Engine, event

import delaytasks as e
from delaytasks import Status
from delaytasks.contrib.django import apps as checks
from delaytasks.contrib.django.instance import DjangoConnection, DjangoDelays, project_delays
from delaytasks.contrib.django.instance import database_url as url_of
from delaytasks.contrib.django.management.commands import delays as command
from delaytasks.db import migrations
from delaytasks.model.body import key_name
from delaytasks.model.filters import Filter
from delaytasks.model.task import Entry
from delaytasks.operate.checks import check_ready
from delaytasks.runtime import runtime_of
from tests.conformance.test_outages import READ_ONLY
from tests.integration import django_settings
from tests.integration.django_settings import instance_on
from tests.proxy import proxy_to
from tests.world.recording import new_key, runner_of

DUE = datetime(2031, 2, 3, 4, 5, 6, tzinfo=timezone.utc)


@pytest.fixture(scope="module", autouse=True)
def django() -> Iterator[None]:
    with django_settings.configured():
        yield


@pytest.fixture(scope="module")
def module_delays(django: None, database_url: str) -> Iterator[DjangoDelays]:
    kind = re.split(r"\W", database_url)[0]
    with instance_on(database_url, f"test_{kind}") as delays:
        yield delays


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


@contextmanager
def rolled_back(alias: str) -> Iterator[None]:
    with transaction.atomic(alias):
        yield
        transaction.set_rollback(True, using=alias)


def rows(delays: DjangoDelays) -> list[Any]:
    """Return the rows that a connection of delaytasks' own reads."""
    return runtime_of(delays).store.tasks.find(Filter(), 1000).tasks


# -- transactions --------------------------------------------------------------------------------


@contextmanager
def executed() -> Iterator[list[tuple[int, str]]]:
    """Yield the statements of delaytasks, each after the thread that executes it."""
    found: list[tuple[int, str]] = []

    def note(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        found.append((get_ident(), statement))

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def test_one_query_writes_a_task_in_the_atomic_block_and_it_is_armed_after_the_commit(
    delays: DjangoDelays, armed: list[Entry]
) -> None:
    connection = connections[delays.alias]
    with transaction.atomic(delays.alias):
        runtime_of(delays).clock.now()  # reads the time, which is kept, and opens the connection
        with executed() as queries:
            task = delays.schedule_delay("order.close", {"order": 7}, 1)
        assert len(queries) == 1, queries
        assert delays.get(task).body == {"order": 7}
        assert [found.id for found in delays.find(since=task.expected_time)] == [task.id]
        assert not armed
        # On SQLite a reader would wait, or would read the last commit.
        if connection.vendor != "sqlite":
            assert not rows(delays)
        if connection.vendor == "postgresql":
            assert isinstance(connection.connection, psycopg.Connection), "as Django prefers it"
    assert [entry.id for entry in armed] == [task.id]
    assert rows(delays) == [delays.get(task)]


def test_a_rollback_leaves_no_row_and_no_entry(delays: DjangoDelays, armed: list[Entry]) -> None:
    alias, connection = delays.alias, connections[delays.alias]
    with rolled_back(alias):
        delays.schedule_delay("order.close", 2, 1, key="k")
        delays.schedule_many([("order.close", n, 1) for n in range(700)])
    assert not rows(delays)
    assert not armed
    # The rollback released the key, and that of a savepoint undoes calls.
    with transaction.atomic(alias):
        kept = delays.schedule_delay("order.close", 1, 1, key="k")
        with rolled_back(alias):
            delays.schedule_delay("order.close", 2, 1)
            delays.reschedule(kept, 3)
            assert delays.cancel(tag="order.close", key="k")
    assert [(task.id, task.version) for task in rows(delays)] == [(kept.id, 0)]
    assert [entry.id for entry in armed] == [kept.id]
    connection.set_autocommit(False, force_begin_transaction_with_broken_autocommit=True)
    try:
        delays.schedule_delay("order.close", 3, 1)
        connection.rollback()
        delays.schedule_delay("order.close", 4, 1)
        connection.commit()
    finally:
        connection.set_autocommit(True)
    assert sorted(task.body for task in rows(delays)) == [1, 4]
    # Django does not call `on_commit` functions for a commit by hand, so the sweep arms the row.
    assert len(armed) == 1


def test_a_task_is_read_as_it_was_written(delays: DjangoDelays) -> None:
    body = {"rate": "100 % %s %(x)s %%", "quote": "it's \\ \"", "text": "Zoë 🕐", "number": 2**60}
    for when in (DUE, DUE.replace(microsecond=1), DUE.astimezone(timezone(timedelta(hours=-5)))):
        with transaction.atomic(delays.alias):
            task = delays.schedule_delay("%s", body, at=when, key="%", priority=3, queue="q")
            read = delays.get(tag="%s", key="%")
        # The store reads on a connection of delaytasks' own.
        assert runtime_of(delays).store.tasks.get(task.id) == delays.get(task) == read
        assert (read.tag, read.body, read.priority, read.queue) == ("%s", body, 3, "q")
        assert (read.expected_time, read.create_time) == (when, task.create_time)
        assert read.expected_time.utcoffset() == timedelta(0)
        assert delays.cancel(task)


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

    key, body, alias = new_key(), {"card": "cAnArY"}, delays.alias
    options = {"table_prefix": delays.settings.table_prefix, "encryption_keys": [key]}
    with closing(DjangoDelays(django_settings.new_celery_app(), alias, **options)) as own:
        with transaction.atomic(alias):
            own.schedule_delay("order.close", body, 3600)
            own.schedule_many([("order.close", body, 3600)] * 3)
            assert [task.body for task in own.find()] == [body] * 4
        with connections[alias].cursor() as cursor:
            table = runtime_of(own).store.schema.tasks.name
            cursor.execute(f"SELECT message_body, id, tag FROM {table}")
            stored = cursor.fetchall()
        assert [text[:16] for text, *_ in stored] == [f"aesgcm:{key_name(key)}:"] * 4
        row = models.DelayTaskRow(id=stored[0][1], tag=stored[0][2], message_body=stored[0][0])
        with pytest.raises(e.BodyEncryptedError):
            _ = row.body
        monkeypatch.setattr(models, "project_delays", lambda: own)
        assert row.body == body


def test_the_project_has_an_app_of_celery_and_the_model_the_columns_of_the_table(
    delays: DjangoDelays,
) -> None:
    from delaytasks.contrib.django.models import DelayTaskRow

    assert find_app("delaytasks.contrib.django") is runtime_of(project_delays()).celery
    columns = [column.name for column in runtime_of(delays).store.schema.tasks.columns]
    assert [field.column for field in DelayTaskRow._meta.concrete_fields] == columns


# -- errors --------------------------------------------------------------------------------------


def fail_in_sql(*arguments: Any) -> bool:
    connection = next(argument for argument in arguments if isinstance(argument, DjangoConnection))
    connection.exec_driver_sql("SELECT 1 FROM no_such_table")
    return True


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


def test_the_error_about_missing_tables_names_the_command_that_creates_them(
    module_delays: DjangoDelays,
) -> None:
    alias, remedy = module_delays.alias, r"manage\.py migrate"
    app = django_settings.new_celery_app()
    with closing(DjangoDelays(app, alias, table_prefix="nowhere_")) as delays:
        with pytest.raises(e.StoreError, match=rf"nowhere_yb_delay_task_message.*{remedy}"):
            delays.schedule_delay("order.close", 1, 1)
        with pytest.raises(e.SessionUnusableError, match=remedy), transaction.atomic(alias):
            delays.schedule_delay("order.close", 1, 1)
        with pytest.raises(e.ConfigError, match=rf"missing or old.*; run: python {remedy}$"):
            check_ready(runtime_of(delays))  # as a worker does at its start


def test_a_connection_that_breaks_during_a_commit_is_reported_with_the_id(
    delays: DjangoDelays, armed: list[Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OperationalError("server closed the connection unexpectedly\nsecret")

    with monkeypatch.context() as patch:
        patch.setattr(connections[delays.alias], "commit", broken)
        with pytest.raises(e.OutcomeUnknownError) as unknown:
            delays.schedule_many([("order.close", 1, 1)])
        assert "secret" not in str(unknown.value)
        with pytest.raises(e.OutcomeUnknownError) as unknown:
            delays.schedule_delay("order.close", 1, 1)
    id = unknown.value.id
    assert id is not None
    assert delays.schedule_delay("order.close", 1, 1, id=id).id == id


@pytest.mark.parametrize("kind", ["postgresql", "mysql"])
def test_a_database_that_is_away_is_reported_and_used_again_later(
    kind: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(f"{kind}_url")
    with closing(proxy_to(url)) as proxy, instance_on(proxy.url(url), f"leaves_{kind}") as delays:
        task = delays.schedule_delay("mail", {}, 60, key="k")
        calls: list[Callable[[], Any]] = [
            lambda: delays.reschedule(task, 5),
            lambda: delays.schedule_delay("mail", {}, 5, key="l"),
            lambda: delays.schedule_many([("mail", {}, 5)]),
            lambda: delays.find(tag="mail").tasks,
        ]
        # The first call reads the database's time inside its own transaction.
        runtime_of(delays).clock._base = None
        proxy.reset()
        with pytest.raises(e.StoreUnavailableError):
            calls[0]()
        proxy.refuse()
        for call in calls * 2:
            with pytest.raises(e.StoreUnavailableError, match="cannot be reached: "):
                call()
        lost = pytest.raises((e.SessionUnusableError, DatabaseError))
        with lost, transaction.atomic(delays.alias):
            delays.get(task)
        proxy.heal()
        assert delays.cancel(task)
        # The connection to a former primary is closed after one call.
        with connections[delays.alias].cursor() as cursor:
            cursor.execute(READ_ONLY[kind])
        with pytest.raises(e.StoreUnavailableError, match=r"(?i)read.only transaction"):
            delays.schedule_delay("mail", {}, 60)
        delays.schedule_delay("mail", {}, 60)


# -- Connections of rows that run concurrently, which are closed after each row -------------------


@pytest.fixture
def fixup(module_delays: DjangoDelays) -> Iterator[None]:
    """Install the fixup that a worker of a Django project installs."""
    made = DjangoWorkerFixup(runtime_of(module_delays).celery).install()
    yield
    celery_signals.task_prerun.disconnect(made.on_task_prerun)
    celery_signals.task_postrun.disconnect(made.on_task_postrun)


@pytest.mark.usefixtures("fixup")
@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "coroutines"])
def test_each_row_closes_its_connection(delays: DjangoDelays, is_async: bool) -> None:
    """Django makes the connections of coroutines in a thread of its own."""
    used: list[tuple[int, Any]] = []

    def query(body: Any) -> None:
        with connections[delays.alias].cursor() as cursor:
            cursor.execute("SELECT 1")
        assert connections[delays.alias].connection is not None
        used.append((threading.get_ident(), connections[delays.alias]))

    async def query_on_loop(body: Any) -> None:
        await sync_to_async(query)(body)

    runtime_of(delays).registry._processors.pop("shop.concurrent", None)
    delays.processor("shop.concurrent", in_flight=2)(query_on_loop if is_async else query)
    tasks = [delays.schedule_delay("shop.concurrent", None, 0) for _ in range(6)]
    # A row that finds no free slot within the time budget returns to the queue.
    while runner_of(delays).run_due("default", range(10), limit=100).claimed:
        pass
    assert {delays.get(task).status for task in tasks} == {Status.DONE}
    assert threading.get_ident() not in {thread for thread, _ in used}
    assert [connection.connection for _, connection in used] == [None] * 6


# -- Asynchronous methods run on the connection of the asynchronous ORM ---------------------------


def test_concurrent_calls_use_the_connection_of_djangos_asynchronous_orm(database_url: str) -> None:
    # The name is new because asgiref's thread keeps its connections.
    with instance_on(database_url, f"async_{secrets.token_hex(3)}") as delays:

        async def go() -> None:
            with executed() as queries:
                calls = (delays.aschedule_delay("order.close", {}, 60) for _ in range(5))
                ids = {task.id for task in await asyncio.gather(*calls)}
            inserts = [thread for thread, sql in queries if sql.startswith("INSERT INTO")]
            assert inserts == [await sync_to_async(get_ident)()] * len(ids) == inserts[:1] * 5
            await sync_to_async(lambda: connections[delays.alias].close())()
            with pytest.raises(SynchronousOnlyOperation, match="such as aschedule_delay"):
                delays.schedule_delay("order.close", {}, 60)

        asyncio.run(go())


# -- the settings of databases --------------------------------------------------------------------

SHOP = {"NAME": "shop", "HOST": "db"}


@pytest.mark.parametrize(
    ("vendor", "settings", "url"),
    [
        ("postgresql", {**SHOP, "USER": "me", "PASSWORD": "p@ss:/%", "PORT": "5433"},
         "+psycopg2://me:p%40ss%3A%2F%25@db:5433/shop"),
        ("postgresql", {"NAME": "shop", "HOST": "/var/run/postgresql", "PORT": 5433},
         "+psycopg2:///shop?host=%2Fvar%2Frun%2Fpostgresql&port=5433"),
        ("postgresql",
         {**SHOP, "OPTIONS": {"sslmode": "require", "pool": True, "isolation_level": 3}},
         "+psycopg2://db/shop?sslmode=require"),
        ("postgresql", {"NAME": "", "OPTIONS": {"service": "shop"}}, "+psycopg2://?service=shop"),
        ("mysql", {"NAME": "shop", "HOST": "/run/mysqld.sock"},
         "+pymysql://localhost/shop?unix_socket=%2Frun%2Fmysqld.sock"),
        ("mysql", {**SHOP, "OPTIONS": {"ssl_mode": "VERIFY_CA", "ssl": {"ca": "/ca.pem"}}},
         "+pymysql://db/shop?ssl_ca=%2Fca.pem&ssl_check_hostname=false"),
        ("sqlite", {"NAME": "file:memorydb_default?mode=memory&cache=shared"},
         ":///file:memorydb_default?mode=memory&cache=shared&uri=true"),
    ],
)  # fmt: skip
def test_the_url_has_djangos_settings(vendor: str, settings: dict[str, Any], url: str) -> None:
    # SQLAlchemy 2.0 quotes fewer characters.
    assert unquote(url_of(vendor, settings)) == unquote(vendor + url)
    with pytest.raises(e.ConfigError, match=r"oracle.*DELAYTASKS\['database'\]"):
        url_of("oracle", settings)


WRONG: dict[str, Any] = {
    "did you mean horizon": {"horizon_s": 30},
    r"'orders' is not one alias of settings.DATABASES \('default'": {"database": "orders"},
    "name an alias": {"database_url": "sqlite://"},
    "not a Celery app": {"celery_app": "delaytasks.client.DelayTasks"},
    "is a dict": [("horizon", 30)],
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_setting_is_reported_at_the_start(
    message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = WRONG[message]
    if isinstance(options, dict):
        monkeypatch.setattr(django_settings, "celery_app", django_settings.new_celery_app())
        options = {"celery_app": f"{django_settings.__name__}.celery_app", **options}
    with override_settings(DELAYTASKS=options), pytest.raises(e.ConfigError, match=message):
        project_delays.__wrapped__()


# -- `manage.py check` ----------------------------------------------------------------------------

MakeProject = Callable[..., DjangoDelays]


@pytest.fixture
def make_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeProject]:
    """Return a function that makes the project's instance, on SQLite files without tables."""
    from delaytasks.contrib.django import models

    made: list[DjangoDelays] = []

    def make(**settings: Any) -> DjangoDelays:
        made.append(DjangoDelays(django_settings.new_celery_app(), "checked", **settings))
        for module in (checks, models, command):
            monkeypatch.setattr(module, "project_delays", lambda: made[-1])
        return made[-1]

    for name in ("checked", "archive"):
        django_settings.add_database(name, f"sqlite:///{tmp_path / name}.sqlite3")
    yield make
    for delays in made:
        delays.close()
    for name in ("checked", "archive"):
        django_settings.remove_database(name)


def found() -> dict[str, str]:
    """Return the messages and hints of our checks by their ids, as `manage.py check` finds them."""
    messages = run_checks(tags=["delaytasks"])
    assert all(message.hint for message in messages)
    return {each.id.removeprefix("delaytasks."): f"{each.msg} {each.hint}" for each in messages}


def test_only_the_configured_database_has_tables(make_project: MakeProject) -> None:
    table = runtime_of(make_project()).store.schema.tasks.name
    for name in ("checked", "archive"):
        call_command("migrate", database=name, verbosity=0)
        names = connections[name].introspection.table_names()
        assert (table in names) is (name == "checked")


def test_only_a_wrong_horizon_is_a_problem(make_project: MakeProject) -> None:
    make_project()
    assert run_checks(tags=["delaytasks"]) == []
    delays = make_project(horizon=30)
    runtime_of(delays).celery.conf.broker_transport_options = {"visibility_timeout": 20}
    [problem] = run_checks(tags=["delaytasks"])
    assert problem.id == "delaytasks.E001"
    assert "lower the horizon" in f"{problem.msg} {problem.hint}"


# -- `manage.py delays`, which runs the command line with the settings of Django ------------------


def test_manage_py_has_the_commands_of_the_command_line_and_passes_their_options_on(
    make_project: MakeProject, capsys: pytest.CaptureFixture[str]
) -> None:
    delays = make_project(tags="any")
    migrations.upgrade(runtime_of(delays).store.database)

    def manage(*arguments: str) -> tuple[Any, Any]:
        """Run `manage.py delays …` as Django does, and return its exit code and its output."""
        with pytest.raises(SystemExit) as caught:
            command.Command().run_from_argv(["./manage.py", "delays", *arguments])
        return caught.value.code, capsys.readouterr()

    options = ["--settings=shop.settings", "schedule", "mail", "--delay", "0"]
    code, said = manage(*options, "--pythonpath", "src", "--json", "--", "-1")
    assert (code, json.loads(said.out)["body"]) == (0, -1)
    code, said = manage("list", "--set")  # no abbreviation of --settings
    assert (code, "No such option" in said.err) == (2, True)
    code, said = manage("list", "--help")
    assert (code, "Usage: manage.py delays list " in said.out) == (0, True)
    with pytest.raises(SystemExit):
        command.Command().print_help("manage.py", "delays")
    assert "Usage: manage.py delays" in capsys.readouterr().out

    bodies, output = list[Any](), io.StringIO()
    delays.processor("mail")(bodies.append)
    call_command("delays", "run", "--json", stdout=output)
    assert (json.loads(output.getvalue())["succeeded"], bodies) == (1, [-1])
    with pytest.raises(CommandError, match="7") as caught:
        call_command("delays", "show", "7")
    assert caught.value.returncode == 1
