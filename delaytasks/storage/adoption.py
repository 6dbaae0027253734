"""How a migration adopts a task table that another program made, with its rows.

The tables come from the migration, which is frozen, so nothing here uses `schema.py`. Each step may
run again: MySQL commits each DDL statement by itself, so a migration can stop half-way.
"""

from __future__ import annotations

from alembic.operations import Operations
from sqlalchemy import Column, Connection, MetaData, Table, func, inspect, or_, select

from delaytasks.core.errors import ConfigError
from delaytasks.core.text import count
from delaytasks.storage.adopted_table import on_mysql, on_postgresql, on_sqlite
from delaytasks.storage.capabilities import for_database
from delaytasks.storage.ddl import tables

#: A row of the key table that no task can have, since tags are never empty. It marks an adopted
#: table.
_ADOPTED_MARK = {"tag": "", "task_key": "the task table was here before delaytasks", "task_id": 0}
_NEEDED = ("id", "tag", "message_body")


def remember(op: Operations, keys: str, schema: str | None) -> None:
    """Mark the table as another program's: a downgrade keeps it, even if it is empty."""
    table = _table(keys, schema, "tag", "task_key", "task_id")
    if not op.get_bind().execute(select(table.c.tag).where(table.c.tag == "")).first():
        op.execute(table.insert().values(**_ADOPTED_MARK))


def keeps_rows(op: Operations, name: str, keys: str, schema: str | None) -> bool:
    """Whether a downgrade must keep the task table: it was adopted, or has rows."""
    if op.get_context().as_sql:
        return True
    connection, existing = op.get_bind(), tables(op, schema)
    if keys in existing:
        table = _table(keys, schema, "tag")
        if connection.execute(select(table.c.tag).where(table.c.tag == "")).first():
            return True
    return name in existing and bool(
        connection.execute(select(_table(name, schema, "id")).limit(1)).first()
    )


def _table(name: str, schema: str | None, *columns: str) -> Table:
    return Table(name, MetaData(), *(Column(column) for column in columns), schema=schema)


# -- adopt ----------------------------------------------------------------------------------------


def adopt(op: Operations, table: Table) -> None:
    """Add missing columns, widen types, fill NULLs and set defaults. Rows and foreign columns
    stay."""
    connection = op.get_bind()
    _check(connection, table)
    adopt_on = for_database(
        connection.dialect.name, postgresql=on_postgresql, mysql=on_mysql, sqlite=on_sqlite
    )
    adopt_on(op, connection, table)


def _check(connection: Connection, table: Table) -> None:
    """Raise `ConfigError` before anything is changed if the table cannot be adopted."""
    inspector, name = inspect(connection), table.fullname
    found = {
        column["name"]: column for column in inspector.get_columns(table.name, schema=table.schema)
    }
    for needed in _NEEDED:
        if needed not in found:
            raise ConfigError(
                f"{name} exists and has no column {needed!r}, so it is not a table of tasks; "
                "rename it, or give delaytasks' tables a prefix (setting table_prefix)"
            )
    for column in found.values():
        if column["name"] not in table.c and not column["nullable"] and column["default"] is None:
            raise ConfigError(
                f"{name}.{column['name']} is NOT NULL without a default, so delaytasks could not "
                "insert a task; give the column a default, or allow NULL"
            )
    key = inspector.get_pk_constraint(table.name, schema=table.schema)["constrained_columns"]
    if key not in ([], ["id"]):
        raise ConfigError(
            f"the primary key of {name} is ({', '.join(key)}); make it (id), then migrate again"
        )
    wrong = or_(table.c.tag.is_(None), func.length(table.c.tag) > 128)
    wrong_rows = connection.execute(select(func.count()).select_from(table).where(wrong)).scalar()
    if wrong_rows:
        raise ConfigError(
            f"{name} has {count(wrong_rows, 'row')} whose tag is NULL or longer than 128; "
            "correct or move each, then migrate again"
        )
