"""The migrations as commands of our own, which run where only the package is installed.

Alembic is imported by the functions that migrate, so that producers and workers do not load it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, String, Table, column, func, inspect, select, table, text
from sqlalchemy.schema import CreateSchema

from delaytasks.db.database import Database
from delaytasks.db.engines import create_sqlite_file, lacks_sqlite_file
from delaytasks.db.schema import Schema
from delaytasks.db.types import for_database
from delaytasks.model.errors import ConfigError, StoreUnavailableError
from delaytasks.settings import Settings

if TYPE_CHECKING:
    from alembic.config import Config
    from alembic.operations import Operations

Connect = Callable[[], AbstractContextManager[Connection]]
#: A migration that waits for a lock blocks every statement behind it, so it gives up soon and is
#: tried again.
TABLE_LOCK_TIMEOUT_S = 2
#: Two deployments that migrate simultaneously take turns.
_TURN_S = 60


def upgrade(
    database: Database,
    prefix: str = "",
    schema: str | None = None,
    revision: str = "head",
    connect: Connect | None = None,
) -> None:
    """Migrate to `revision`. `connect` begins the transaction of a framework's own connection."""
    from alembic import command

    create_sqlite_file(database.url)
    _run(database, prefix, schema, lambda config: command.upgrade(config, revision), connect)


def downgrade(
    database: Database,
    prefix: str = "",
    schema: str | None = None,
    revision: str = "-1",
    connect: Connect | None = None,
) -> None:
    from alembic import command

    _run(database, prefix, schema, lambda config: command.downgrade(config, revision), connect)


def current(database: Database, prefix: str = "", schema: str | None = None) -> str | None:
    """Return the revision of this database; None before the first."""
    if lacks_sqlite_file(database.url):
        return None
    name = version_table(prefix)
    revision = select(
        table(name, column("version_num", String()), schema=schema or None).c.version_num
    )

    def work(connection: Connection) -> str | None:
        is_there = inspect(connection).has_table(name, schema or None)
        return connection.execute(revision).scalar() if is_there else None

    return database.autocommitted(work)


def has_tables(database: Database, schema: Schema) -> bool:
    """Return whether this database has the task table, also if no revision is stored."""
    if lacks_sqlite_file(database.url):
        return False
    tasks = schema.tasks
    return bool(database.autocommitted(lambda c: inspect(c).has_table(tasks.name, tasks.schema)))


def head() -> str:
    """Return the newest revision of this package."""
    # The name of each file begins with its revision.
    return max(
        script.name.partition("_")[0] for script in (scripts() / "versions").glob("[0-9]*_*.py")
    )


def version_table(prefix: str) -> str:
    return prefix + "yb_delay_alembic_version"


def url_of(settings: Settings) -> str:
    return settings.database_url or (
        f"sqlite:///{Path(settings.data_dir).absolute() / 'delays.sqlite3'}"
    )


def create_tables(op: Operations, prefix: str, schema: str | None) -> None:
    """Make the tables and indexes that are missing; the first revision calls this.

    MySQL commits each statement by itself, so a migration can stop half-way and is then repeated.
    A task table can also be there because its owner made it (docs/first-task.md).
    """
    bind, looks = op.get_bind(), not op.get_context().as_sql
    tables = Schema(prefix, schema)
    if looks:
        _check_columns(bind, tables.tasks)
    tables.metadata.create_all(bind, checkfirst=looks)
    if looks:
        for index in (index for each in tables.metadata.sorted_tables for index in each.indexes):
            index.create(bind, checkfirst=True)


def drop_tables(op: Operations, prefix: str, schema: str | None) -> None:
    """Drop the tables. A task table that has rows stays, and so it does if nobody can look."""
    bind, looks = op.get_bind(), not op.get_context().as_sql
    tables = Schema(prefix, schema)
    dropped = [each for each in tables.metadata.sorted_tables if each is not tables.tasks]
    rows = select(tables.tasks.c.id).limit(1)
    is_there = looks and inspect(bind).has_table(tables.tasks.name, schema)
    if is_there and bind.execute(rows).first() is None:
        dropped.append(tables.tasks)
    tables.metadata.drop_all(bind, dropped, checkfirst=looks)


