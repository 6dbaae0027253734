"""Django's system checks, and the tables that `migrate` makes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.db import connections, transaction
from sqlalchemy import Column, MetaData, PrimaryKeyConstraint, String, Table, insert
from sqlalchemy.schema import CreateTable

from delaytasks.contrib.django.django_connection import MIGRATE_REMEDY, DjangoConnection, dialect_of
from delaytasks.contrib.django.instance import DjangoDelays, project_delays
from delaytasks.db import migrations
from delaytasks.model.errors import ConfigError, StoreError
from delaytasks.model.text import some_values
from delaytasks.operate.state_queries import live_tags
from delaytasks.runtime import runtime_of

#: The oldest versions whose SQL has the clauses that claims use.
OLDEST_VERSIONS = {"MariaDB": (10, 6), "MySQL": (8, 0), "SQLite": (3, 35)}


def register_checks() -> None:
    """Register the checks. `check --database` and `migrate` run those with the tag `database`."""
    register(check_settings, "delaytasks")
    register(check_production, "delaytasks", deploy=True)
    register(check_database, Tags.database, "delaytasks")


def check_settings(**_: Any) -> list[CheckMessage]:
    """Check the settings without any connection."""
    delays = project_delays()
    runtime = runtime_of(delays)
    found: list[CheckMessage] = []
    try:
        runtime.checks.check_settings()
    except ConfigError as error:
        hint = "Correct settings.DELAYTASKS or the CELERY_ settings."
        found.append(Error(str(error), hint, id="delaytasks.E001"))
    conf = runtime.celery.conf
    if runtime.direct_timer is None and not (conf.broker_url or conf.broker_write_url):
        found.append(
            Warning(
                "No broker is configured, and Celery looks for RabbitMQ on this machine.",
                "Set CELERY_BROKER_URL, or run tasks without a broker: "
                "DELAYTASKS = {'timer': 'direct'}.",
                id="delaytasks.W001",
            )
        )
    return found


def check_production(**_: Any) -> list[CheckMessage]:
    """Check what is right in development and wrong in production."""
    alias = project_delays().alias
    if connections[alias].vendor != "sqlite":
        return []
    return [
        Warning(
            f"The tasks are in the SQLite database {alias!r}: all workers have to run on this "
            "machine, and only one process writes at a time.",
            "Use PostgreSQL or MySQL, or name another alias in settings.DELAYTASKS['database'].",
            id="delaytasks.W002",
        )
    ]


def check_database(databases: Iterable[str] | None = None, **_: Any) -> list[CheckMessage]:
    """Check the version of the database, the tables and the waiting tasks."""
    delays = project_delays()
    if delays.alias not in (databases or ()):
        return []
    try:
        return list(_database_problems(delays))
    except StoreError as error:
        hint = "Check the database and the rights of its user."
        return [Warning(f"The tasks cannot be read: {error}", hint, id="delaytasks.W003")]
    finally:
        # Otherwise Django's test runner could not drop the database.
        runtime_of(delays).store.database.dispose()


def _database_problems(delays: DjangoDelays) -> Iterator[CheckMessage]:
    name, version = _server(connections[delays.alias])
    oldest = OLDEST_VERSIONS.get(name, ())
    if version < oldest:
        found, needed = (".".join(map(str, each)) for each in (version, oldest))
        yield Error(
            f"Database {delays.alias!r} is {name} {found}, and delaytasks requires {needed}.",
            f"Upgrade the server to {name} {needed} or newer.",
            id="delaytasks.E002",
        )
        return
    head, revision = migrations.head(), _revision(delays)
    if revision is None:
        if sys.argv[1:2] == ["migrate"]:
            return  # the command makes them
        message = f"The tables of delaytasks are not in database {delays.alias!r}."
        yield Warning(message, MIGRATE_REMEDY.capitalize(), id="delaytasks.W003")
        return
    if revision != head:
        yield Warning(
            f"The tables in database {delays.alias!r} have revision {revision}, and this version "
            f"of delaytasks has {head}.",
            MIGRATE_REMEDY.capitalize()
            if revision < head
            else "Install the version of delaytasks that made the tables, or a newer one.",
            id="delaytasks.W003",
        )
        return
    yield from _tags_without_processor(delays)


def _server(connection: Any) -> tuple[str, tuple[int, ...]]:
    """Return the name and the version of a database. Django itself refuses an old PostgreSQL."""
    if connection.vendor == "sqlite":
        return "SQLite", connection.Database.sqlite_version_info
    if connection.vendor == "mysql":
        return "MariaDB" if connection.mysql_is_mariadb else "MySQL", connection.mysql_version
    return connection.vendor, ()


def _revision(delays: DjangoDelays) -> str | None:
    settings = delays.settings
    database, schema = runtime_of(delays).store.database, settings.table_schema or None
    return migrations.current(database, settings.name_prefix, schema)


def _tags_without_processor(delays: DjangoDelays) -> Iterator[CheckMessage]:
    runtime = runtime_of(delays)
    found = runtime.store.database.autocommitted(lambda c: live_tags(c, runtime.store.schema))
    precision = "at least " if found.is_capped else ""
    unknown = [
        f"{tag!r} ({precision}{tasks:,})"
        for tag, tasks in found.tasks.items()
        if runtime.registry.get(tag) is None
    ]
    if unknown:
        yield Warning(
            "Tasks wait for tags that no installed app has a processor for: "
            f"{some_values(unknown, 10)}.",
            "Register the processors in the module delays of an installed app, or cancel the "
            "tasks: manage.py delays cancel --tag TAG",
            id="delaytasks.W004",
        )


# -- Makes the tables with Django's `migrate`. They are the tables of `delaytasks db upgrade` -----


def upgrade(_apps: Any, schema_editor: Any) -> None:
    delays, connection = project_delays(), schema_editor.connection
    if connection.alias == delays.alias:
        make_tables(delays, schema_editor)


def downgrade(_apps: Any, schema_editor: Any) -> None:
    """Run Alembic's downgrade, which keeps a task table that has rows."""
    delays = project_delays()
    if schema_editor.connection.alias == delays.alias:
        _run_alembic(delays, migrations.downgrade, "base")


