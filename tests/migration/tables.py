"""Make, compare and use tables without the migrations."""

from __future__ import annotations

from datetime import timezone
from typing import Any

from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import MetaData, Table, inspect, text

from delaytasks.core.interfaces import Settlement
from delaytasks.core.states import Status
from delaytasks.storage import migrations
from delaytasks.storage.database import Database
from delaytasks.storage.schema import build_schema
from delaytasks.storage.store import Store
from tests.conftest import settings_for

UTC = timezone.utc
PREFIX = "m_"
TASKS = PREFIX + "yb_delay_task_message"


def drop_tables(database: Database, schema: str | None) -> None:
    with database.begin() as connection:
        for name in inspect(connection).get_table_names(schema=schema):
            if name.startswith((PREFIX, "yb_", "f_")):
                Table(name, MetaData(), schema=schema).drop(connection)


def schema_differences(database: Database, prefix: str, schema: str | None) -> list[Any]:
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


def shape_of(database: Database, name: str, schema: str | None = None) -> dict[str, Any]:
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


def store_of(database: Database, schema: str = "") -> Store:
    url = database.url.render_as_string(hide_password=False)
    return Store(url, settings_for(url, table_prefix=PREFIX, table_schema=schema))


def insert_by_plain_sql(database: Database, tag: str) -> None:
    now = {"postgresql": "now()", "sqlite": "datetime('now')"}.get(
        database.url.get_backend_name(), "UTC_TIMESTAMP()"
    )
    with database.begin() as connection:
        connection.exec_driver_sql(
            f"INSERT INTO {TASKS} (tag, message_body, status, version, delay_time, expected_time, "
            "create_time, "
            f"update_time) VALUES ('{tag}', '{{}}', 0, 0, 0, {now}, {now}, {now})"
        )


def claims_and_settles(database: Database, tag: str) -> bool:
    store = store_of(database)
    try:
        claims = store.claims("w", 0x7F000001)
        claimed = [task for task in claims.claim_due("default", [0], 10) if task.tag == tag]
        assert claims.settle([Settlement(task, "succeed") for task in claimed]) == {
            task.id for task in claimed
        }
        return [store.tasks.get(task.id).status for task in claimed] == [Status.DONE]  # type: ignore[union-attr]
    finally:
        store.close()
