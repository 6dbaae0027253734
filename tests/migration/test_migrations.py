"""Tables, and how they are made and changed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import MetaData, Table, inspect, text

from delaytasks import ConfigError, Status, StoreUnavailableError
from delaytasks.db import migrations
from delaytasks.db.database import Database
from delaytasks.db.engines import create_sqlite_file
from delaytasks.db.schema import Schema
from delaytasks.runtime import runtime_of
from tests.doc_pages import block_beginning
from tests.running import ROOT, output_of
from tests.world.recording import delays_on, runner_of

pytestmark = pytest.mark.slow

PREFIX = "m_"
TASKS = PREFIX + "yb_delay_task_message"


def drop_tables(database: Database) -> None:
    with database.begin() as connection:
        for name in inspect(connection).get_table_names():
            if name.startswith((PREFIX, "yb_", "f_")):
                Table(name, MetaData()).drop(connection)


def schema_differences(database: Database, prefix: str, schema: str | None) -> list[Any]:
    metadata = Schema(prefix, schema).metadata
    wanted = {table.name for table in metadata.tables.values()}
    options = migrations.comparison(database.url.get_backend_name())

    def is_wanted(name: str, kind: str, _parents: Any) -> bool:
        return name == schema if kind == "schema" else kind != "table" or name in wanted

    options = {**options, "include_schemas": schema is not None, "include_name": is_wanted}
    with database.begin() as connection:
        context = MigrationContext.configure(connection, opts=options)
        found: list[Any] = compare_metadata(context, metadata)
        return found


def emptied(url: str) -> Iterator[Database]:
    database = Database(url)
    create_sqlite_file(database.url)
    drop_tables(database)
    yield database
    drop_tables(database)
    database.dispose()


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    yield from emptied(database_url)


@pytest.fixture
def on_postgresql(postgresql_url: str) -> Iterator[Database]:
    yield from emptied(postgresql_url)


@pytest.fixture
def on_mysql(mysql_url: str) -> Iterator[Database]:
    yield from emptied(mysql_url)


# The migrations on each database create the schema of the metadata


def test_the_schema_comparison_detects_a_difference(database: Database) -> None:
    migrations.upgrade(database, PREFIX)
    execute(database, f"DROP TABLE {PREFIX}yb_delay_worker")
    new = "ADD COLUMN delay_time bigint NOT NULL DEFAULT 7"
    for change in ("ADD COLUMN more integer", "DROP COLUMN delay_time", new):
        execute(database, f"ALTER TABLE {TASKS} {change}")
    found = schema_differences(database, PREFIX, None)
    kinds = sorted(each[0][0] if isinstance(each, list) else each[0] for each in found)
    wanted = ["add_table", "modify_default", "remove_column"]
    # Alembic compares defaults on PostgreSQL only.
    assert kinds == (wanted if database.can.copy else [wanted[0], wanted[2]])


def test_upgrade_builds_the_schema_and_downgrade_drops_no_row(database: Database) -> None:
    assert migrations.current(database, PREFIX) is None
    for _ in range(2):  # a second upgrade has no effect
        migrations.upgrade(database, PREFIX)
        assert migrations.current(database, PREFIX) == migrations.head()
        assert schema_differences(database, PREFIX, None) == []
    migrations.downgrade(database, PREFIX, None, "base")
    assert migrations.current(database, PREFIX) is None
    with database.begin() as connection:
        left = {name for name in inspect(connection).get_table_names() if name.startswith(PREFIX)}
    assert left == {migrations.version_table(PREFIX)}
    migrations.upgrade(database, PREFIX)
    execute(database, f"INSERT INTO {TASKS} (tag, message_body) VALUES ('precious', '{{}}')")
    migrations.downgrade(database, PREFIX, None, "base")
    migrations.upgrade(database, PREFIX)
    assert schema_differences(database, PREFIX, None) == []
    url = database.url.render_as_string(hide_password=False)
    with closing(delays_on(url, table_prefix=PREFIX, tags="any")) as delays:
        delays.processor("precious")(lambda body: None)
        assert runner_of(delays).run_due("default", [0], 10).claimed == 1
        assert [task.status for task in delays.find()] == [Status.DONE]


def execute(database: Database, statements: str) -> None:
    with database.begin() as connection:
        for statement in filter(str.strip, statements.split(";")):
            connection.execute(text(statement.replace(":", r"\:")))


def test_a_task_table_of_another_shape_is_left_unchanged(database: Database) -> None:
    execute(database, f"CREATE TABLE {TASKS} (id bigint PRIMARY KEY, tag varchar(9))")
    with pytest.raises(ConfigError, match=r"without the columns message_body, status, .*already"):
        migrations.upgrade(database, PREFIX)
    with database.begin() as connection:
        assert [each["name"] for each in inspect(connection).get_columns(TASKS)] == ["id", "tag"]
        assert inspect(connection).get_indexes(TASKS) == []
    assert migrations.current(database, PREFIX) is None


def test_simultaneous_migrations_run_one_after_the_other(database: Database) -> None:
    # Separate processes, since Alembic's lock within one process would hide a missing database
    # lock.
    script = f"""import sys; from delaytasks.db import migrations
