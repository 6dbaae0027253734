"""Makes the tables with Django's `migrate`. They are the tables of `delaytasks db upgrade`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from django.db import transaction
from sqlalchemy import Column, MetaData, PrimaryKeyConstraint, String, Table, insert
from sqlalchemy.schema import CreateTable

from delaytasks.contrib.django.connection import DjangoConnection, dialect_of
from delaytasks.contrib.django.instance import DjangoDelays, project_delays
from delaytasks.runtime import runtime_of
from delaytasks.storage import migrations


def upgrade(_apps: Any, schema_editor: Any) -> None:
    delays, connection = project_delays(), schema_editor.connection
    if connection.alias == delays.alias:
        make(delays, schema_editor)


def downgrade(_apps: Any, schema_editor: Any) -> None:
    """Run Alembic's downgrade, which keeps a task table that has rows."""
    delays = project_delays()
    if schema_editor.connection.alias == delays.alias:
        _run_alembic(delays, migrations.downgrade, "base")


def make(delays: DjangoDelays, schema_editor: Any) -> None:
    prefix, schema = delays.settings.table_prefix, delays.settings.table_schema or None
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
    command(database, settings.table_prefix, settings.table_schema or None, revision)
    # Otherwise Django's test runner could not copy or drop the database.
    database.dispose()
