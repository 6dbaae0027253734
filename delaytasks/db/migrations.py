"""The migrations as commands of our own, which run where only the package is installed.

Alembic is imported by the functions that migrate, so that producers and workers do not load it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import DDL, Connection, String, Table, column, func, inspect, select, table, text
from sqlalchemy.dialects import registry
from sqlalchemy.engine import Dialect
from sqlalchemy.schema import (
    CreateIndex,
    CreateSchema,
    CreateTable,
    DropTable,
    ExecutableDDLElement,
)

from delaytasks.db.database import Database
from delaytasks.db.engines import create_sqlite_file, lacks_sqlite_file
from delaytasks.db.schema import Schema, build_schema
from delaytasks.db.types import for_database
from delaytasks.model.errors import ConfigError, StoreUnavailableError
from delaytasks.settings import Settings

if TYPE_CHECKING:
    from alembic.config import Config
    from alembic.operations import Operations

#: A migration that waits for a lock blocks every statement behind it, so it gives up soon and is
#: tried again.
TABLE_LOCK_TIMEOUT_S = 2
#: Two deployments that migrate simultaneously take turns.
_TURN_S = 60

#: Alembic's `context` and `op` are global to the process.
_alembic = threading.Lock()


def upgrade(
    database: Database, prefix: str = "", schema: str | None = None, revision: str = "head"
) -> None:
    """Migrate to `revision`."""
    from alembic import command

    create_sqlite_file(database.url)
    _run(database, prefix, schema, lambda config: command.upgrade(config, revision))


def downgrade(
    database: Database, prefix: str = "", schema: str | None = None, revision: str = "-1"
) -> None:
    from alembic import command

    _run(database, prefix, schema, lambda config: command.downgrade(config, revision))


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


def ddl(dialect: str, prefix: str = "", schema: str | None = None) -> list[str]:
    """Return the statements that make the tables, for frameworks with migrations of their own."""
    made: Dialect = registry.load(dialect)()
    return [
        str(statement.compile(dialect=made)).strip()
        for table in build_schema(prefix, schema).metadata.sorted_tables
        for statement in (*_creations(table, made), *_index_creations(table, made))
    ]


def create_tables(op: Operations, prefix: str, schema: str | None) -> None:
    """Make the tables and indexes that are missing; the first revision calls this.

    MySQL commits each statement by itself, so a migration can stop half-way and is then repeated.
    A task table can also be there because its owner made it (docs/install.md).
    """
    context = op.get_context()
    for each in build_schema(prefix, schema).metadata.sorted_tables:
        found = None if context.as_sql else inspect(op.get_bind())
        has_indexes = set[str]()
        if found is not None and found.has_table(each.name, schema):
            _check_columns(each, {one["name"] for one in found.get_columns(each.name, schema)})
            indexes = found.get_indexes(each.name, schema)
            has_indexes = {str(index["name"]).lower() for index in indexes}
        else:
            for statement in _creations(each, context.dialect):
                op.execute(statement)
        for creation in _index_creations(each, context.dialect):
            if str(creation.element.name).lower() not in has_indexes:
                op.execute(creation)


def drop_tables(op: Operations, prefix: str, schema: str | None) -> None:
    """Drop the tables. A task table that has rows stays, and so it does if nobody can look."""
    context, tables = op.get_context(), build_schema(prefix, schema)
    for each in reversed(tables.metadata.sorted_tables):
        if context.as_sql:
            is_there, has_rows = True, each is tables.tasks
        else:
            bind = op.get_bind()
            is_there = inspect(bind).has_table(each.name, schema)
            first = select(tables.tasks.c.id).limit(1)
            has_rows = is_there and each is tables.tasks and bool(bind.execute(first).first())
        if is_there and not has_rows:
            op.execute(DropTable(each))


def _creations(table: Table, dialect: Dialect) -> Iterator[ExecutableDDLElement]:
    yield CreateTable(table)
    storage: dict[str, str] = for_database(
        dialect.name, postgresql=table.info.get("storage", {}), mysql={}, sqlite={}
    )
    if storage:
        options = ", ".join(f"{name} = {value}" for name, value in storage.items())
        yield DDL(  # type: ignore[no-untyped-call]
            f"ALTER TABLE {dialect.identifier_preparer.format_table(table)} SET ({options})"
        )


def _index_creations(table: Table, dialect: Dialect) -> Iterator[CreateIndex]:
    for index in sorted(table.indexes, key=lambda index: str(index.name)):
        if _is_for(dialect.name, index):
            yield CreateIndex(index)


def _check_columns(table: Table, found: set[str]) -> None:
    missing = [column.name for column in table.c if column.name not in found]
    if missing:
        raise ConfigError(
            f"{table.fullname} exists without the columns {', '.join(missing)}; if the table is "
            "yours, add them (docs/install.md, You already have the table), otherwise give "
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
    alone: Any = for_database(
        connection.dialect.name,
        postgresql=_alone_on_postgresql,
        mysql=_alone_on_mysql,
        sqlite=lambda *_: nullcontext(),  # SQLite's writers take turns anyway
    )
    with alone(connection, version_table(prefix), schema):
        yield


@contextmanager
def _alone_on_postgresql(
    connection: Connection, versions: str, schema: str | None
) -> Iterator[None]:
    wait_for_turn(connection, f"{schema or ''}.{versions}")
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{TABLE_LOCK_TIMEOUT_S}s'")
    if schema and schema not in inspect(connection).get_schema_names():
        connection.execute(CreateSchema(schema))
    yield


@contextmanager
def _alone_on_mysql(connection: Connection, versions: str, schema: str | None) -> Iterator[None]:
    lock = f"{schema or ''}.{versions}"[-64:]
    if not connection.execute(select(func.get_lock(lock, _TURN_S))).scalar():
        raise StoreUnavailableError(f"another migration of {versions} has run for {_TURN_S} s")
    connection.exec_driver_sql(f"SET SESSION lock_wait_timeout = {TABLE_LOCK_TIMEOUT_S}")
    try:
        yield
        # The revision is written last, and the next migration must see it.
        connection.exec_driver_sql("COMMIT")
    finally:
        connection.exec_driver_sql("SET SESSION lock_wait_timeout = DEFAULT")
        connection.execute(select(func.release_lock(lock)))


def wait_for_turn(connection: Connection, name: str) -> None:
    """Take PostgreSQL's advisory lock of this name until the end of the transaction. The wait is
    bounded."""
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{_TURN_S}s'")
    connection.execute(select(func.pg_advisory_xact_lock(func.hashtext(name))))


def comparison(dialect: str) -> dict[str, Any]:
    """Return the options of Alembic's comparison."""
    defaults = for_database(
        dialect, postgresql=True, mysql=_default_without_identity, sqlite=_default_without_identity
    )
    return {
        "compare_type": True,
        "compare_server_default": defaults,
        "include_object": lambda item, *_: _is_for(dialect, item),
    }


def _default_without_identity(_context: Any, _found: Any, column: Any, *_: Any) -> bool | None:
    """Compare the defaults of columns, except the identity that other databases do not have."""
    return False if column.identity is not None else None


def _is_for(dialect: str, item: Any) -> bool:
    """Whether this database has the item: an index may be for one dialect only."""
    condition = getattr(item, "_ddl_if", None)
    return condition is None or condition.dialect == dialect


def _run(
    database: Database, prefix: str, schema: str | None, work: Callable[[Config], None]
) -> None:
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(scripts()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")

    def once() -> None:
        with _alembic, database.tx.begin() as connection:
            config.attributes.update(connection=connection, prefix=prefix, schema=schema)
            try:
                work(config)
            except CommandError as error:
                raise ConfigError(f"the migration cannot run: {error}") from error

    database.run(once)


def scripts() -> Path:
    """Return the folder `alembic`: inside the installed package, or next to it in the project."""
    package = Path(__file__).parents[1]
    for folder in (package / "alembic", package.parent / "alembic"):
        # In an installation the second folder belongs to Alembic itself.
        if (folder / "versions" / "0001_tables.py").exists():
            return folder
    raise ConfigError(f"the migrations are missing from {package}: install delaytasks again")