from delaytasks.db.database import Database
database = Database(sys.argv[1]); database.autocommitted(str)
print('ready', flush=True); input(); migrations.upgrade(database, {PREFIX!r})"""
    url = database.url.render_as_string(hide_password=False)
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", script, url]
    processes = [subprocess.Popen(command, cwd=ROOT, text=True, **pipes) for _ in range(4)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        assert (process.communicate(timeout=60)[1], process.returncode) == ("", 0)
    assert schema_differences(database, PREFIX, None) == []


def test_a_migration_does_not_queue_behind_a_long_transaction(
    on_postgresql: Database, monkeypatch: Any
) -> None:
    database = on_postgresql
    migrations.upgrade(database, PREFIX)
    # As if the migration had stopped there.
    forget = f"DELETE FROM {migrations.version_table(PREFIX)}"
    execute(database, f"DROP INDEX {PREFIX}idx_yb_delay_hot; {forget}")
    monkeypatch.setattr(migrations, "TABLE_LOCK_TIMEOUT_S", 0.05)
    monkeypatch.setattr(migrations, "_TURN_S", 20)
    with database.begin() as writer:
        writer.execute(text(f"DELETE FROM {TASKS}"))
        began = time.monotonic()
        with pytest.raises(StoreUnavailableError, match="lock timeout"):
            migrations.upgrade(database, PREFIX)
    assert time.monotonic() - began < 10
    migrations.upgrade(database, PREFIX)


def test_a_configured_schema_is_created_and_used_on_postgresql(on_postgresql: Database) -> None:
    database = on_postgresql
    migrations.upgrade(database, PREFIX, "delays")
    assert migrations.current(database, PREFIX, "delays") == migrations.head()
    assert migrations.current(database, PREFIX) != migrations.head()
    assert schema_differences(database, PREFIX, "delays") == []
    with database.begin() as connection:
        inspector = inspect(connection)
        assert not [n for n in inspector.get_table_names() if n.startswith(PREFIX)]
        assert migrations.version_table(PREFIX) in inspector.get_table_names(schema="delays")
    execute(database, "DROP SCHEMA delays CASCADE")


def test_a_table_that_cannot_store_emoji_is_reported_with_the_remedy(on_mysql: Database) -> None:
    columns = "id bigint PRIMARY KEY, tag varchar(128), message_body text"
    execute(on_mysql, f"CREATE TABLE {TASKS} ({columns}) CHARSET utf8mb3")
    with pytest.raises(ConfigError, match=r"utf8mb3.*ALTER TABLE") as caught:
        migrations.check_charset(on_mysql, Schema(PREFIX))
    execute(on_mysql, str(caught.value).rpartition("run: ")[2])
    migrations.check_charset(on_mysql, Schema(PREFIX))


def test_alembics_own_command_takes_the_url_of_the_settings(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a'}.sqlite3"
    _alembic("upgrade", "head", DELAYTASKS_DATABASE_URL=url, DELAYTASKS_TABLE_PREFIX=PREFIX)
    database, options = Database(url), ["-x", f"url={url}", "-x", f"prefix={PREFIX}"]
    assert migrations.current(database, PREFIX) == migrations.head()
    assert f"{migrations.head()} (head)" in _alembic(*options, "current")
    _alembic(*options, "check")
    database.dispose()
    shown = _alembic("-x", "url=postgresql://nowhere/x", "upgrade", "head", "--sql")
    assert "CREATE TABLE yb_delay_task_message" in shown, "it needs no database to write SQL"


def _alembic(*arguments: str, **environ: str) -> str:
    command = [sys.executable, "-m", "alembic", *arguments]
    return output_of(command, env={**os.environ, **environ})


def test_the_next_upgrade_finishes_an_interrupted_migration(on_mysql: Database) -> None:
    migrations.upgrade(on_mysql, PREFIX)
    execute(on_mysql, f"DROP TABLE {PREFIX}yb_delay_worker")
    execute(on_mysql, f"DROP INDEX {PREFIX}idx_yb_delay_hot ON {TASKS}")
    execute(on_mysql, f"DELETE FROM {migrations.version_table(PREFIX)}")
    migrations.upgrade(on_mysql, PREFIX)
    assert schema_differences(on_mysql, PREFIX, None) == []


# A task table that another program made is brought into form by the documented statements


EXISTING = "yb_delay_task_message"
#: The columns of the design. Types are wider and narrower than those of delaytasks.
TABLES = {
    "postgresql": f"""
        CREATE TABLE {EXISTING} (
            id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, tag varchar(100) NOT NULL,
            message_body text NOT NULL, status integer NOT NULL, error_stack varchar(4000),
            version bigint NOT NULL, ip_address bigint, delay_time bigint NOT NULL,
            expected_time timestamp NOT NULL, execution_time timestamp,
            create_time timestamp NOT NULL DEFAULT now(), update_time timestamp NOT NULL);
        CREATE INDEX "idx_expectedTime_status" ON {EXISTING} (expected_time, status)""",
    "mysql": f"""
        CREATE TABLE {EXISTING} (
            id bigint NOT NULL AUTO_INCREMENT PRIMARY KEY, tag varchar(128) NOT NULL,
            message_body text NOT NULL, status int NOT NULL, error_stack text,
            version bigint NOT NULL, ip_address bigint, delay_time bigint NOT NULL,
            expected_time datetime NOT NULL, execution_time datetime,
            create_time timestamp NOT NULL DEFAULT CURRENT_TIMESTAMP, update_time datetime NOT NULL,
            KEY idx_expectedTime_status (expected_time, status)) CHARSET = utf8mb3""",
}
BLOCKS = {"postgresql": "ALTER TABLE yb_delay", "mysql": "SET time_zone = '+00:00';\nALTER TABLE"}
#: A row that waits, one that is done, one that runs, and one that is due in the year 2100.
ROWS = [(1, 0, "2026-01-02"), (2, 1, "2026-01-02"), (3, 3, "2026-01-02"), (4, 0, "2100-01-02")]


def constraints(database: Database, name: str) -> list[str]:
    with database.begin() as connection:
        return [each["sqltext"] for each in inspect(connection).get_check_constraints(name)]


@pytest.mark.parametrize("server", sorted(TABLES))
def test_the_documented_statements_make_an_existing_table_valid(
    server: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(f"{server}_url")
    database: Database = request.getfixturevalue(f"on_{server}")
    execute(database, TABLES[server])
    for id, status, due in ROWS:
        row = f"{id}, 'mail', '{{}}', {status}, NULL, 7, NULL, 60, '{due}', NULL"
        execute(database, f"INSERT INTO {EXISTING} VALUES ({row}, '2026-01-01', '2026-01-01')")
    execute(database, block_beginning("docs/first-task.md", BLOCKS[server]).text)
    migrations.upgrade(database)
    assert schema_differences(database, "", None) == []
    migrations.upgrade(database, "f_")
    assert constraints(database, EXISTING) == constraints(database, "f_" + EXISTING)

    ran: list[int] = []
    with closing(delays_on(url, purge_after=None)) as delays:
        delays.processor("mail")(lambda body, task: ran.append(task.id))
        new = delays.schedule_delay("mail", {}, 0)
        assert runtime_of(delays).sweeper.sweep(0)
        while runner_of(delays).run_due("default", [0], 30).claimed:
            pass
        assert sorted(ran) == [1, 3, new.id]
        assert {task.id for task in delays.find(status="DONE")} == {1, 2, 3, new.id}
