"""Steps of migrations that may run again, since MySQL commits each DDL statement by itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from alembic.operations import Operations
from sqlalchemy import MetaData, Table, inspect, text


def tables(op: Operations, schema: str | None) -> set[str]:
    if op.get_context().as_sql:
        return set()
    return set(inspect(op.get_bind()).get_table_names(schema=schema))


def lacks(op: Operations, name: str, schema: str | None, columns: Iterable[str]) -> bool:
    return not {c["name"] for c in inspect(op.get_bind()).get_columns(name, schema=schema)} >= set(
        columns
    )


def quoted(op: Operations, name: str, schema: str | None) -> str:
    return op.get_context().dialect.identifier_preparer.format_table(
        Table(name, MetaData(), schema=schema)
    )


def is_partitioned(op: Operations, name: str, schema: str | None) -> bool:
    """Whether the table is partitioned (PostgreSQL). Such a table has no storage of its own."""
    if op.get_context().as_sql:
        return False
    query = text("SELECT relkind = 'p' FROM pg_class WHERE oid = to_regclass(:name)")
    return bool(op.get_bind().execute(query, {"name": quoted(op, name, schema)}).scalar())


def create_index(
    op: Operations, name: str, table: str, columns: list[str], schema: str | None, **options: Any
) -> None:
    """Create an index unless it exists. Replace one of the same name, in whatever case, over other
    columns."""
    if not op.get_context().as_sql:
        for index in inspect(op.get_bind()).get_indexes(table, schema=schema):
            if str(index["name"]).lower() == name.lower():
                if (
                    index["name"] == name
                    and index["column_names"] == columns
                    and not index["unique"]
                ):
                    return
                op.drop_index(str(index["name"]), table, schema=schema)
    op.create_index(name, table, columns, schema=schema, **options)


def drop_index(op: Operations, name: str, table: str, schema: str | None) -> None:
    if op.get_context().as_sql or name in {
        index["name"] for index in inspect(op.get_bind()).get_indexes(table, schema=schema)
    }:
        op.drop_index(name, table, schema=schema)


def rename_table(op: Operations, prefix: str, before: str, after: str, schema: str | None) -> None:
    """Rename a table, and on PostgreSQL its primary key, unless that was done before."""
    context = op.get_context()
    if not context.as_sql and prefix + before not in tables(op, schema):
        return
    op.rename_table(prefix + before, prefix + after, schema=schema)
    if context.dialect.name == "postgresql":
        table = quoted(op, prefix + after, schema)
        old, new = f"{prefix}pk_{before}", f"{prefix}pk_{after}"
        op.execute(f'ALTER TABLE {table} RENAME CONSTRAINT "{old}" TO "{new}"')


def rename_column(
    op: Operations, table: str, before: str, after: str, kind: Any, schema: str | None
) -> None:
    """Rename a NOT NULL column of a table, unless that was done before."""
    if not op.get_context().as_sql and (
        table not in tables(op, schema) or lacks(op, table, schema, [before])
    ):
        return
    op.alter_column(
        table,
        before,
        new_column_name=after,
        existing_type=kind,
        existing_nullable=False,
        schema=schema,
    )


def drop_columns(op: Operations, name: str, schema: str | None, columns: Iterable[str]) -> None:
    with op.batch_alter_table(name, schema=schema) as batch:
        for column in columns:
            if op.get_context().as_sql or not lacks(op, name, schema, [column]):
                batch.drop_column(column)
