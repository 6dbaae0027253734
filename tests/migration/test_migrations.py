"""The migrations on each database: they create the schema of the metadata, or adopt an existing
table.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import MetaData, Table, inspect, text

from delaytasks.core.errors import ConfigError, StoreUnavailableError
from delaytasks.core.interfaces import Settlement
from delaytasks.core.states import Status
from delaytasks.storage import migrations
from delaytasks.storage.database import Database
from delaytasks.storage.schema import build_schema
from delaytasks.storage.store import Store
from tests.conftest import settings_for

UTC = timezone.utc
ROOT = Path(__file__).parents[2]
PREFIX = "m_"
TASKS = PREFIX + "yb_delay_task_message"
MISSION = [
    "id",
    "tag",
    "message_body",
    "status",
    "error_stack",
    "version",
    "ip_address",
    "delay_time",
]
MISSION += ["expected_time", "execution_time", "create_time", "update_time"]

#: An existing task table of another program: narrower types, NULLs allowed, times without zone or
#: fraction.
FOREIGN = {
    "postgresql": """
        CREATE TABLE {t} (
            id serial PRIMARY KEY, tag text NOT NULL, message_body jsonb, status int DEFAULT 0,
            error_stack varchar(4000), version int, ip_address bigint NOT NULL DEFAULT 0,
            delay_time int,
            expected_time timestamp,
            execution_time timestamp, create_time timestamp DEFAULT now(), update_time timestamp,
            note text)""",
    "mysql": """
        CREATE TABLE {t} (
            id int NOT NULL AUTO_INCREMENT PRIMARY KEY, tag varchar(100) NOT NULL,
            message_body text, status tinyint,
            error_stack text, version int DEFAULT NULL,
            ip_address int unsigned NOT NULL DEFAULT 0, delay_time int,
            expected_time timestamp NULL, execution_time datetime,
            create_time timestamp NOT NULL DEFAULT
            CURRENT_TIMESTAMP ON UPDATE CURRENT_TIMESTAMP, update_time datetime, note text,
            KEY {p}idx_expectedtime_status (expected_time)) ENGINE = MyISAM CHARSET = utf8mb3""",
    "sqlite": """
        CREATE TABLE {t} (
            id integer PRIMARY KEY AUTOINCREMENT, tag text NOT NULL, message_body text,
            status int, error_stack text,
            version int, ip_address int NOT NULL DEFAULT 0, delay_time int, expected_time text,
            execution_time text,
            create_time text DEFAULT CURRENT_TIMESTAMP, update_time text, note text)""",
}
ROWS = [
    # (id, status, version, delay_time, expected_time, create_time)
    (1, 0, None, 60, None, "2026-01-02 03:04:05"),
    (2, None, 4, None, "2026-01-02 03:04:06", "2026-01-02 03:04:05"),
    (3, 1, 2, 10, "2026-01-02 03:04:15", "2026-01-02 03:04:05"),
    (7, 3, 1, 10, "2026-01-02 03:04:15", "2026-01-02 03:04:05"),
]


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    _drop(database, None)
    yield database
    _drop(database, None)
    database.dispose()


def _drop(database: Database, schema: str | None) -> None:
    with database.begin() as connection:
        for name in inspect(connection).get_table_names(schema=schema):
            if name.startswith((PREFIX, "yb_", "f_")):
                Table(name, MetaData(), schema=schema).drop(connection)


def _make_foreign(database: Database, rows: list[Any] = ROWS) -> None:
    insert = text(
        f"INSERT INTO {TASKS} (id, tag, message_body, status, version, delay_time, expected_time, "
        "create_time, "
        "update_time, note) VALUES (:id, 'mail', '{\"n\": 1}', :status, :version, :delay, "
        ":expected, :created, "
        ":created, 'mine')"
    )
    with database.begin() as connection:
        connection.exec_driver_sql(
            FOREIGN[database.url.get_backend_name()].format(t=TASKS, p=PREFIX)
        )
        if connection.dialect.name == "mysql":
            connection.exec_driver_sql("SET time_zone = '+00:00'")
        for row in rows:
            values = dict(
                zip(("id", "status", "version", "delay", "expected", "created"), row, strict=True)
            )
            connection.execute(insert, values)
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql(f"SELECT setval('{TASKS}_id_seq', 20)")
        if connection.dialect.name == "mysql":
            connection.exec_driver_sql("SET time_zone = DEFAULT")


def _differences(database: Database, prefix: str, schema: str | None) -> list[Any]:
    metadata = build_schema(prefix, schema).metadata
    wanted = {table.name for table in metadata.tables.values()}
    options = {
        **migrations.comparison(database.url.get_backend_name()),
        "include_schemas": schema is not None,
        "include_name": lambda name, kind, parents: (
            name == schema if kind == "schema" else kind != "table" or name in wanted
        ),
    }
    with database.begin() as connection:
        context = MigrationContext.configure(connection, opts=options)
        found: list[Any] = compare_metadata(context, metadata)
        return found


def _shape(database: Database, name: str, schema: str | None = None) -> dict[str, Any]:
    """Return all properties of a table that the database reports, except column order and index
    names.
    """
    with database.begin() as connection:
        inspector, dialect = inspect(connection), connection.dialect
        shape: dict[str, Any] = {
            "key": inspector.get_pk_constraint(name, schema=schema)["constrained_columns"]
        }
        for column in inspector.get_columns(name, schema=schema):
            kind = (
                column["type"].compile(dialect=dialect),
                getattr(column["type"], "collation", None),
            )
            rest = {k: v for k, v in column.items() if k not in ("name", "type", "comment")}
            shape[f"column {column['name']}"] = (kind, rest)
        for index in inspector.get_indexes(name, schema=schema):
            options = {
                option: str(value) for option, value in index.get("dialect_options", {}).items()
            }
            shape[f"index on {index['column_names']}, {options}"] = bool(index["unique"])
        for option, value in inspector.get_table_options(name, schema=schema).items():
            if "auto_increment" not in option:
                shape[f"option {option}"] = value
        if dialect.name == "postgresql":
            storage = text("SELECT reloptions FROM pg_class WHERE oid = to_regclass(:name)")
            shape["storage"] = connection.execute(storage, {"name": name}).scalar()
        return shape


def _store(database: Database, schema: str = "") -> Store:
    url = database.url.render_as_string(hide_password=False)
    return Store(url, settings_for(url, table_prefix=PREFIX, table_schema=schema))


def _insert_by_plain_sql(database: Database, tag: str) -> None:
    now = {"postgresql": "now()", "sqlite": "datetime('now')"}.get(
        database.url.get_backend_name(), "UTC_TIMESTAMP()"
    )
    with database.begin() as connection:
        connection.exec_driver_sql(
            f"INSERT INTO {TASKS} (tag, message_body, status, version, delay_time, expected_time, "
            "create_time, "
            f"update_time) VALUES ('{tag}', '{{}}', 0, 0, 0, {now}, {now}, {now})"
        )


def _claims_and_settles(database: Database, tag: str) -> bool:
    store = _store(database)
    try:
        claims = store.claims("w", 0x7F000001)
        claimed = [task for task in claims.claim_due("default", [0], 10) if task.tag == tag]
        assert claims.settle([Settlement(task, "succeed") for task in claimed]) == {
            task.id for task in claimed
        }
        return [store.tasks.get(task.id).status for task in claimed] == [Status.DONE]  # type: ignore[union-attr]
    finally:
        store.close()


def test_upgrade_builds_exactly_the_metadatas_schema(database: Database) -> None:
    assert migrations.current(database, PREFIX) is None
    migrations.upgrade(database, PREFIX)
    assert migrations.is_current(database, PREFIX)
    assert migrations.current(database, PREFIX) == migrations.head()
    assert _differences(database, PREFIX, None) == []


def test_the_schema_comparison_detects_a_difference(database: Database) -> None:
    migrations.upgrade(database, PREFIX)
    with database.begin() as connection:
        connection.exec_driver_sql(f"ALTER TABLE {TASKS} ADD COLUMN more integer")
        connection.exec_driver_sql(f"DROP TABLE {PREFIX}yb_delay_worker")
        connection.exec_driver_sql(f"ALTER TABLE {TASKS} DROP COLUMN attempts")
        connection.exec_driver_sql(
            f"ALTER TABLE {TASKS} ADD COLUMN attempts integer NOT NULL DEFAULT 7"
        )
    kinds = [d[0][0] if isinstance(d, list) else d[0] for d in _differences(database, PREFIX, None)]
    assert sorted(kinds) == ["add_table", "modify_default", "remove_column"]


def test_the_statements_for_frameworks_create_the_same_tables(database: Database) -> None:
    migrations.upgrade(database, PREFIX)
    with database.begin() as connection:
        for statement in migrations.ddl(database.url.get_backend_name(), "f_"):
            connection.exec_driver_sql(statement)
    for name in (
        "task_message",
        "task_key",
        "attempt",
        "sweep",
        "worker",
        "policy",
        "policy_change",
        "waitlist",
    ):
        assert _shape(database, "f_yb_delay_" + name) == _shape(
            database, PREFIX + "yb_delay_" + name
        )


def test_a_table_that_a_framework_created_is_accepted_unchanged(database: Database) -> None:
    with database.begin() as connection:
        for statement in migrations.ddl(database.url.get_backend_name(), PREFIX):
            connection.exec_driver_sql(statement)
    migrations.upgrade(database, PREFIX)
    assert _differences(database, PREFIX, None) == []


def test_downgrade_drops_the_tables_and_upgrade_creates_them_again(database: Database) -> None:
    migrations.upgrade(database, PREFIX)
    migrations.upgrade(database, PREFIX)  # a second upgrade has no effect
    migrations.downgrade(database, PREFIX, None, "base")
    assert migrations.current(database, PREFIX) is None
    with database.begin() as connection:
        left = {name for name in inspect(connection).get_table_names() if name.startswith(PREFIX)}
    assert left == {migrations.version_table(PREFIX)}
    migrations.upgrade(database, PREFIX)
    assert _differences(database, PREFIX, None) == []


def test_downgrade_never_drops_a_row(database: Database) -> None:
    migrations.upgrade(database, PREFIX)
    _insert_by_plain_sql(database, "precious")
    migrations.downgrade(database, PREFIX, None, "base")
    with database.begin() as connection:
        assert connection.exec_driver_sql(f"SELECT tag FROM {TASKS}").scalar() == "precious"
        assert [column["name"] for column in inspect(connection).get_columns(TASKS)] == MISSION
        indexes = {index["name"] for index in inspect(connection).get_indexes(TASKS)}
        assert indexes == {PREFIX + "idx_expectedTime_status"}
    migrations.upgrade(database, PREFIX)
    assert _differences(database, PREFIX, None) == []
    assert _claims_and_settles(database, "precious")


def test_an_existing_table_is_adopted_with_its_rows(database: Database) -> None:
    _make_foreign(database)
    migrations.upgrade(database, PREFIX)
    with database.begin() as connection:
        assert connection.exec_driver_sql(f"SELECT DISTINCT note FROM {TASKS}").scalars().all() == [
            "mine"
        ]
        connection.exec_driver_sql(f"ALTER TABLE {TASKS} DROP COLUMN note")
    assert _differences(database, PREFIX, None) == []
    migrations.upgrade(database, "f_")
    assert _shape(database, TASKS) == _shape(database, "f_yb_delay_task_message")

    store = _store(database)
    tasks = {task.id: task for task in store.tasks.find(None, None, None, None, None, None, 10)}
    created = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert {id: task.create_time for id, task in tasks.items()} == dict.fromkeys(
        (1, 2, 3, 7), created
    )
    assert [(tasks[i].status, tasks[i].version, tasks[i].delay_s) for i in (1, 2, 3, 7)] == [
        (Status.NOT_COMPLETE, 0, 60),
        (Status.NOT_COMPLETE, 4, 0),
        (Status.DONE, 2, 10),
        (Status.RUNNING, 1, 10),
    ]
    assert tasks[1].expected_time == created + timedelta(seconds=60)
    assert tasks[2].expected_time == created + timedelta(seconds=1)
    assert all(task.body == {"n": 1} and task.update_time == created for task in tasks.values())
    # A row that ran before the adoption has no worker. It gets a lease, so that the sweep finds it.
    lease = tasks[7].lease_until
    assert lease is not None
    assert timedelta(seconds=50) < lease - store.tasks.now() <= timedelta(seconds=60)
    store.close()

    _insert_by_plain_sql(database, "new")
    with database.begin() as connection:
        given = connection.execute(text(f"SELECT id FROM {TASKS} WHERE tag = 'new'")).scalar_one()
    assert given == (21 if database.url.get_backend_name() == "postgresql" else 8)
    assert _claims_and_settles(database, "new")


@pytest.mark.parametrize("rows", [ROWS, []], ids=["with rows", "empty"])
def test_downgrade_leaves_an_adopted_table_to_its_owner(
    database: Database, rows: list[Any]
) -> None:
    _make_foreign(database, rows)
    migrations.upgrade(database, PREFIX)
    migrations.downgrade(database, PREFIX, None, "base")
    with database.begin() as connection:
        assert connection.exec_driver_sql(f"SELECT count(*) FROM {TASKS}").scalar() == len(rows)
        assert {c["name"] for c in inspect(connection).get_columns(TASKS)} == {*MISSION, "note"}
    migrations.upgrade(database, PREFIX)
    with database.begin() as connection:
        connection.exec_driver_sql(f"ALTER TABLE {TASKS} DROP COLUMN note")
    assert _differences(database, PREFIX, None) == []


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        ("message_body", "body", "no column 'message_body'"),
        ("note text", "note text, must int NOT NULL", r"must is NOT NULL without a default"),
        (
            "tag (text|varchar.100.) NOT NULL",
            "tag varchar(200)",
            "1 rows whose tag is NULL or longer than 128",
        ),
        (
            " PRIMARY KEY( AUTOINCREMENT)?(.*tag)",
            r" UNIQUE\2",
            r"primary key of .* is \(tag\); make it \(id\)",
        ),
    ],
)
def test_a_table_that_cannot_be_adopted_is_left_unchanged(
    database: Database, ours: str, theirs: str, message: str
) -> None:
    made = FOREIGN[database.url.get_backend_name()].format(t=TASKS, p=PREFIX)
    made = re.sub(ours, theirs, made)
    if "UNIQUE" in theirs:
        made = made.replace("note text", "note text, PRIMARY KEY (tag)")
    with database.begin() as connection:
        connection.exec_driver_sql(made)
        if "200" in theirs:
            connection.execute(text(f"INSERT INTO {TASKS} (tag) VALUES (:tag)"), {"tag": "x" * 129})
    before = _shape(database, TASKS)
    with pytest.raises(ConfigError, match=message):
        migrations.upgrade(database, PREFIX)
    assert _shape(database, TASKS) == before
    assert migrations.current(database, PREFIX) is None


def test_an_unknown_status_of_another_program_does_not_prevent_adoption(database: Database) -> None:
    _make_foreign(database, [(1, 9, 0, 0, *["2026-01-02 03:04:05"] * 2)])
    migrations.upgrade(database, PREFIX)
    store = _store(database)
    assert store.claims("w", None).claim_due("default", [0], 10) == []
    found = store.tasks.get(1)
    assert found is not None
    assert int(found.status) == 9
    store.close()


def test_times_that_were_written_in_iso_form_are_due_on_time_on_sqlite(
    sqlite_path: Callable[[], str],
) -> None:
    database = Database(sqlite_path())
    now = datetime.now(UTC)
    past, future = now - timedelta(minutes=1), now + timedelta(minutes=1)
    east = timezone(timedelta(hours=2))
    iso_times = [
        past.isoformat(),
        past.strftime("%Y-%m-%dT%H:%M:%SZ"),
        past.astimezone(east).isoformat(" "),
        future.isoformat(),
        future.strftime("%Y-%m-%dT%H:%M:%SZ"),
        future.astimezone(east).isoformat(" "),
    ]
    _make_foreign(database, [(n, 0, 0, 0, *[time] * 2) for n, time in enumerate(iso_times, 1)])
    migrations.upgrade(database, PREFIX)
    store = _store(database)
    assert sorted(task.id for task in store.claims("w", None).claim_due("default", [0], 10)) == [
        1,
        2,
        3,
    ]
    waiting = store.tasks.find(None, Status.NOT_COMPLETE, None, None, None, None, 10).tasks
    assert {task.id for task in waiting} == {4, 5, 6}
    assert all(abs(task.expected_time - future) < timedelta(seconds=1.1) for task in waiting)
    store.close()
    database.dispose()


def test_simultaneous_migrations_run_one_after_the_other(database: Database) -> None:
    # Separate processes, since Alembic's lock within one process would hide a missing database
    # lock.
    script = (
        "import sys; from delaytasks.storage import migrations; from delaytasks.storage.database "
        "import Database; "
        "database = Database(sys.argv[1]); database.alone(str); print('ready', flush=True); "
        "input(); "
        f"migrations.upgrade(database, {PREFIX!r})"
    )
    url = database.url.render_as_string(hide_password=False)
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    processes = [
        subprocess.Popen([sys.executable, "-c", script, url], cwd=ROOT, text=True, **pipes)
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.communicate(timeout=60)[1] for process in processes] == [""] * 4
    assert [process.returncode for process in processes] == [0] * 4
    assert _differences(database, PREFIX, None) == []


def test_a_migration_does_not_queue_behind_a_long_transaction(
    postgresql_url: str, monkeypatch: Any
) -> None:
    database = Database(postgresql_url)
    _drop(database, None)
    _make_foreign(database)
    monkeypatch.setattr(migrations, "TABLE_LOCK_TIMEOUT_S", 0.05)
    with database.begin() as reader:
        reader.execute(text(f"SELECT 1 FROM {TASKS}"))
        with pytest.raises(StoreUnavailableError, match="lock timeout"):
            migrations.upgrade(database, PREFIX)
    migrations.upgrade(database, PREFIX)
    _drop(database, None)
    database.dispose()


def test_a_configured_schema_is_created_and_used_on_postgresql(postgresql_url: str) -> None:
    database = Database(postgresql_url)
    migrations.upgrade(database, PREFIX, "delays")
    assert migrations.is_current(database, PREFIX, "delays")
    assert not migrations.is_current(database, PREFIX)
    assert _differences(database, PREFIX, "delays") == []
    with database.begin() as connection:
        assert {n for n in inspect(connection).get_table_names() if n.startswith(PREFIX)} == set()
        assert migrations.version_table(PREFIX) in inspect(connection).get_table_names(
            schema="delays"
        )
    migrations.downgrade(database, PREFIX, "delays", "base")
    with database.begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA delays CASCADE")
    database.dispose()


def test_a_database_gets_its_shard_number_once(database: Database) -> None:
    def number() -> int | None:
        return database.alone(lambda c: migrations.number_of(c, build_schema(PREFIX)))

    assert number() is None
    migrations.upgrade(database, PREFIX, shard=2)
    migrations.upgrade(database, PREFIX, shard=2)
    assert number() == 2
    with pytest.raises(ConfigError, match=r"is shard 2, but has position 0 .*keeps its position"):
        migrations.upgrade(database, PREFIX)
    migrations.downgrade(database, PREFIX, None, "0003")
    assert number() is None
    # an old revision without shard numbers
    migrations.upgrade(database, PREFIX, revision="0003", shard=2)
    migrations.upgrade(database, PREFIX, shard=2)
    assert number() == 2


def test_a_table_that_cannot_store_emoji_is_reported_with_the_remedy(mysql_url: str) -> None:
    database = Database(mysql_url)
    _drop(database, None)
    store = _store(database)
    with database.begin() as connection:
        connection.exec_driver_sql(
            f"CREATE TABLE {TASKS} (id bigint PRIMARY KEY, tag varchar(128), message_body text) "
            "CHARSET utf8mb3"
        )
    with pytest.raises(ConfigError, match=r"utf8mb3.*ALTER TABLE") as caught:
        migrations.check_charset(database, store.schema)
    with database.begin() as connection:
        connection.exec_driver_sql(str(caught.value).rpartition("run: ")[2])
    migrations.check_charset(database, store.schema)
    store.close()
    _drop(database, None)
    database.dispose()


def test_alembics_own_command_takes_the_url_of_the_settings(tmp_path: Path) -> None:
    url, other = (f"sqlite:///{tmp_path / name}.sqlite3" for name in "ab")
    _alembic(
        "upgrade", "head", DELAYTASKS_DATABASE_URL=f"{other} {url}", DELAYTASKS_TABLE_PREFIX=PREFIX
    )
    assert migrations.is_current(Database(other), PREFIX)
    database = Database(url)
    assert migrations.is_current(database, PREFIX)
    shown = _alembic("-x", f"url={url}", "-x", f"prefix={PREFIX}", "current")
    assert f"{migrations.head()} (head)" in shown
    _alembic("-x", f"url={url}", "-x", f"prefix={PREFIX}", "check")
    _alembic("-x", f"url={url}", "-x", f"prefix={PREFIX}", "downgrade", "base")
    assert migrations.current(database, PREFIX) is None
    database.dispose()


def _alembic(*arguments: str, **environ: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "alembic", *arguments], cwd=ROOT, env={**os.environ, **environ},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_migration_can_be_written_as_sql_without_a_database() -> None:
    shown = _alembic("-x", "url=postgresql://nowhere/x", "upgrade", "head", "--sql")
    assert "CREATE TABLE yb_delay_task_message" in shown
    assert 'CREATE INDEX "idx_expectedTime_status"' in shown


def test_the_next_upgrade_finishes_an_interrupted_migration(mysql_url: str) -> None:
    database = Database(mysql_url)
    _drop(database, None)
    migrations.upgrade(database, PREFIX)
    with database.begin() as connection:
        for statement in (
            f"DROP TABLE {PREFIX}yb_delay_worker",
            f"DROP INDEX {PREFIX}idx_yb_delay_hot ON {TASKS}",
            f"DELETE FROM {migrations.version_table(PREFIX)}",
        ):
            connection.exec_driver_sql(statement)
    migrations.upgrade(database, PREFIX)
    assert _differences(database, PREFIX, None) == []
    _drop(database, None)
    database.dispose()
