"""Alembic's environment for our tables.

The database is the first of these that is given: a connection in `config.attributes`
(delaytasks' own commands), `-x url=…`, `sqlalchemy.url` in the ini file, delaytasks' settings
(environment, celeryconfig.py). `-x prefix=…` and `-x schema=…` have the same precedence.
"""

from __future__ import annotations

import importlib.util
import os
from logging.config import fileConfig
from typing import Any

from alembic import context
from sqlalchemy import Connection

from delaytasks.db import engines as sqlite_file
from delaytasks.db.database import Database
from delaytasks.db.engines import normalize_url
from delaytasks.db.migrations import comparison, exclusively, url_of, version_table
from delaytasks.db.schema import Schema
from delaytasks.settings import load_settings

config = context.config


def celery_configuration() -> dict[str, Any]:
    """Return the settings in celeryconfig.py as Celery would read them, if the module exists."""
    name = os.environ.get("CELERY_CONFIG_MODULE", "celeryconfig")
    return vars(importlib.import_module(name)) if importlib.util.find_spec(name) else {}


settings = load_settings(
    {} if "connection" in config.attributes else celery_configuration(), os.environ
)
given: dict[str, Any] = {**context.get_x_argument(as_dictionary=True), **config.attributes}
one: str | None = given.get("url") or config.get_main_option("sqlalchemy.url")
url = one or url_of(settings)
prefix: str = given.get("prefix", settings.table_prefix)
schema: str | None = given.get("schema", settings.table_schema) or None

if config.config_file_name is not None:
    fileConfig(config.config_file_name, disable_existing_loggers=False)

#: The subcommand of `alembic` on the command line.
command_name: str = getattr((getattr(config.cmd_opts, "cmd", None) or [None])[0], "__name__", "")
target = Schema(prefix, schema).metadata
names = {table.name for table in target.tables.values()}
options: dict[str, Any] = {
    "target_metadata": target,
    # A table of our own, so that the application's Alembic in the same database does not use it.
    "version_table": version_table(prefix),
    "version_table_schema": schema,
    "include_schemas": schema is not None,
    "include_name": lambda name, kind, parents: (
        name == schema
        if kind == "schema"
        else kind != "table" or (name in names and parents["schema_name"] == schema)
    ),
}


def has_transactional_ddl(connection: Connection) -> bool:
    # Our SQLite engine sends BEGIN itself, so a failed migration leaves nothing behind there
    # either.
    return connection.dialect.name in ("postgresql", "sqlite")


def migrate(connection: Connection) -> None:
    compared = {**options, **comparison(connection.dialect.name)}
    context.configure(
        connection=connection, transactional_ddl=has_transactional_ddl(connection), **compared
    )
    if context.get_context().opts.get("dont_mutate"):  # alembic current, alembic check
        context.run_migrations(prefix=prefix, schema=schema)
        return
    with exclusively(connection, prefix, schema), context.begin_transaction():
        context.run_migrations(prefix=prefix, schema=schema)


if context.is_offline_mode():
    context.configure(
        url=normalize_url(url), literal_binds=True, dialect_opts={"paramstyle": "named"}, **options
    )
    with context.begin_transaction():
        context.run_migrations(prefix=prefix, schema=schema)
elif "connection" in given:
    migrate(given["connection"])
else:
    database = Database(url)
    if command_name not in ("current", "check"):
        sqlite_file.create_sqlite_file(database.url)
    with database.begin() as mine:
        migrate(mine)
    database.dispose()