def make_tables(delays: DjangoDelays, schema_editor: Any) -> None:
    prefix, schema = delays.settings.name_prefix, delays.settings.table_schema or None
    connection = schema_editor.connection
    ours = {table.name for table in runtime_of(delays).store.schema.metadata.tables.values()} | {
        migrations.version_table(prefix)
    }
    with connection.cursor() as cursor:
        is_new = schema is None and ours.isdisjoint(connection.introspection.table_names(cursor))
    if not is_new:
        # Alembic makes the tables and indexes that are missing.
        _run_alembic(delays, migrations.upgrade, "head")
        return
    with (
        transaction.atomic(connection.alias)
        if connection.features.can_rollback_ddl
        else nullcontext()
    ):
        for statement in migrations.ddl(connection.vendor, prefix, schema):
            schema_editor.execute(statement, None)  # a percent sign is not a placeholder
        _stamp(schema_editor, prefix)


def _stamp(schema_editor: Any, prefix: str) -> None:
    """Write the version that Alembic would write."""
    name = migrations.version_table(prefix)
    table = Table(
        name,
        MetaData(),
        Column("version_num", String(32), nullable=False),
        PrimaryKeyConstraint("version_num", name=f"{name}_pkc"),
    )
    schema_editor.execute(
        str(CreateTable(table).compile(dialect=dialect_of(schema_editor.connection))), None
    )
    DjangoConnection(schema_editor.connection).execute(
        insert(table), {"version_num": migrations.head()}
    )


def _run_alembic(delays: DjangoDelays, command: Any, revision: str) -> None:
    database, settings = runtime_of(delays).store.database, delays.settings
    command(database, settings.name_prefix, settings.table_schema or None, revision)
    # Otherwise Django's test runner could not copy or drop the database.
    database.dispose()