def _check_columns(bind: Connection, tasks: Table) -> None:
    found = inspect(bind)
    if not found.has_table(tasks.name, tasks.schema):
        return
    present = {one["name"] for one in found.get_columns(tasks.name, tasks.schema)}
    missing = [column.name for column in tasks.c if column.name not in present]
    if missing:
        raise ConfigError(
            f"{tasks.fullname} exists without the columns {', '.join(missing)}; if the table is "
            "yours, add them (docs/first-task.md, You already have the table), otherwise give "
            "delaytasks' tables a prefix (setting table_prefix)"
        )


#: The columns that cannot store every character.
_NARROW_COLUMNS = """
SELECT column_name, character_set_name FROM information_schema.columns
WHERE table_name = :name AND table_schema = COALESCE(:schema, DATABASE())
AND column_name IN ('tag', 'message_body', 'error_stack') AND character_set_name <> 'utf8mb4'
"""


def check_charset(database: Database, schema: Schema) -> None:
    """Raise `ConfigError` if the task table cannot store every character; MySQL and MariaDB
    only."""
    if not for_database(database.backend, postgresql=False, mysql=True, sqlite=False):
        return
    query, tasks = text(_NARROW_COLUMNS), schema.tasks
    values = {"name": tasks.name, "schema": tasks.schema}
    narrow = database.autocommitted(lambda c: c.execute(query, values).all())
    if narrow:
        columns = ", ".join(f"{row[0]} is {row[1]}" for row in narrow)
        raise ConfigError(
            f"{schema.tasks.fullname} cannot store every character, for example emoji, since "
            f"{columns}; run: ALTER TABLE {schema.tasks.fullname} "
            "CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
        )


@contextmanager
def exclusively(connection: Connection, prefix: str, schema: str | None) -> Iterator[None]:
    """Run alone on this database, with short waits for locks. alembic/env.py uses this too."""
    name = f"{schema or ''}.{version_table(prefix)}"
    alone: Any = for_database(
        connection.dialect.name,
        postgresql=_alone_on_postgresql,
        mysql=_alone_on_mysql,
        sqlite=lambda *_: nullcontext(),  # SQLite's writers take turns anyway
    )
    with alone(connection, name):
        if schema and schema not in inspect(connection).get_schema_names():
            connection.execute(CreateSchema(schema))
        yield


@contextmanager
def _alone_on_postgresql(connection: Connection, name: str) -> Iterator[None]:
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{_TURN_S}s'")
    connection.execute(select(func.pg_advisory_xact_lock(func.hashtext(name))))
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{TABLE_LOCK_TIMEOUT_S}s'")
    yield


@contextmanager
def _alone_on_mysql(connection: Connection, name: str) -> Iterator[None]:
    lock = name[-64:]
    if not connection.execute(select(func.get_lock(lock, _TURN_S))).scalar():
        raise StoreUnavailableError(f"another migration of {name} has run for {_TURN_S} s")
    connection.exec_driver_sql(f"SET SESSION lock_wait_timeout = {TABLE_LOCK_TIMEOUT_S}")
    try:
        yield
        # The revision is written last, and the next migration must see it.
        connection.exec_driver_sql("COMMIT")
    finally:
        connection.exec_driver_sql("SET SESSION lock_wait_timeout = DEFAULT")
        connection.execute(select(func.release_lock(lock)))


def comparison(dialect: str) -> dict[str, Any]:
    """Return the options of Alembic's comparison. An index may be for one dialect only."""

    def is_there(item: Any, *_: Any) -> bool:
        condition = getattr(item, "_ddl_if", None)
        return condition is None or condition.dialect == dialect

    # Alembic compares an identity, which other databases do not have, as a default.
    defaults = for_database(dialect, postgresql=True, mysql=False, sqlite=False)
    return {"compare_server_default": defaults, "include_object": is_there}


def _run(
    database: Database,
    prefix: str,
    schema: str | None,
    work: Callable[[Config], None],
    connect: Connect | None,
) -> None:
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(scripts()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")

    def once(connection: Connection) -> None:
        config.attributes.update(connection=connection, prefix=prefix, schema=schema)
        try:
            work(config)
        except CommandError as error:
            raise ConfigError(f"the migration cannot run: {error}") from error

    database.repeat(once, connect or database.tx.begin)


def scripts() -> Path:
    """Return the folder `alembic`: inside the installed package, or next to it in the project."""
    package = Path(__file__).parents[1]
    for folder in (package / "alembic", package.parent / "alembic"):
        # In an installation the second folder belongs to Alembic itself.
        if (folder / "versions" / "0001_tables.py").exists():
            return folder
    raise ConfigError(f"the migrations are missing from {package}: install delaytasks again")
