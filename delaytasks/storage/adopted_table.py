"""Changes a table of another program into the one that a migration describes, on each database."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from alembic.operations import Operations
from sqlalchemy import (
    Column,
    Connection,
    DateTime,
    Table,
    Text,
    and_,
    func,
    inspect,
    or_,
    select,
    text,
    type_coerce,
    update,
)
from sqlalchemy.schema import CreateColumn

from delaytasks.core.states import Status
from delaytasks.storage.capabilities import for_database
from delaytasks.storage.types import db_now, db_now_plus

#: Ids that delaytasks makes are far above this number, ids that a database counts are far below.
_COUNTED_BELOW = 2**48
#: The lease of a row that ran when the table was adopted. No process renews it, and afterwards the
#: row runs again.
_RUNNING_LEASE_S = 60


def _found(connection: Connection, table: Table) -> dict[str, Any]:
    return {
        column["name"]: column
        for column in inspect(connection).get_columns(table.name, schema=table.schema)
    }


def _fill(connection: Connection, t: Table) -> None:
    """Replace NULLs by the values that delaytasks would have stored. Only rows with NULLs are
    written."""
    after: Callable[[Any, Any], Any] = for_database(
        connection.dialect.name,
        postgresql=lambda start, seconds: start + seconds * text("interval '1 second'"),
        mysql=lambda start, seconds: func.timestampadd(text("SECOND"), seconds, start),
        sqlite=lambda start, seconds: func.strftime(
            "%Y-%m-%d %H:%M:%f000", start, func.printf("%+d seconds", seconds)
        ),
    )
    fillings: list[tuple[Column[Any], Any]] = [
        (t.c.status, int(Status.NOT_COMPLETE)),
        (t.c.version, 0),
        (t.c.delay_time, 0),
        (t.c.message_body, "null"),
        (
            t.c.create_time,
            func.coalesce(t.c.update_time, after(t.c.expected_time, -t.c.delay_time), db_now()),
        ),
        (t.c.expected_time, after(t.c.create_time, t.c.delay_time)),
        (t.c.update_time, t.c.create_time),
    ]
    for column, value in fillings:
        connection.execute(update(t).where(column.is_(None)).values({column: value}))
    orphans = and_(t.c.status == int(Status.RUNNING), t.c.lease_until.is_(None))
    connection.execute(update(t).where(orphans).values(lease_until=db_now_plus(_RUNNING_LEASE_S)))


def _wide(column: Column[Any], found: dict[str, Any]) -> Column[Any]:
    """Return the column without NOT NULL and default while NULLs are filled: missing times derive
    from the others."""
    if column.name not in found and not isinstance(column.type, DateTime):
        return column
    return Column(column.name, column.type)


def _shape(connection: Connection, column: Column[Any]) -> str:
    return str(CreateColumn(column).compile(dialect=connection.dialect))


def _alter(connection: Connection, table: Table, actions: Sequence[str]) -> None:
    """Execute one statement for all actions, so that the table is rewritten once."""
    if actions:
        target = connection.dialect.identifier_preparer.format_table(table)
        connection.exec_driver_sql(f"ALTER TABLE {target} {', '.join(actions)}")


def _has_key(connection: Connection, table: Table) -> bool:
    key = inspect(connection).get_pk_constraint(table.name, schema=table.schema)
    return bool(key["constrained_columns"])


def on_postgresql(op: Operations, connection: Connection, table: Table) -> None:
    found = _found(connection, table)
    compiler = connection.dialect.ddl_compiler(connection.dialect, None)  # type: ignore[arg-type]
    quote = connection.dialect.identifier_preparer.quote
    zone = connection.execute(select(func.current_setting("TimeZone"))).scalar()
    # Times without a zone are UTC. With this setting the change of their type does not rewrite the
    # table.
    connection.execute(select(func.set_config("TimeZone", "UTC", True)))
    first, last = [], [] if _has_key(connection, table) else ["ADD PRIMARY KEY (id)"]
    for column in table.c:
        name, old = quote(column.name), found.get(column.name)
        if old is None:
            first.append("ADD COLUMN " + _shape(connection, _wide(column, found)))
        else:
            if old["default"] is not None:
                first.append(f"ALTER {name} DROP DEFAULT")
            kind = column.type.compile(dialect=connection.dialect)
            if old["type"].compile(dialect=connection.dialect) != kind:
                first.append(f"ALTER {name} TYPE {kind} USING {name}::{kind}")
            if column.nullable and not old["nullable"]:
                first.append(f"ALTER {name} DROP NOT NULL")
        if not column.nullable:
            last.append(f"ALTER {name} SET NOT NULL")
        default = compiler.get_column_default_string(column)
        if default is not None:
            last.append(f"ALTER {name} SET DEFAULT {default}")
    _alter(connection, table, first)
    _fill(connection, table)
    _alter(connection, table, last)
    _count_ids_on(connection, table, found["id"])
    connection.execute(select(func.set_config("TimeZone", zone, True)))


def _count_ids_on(connection: Connection, table: Table, old: Any) -> None:
    """Turn the id's own sequence into an identity that continues from its value."""
    if "identity" in old:
        _alter(connection, table, ["ALTER id SET GENERATED BY DEFAULT"])
        return
    target = connection.dialect.identifier_preparer.format_table(table)
    owned = select(func.pg_get_serial_sequence(target, "id"))
    sequence = connection.execute(owned).scalar()
    highest = select(func.coalesce(func.max(table.c.id), 0)).where(table.c.id < _COUNTED_BELOW)
    last = connection.execute(highest).scalar_one()
    if sequence is not None:
        counted = connection.exec_driver_sql(f"SELECT last_value FROM {sequence}").scalar_one()
        last = max(last, counted)
        connection.exec_driver_sql(f"DROP SEQUENCE {sequence}")
    _alter(connection, table, ["ALTER id ADD GENERATED BY DEFAULT AS IDENTITY"])
    if last:
        connection.execute(select(func.setval(connection.execute(owned).scalar(), last)))


def on_mysql(op: Operations, connection: Connection, table: Table) -> None:
    found = _found(connection, table)
    charset, collate = table.kwargs["mysql_charset"], table.kwargs["mysql_collate"]
    options = [f"DEFAULT CHARACTER SET {charset} COLLATE {collate}"]
    engine = text(
        "SELECT engine FROM information_schema.tables WHERE table_name = :t AND table_schema = :s"
    )
    place = {
        "t": table.name,
        "s": table.schema or connection.execute(select(func.database())).scalar(),
    }
    if str(connection.execute(engine, place).scalar()).lower() != "innodb":
        options.append("ENGINE = InnoDB")  # others have no transactions
    if not _has_key(connection, table):
        options.append("ADD PRIMARY KEY (id)")
    zone = connection.exec_driver_sql("SELECT @@session.time_zone").scalar_one()
    connection.exec_driver_sql("SET time_zone = '+00:00'")  # TIMESTAMPs become DATETIMEs in UTC
    # The first change drops NOT NULL and defaults. It also drops ON UPDATE, which would change
    # times while NULLs are filled.
    wide = [column if column.primary_key else _wide(column, found) for column in table.c]
    actions = ["MODIFY" if column.name in found else "ADD" for column in table.c]
    changes = [f"{v} {_shape(connection, c)}" for v, c in zip(actions, wide, strict=True)]
    _alter(connection, table, options + changes)
    _fill(connection, table)
    _alter(connection, table, [f"MODIFY {_shape(connection, column)}" for column in table.c])
    connection.execute(text("SET time_zone = :zone"), {"zone": zone})


def on_sqlite(op: Operations, connection: Connection, table: Table) -> None:
    found = _found(connection, table)
    if _is_same_on_sqlite(connection, table, found):
        return  # a copy of a large table takes long
    for column in table.c:
        if column.name not in found:
            op.add_column(table.name, _wide(column, found)._copy())
    _fill(connection, table)
    for column in table.c:
        if isinstance(column.type, DateTime):
            _normalize_times(connection, table, column)

    def as_ours(_inspector: Any, _table: Any, info: Any) -> None:
        column = table.c.get(info["name"])
        if column is not None:
            default = getattr(column.server_default, "arg", None)
            info.update(
                type=column.type,
                nullable=column.nullable,
                default=None if default is None else str(default),
            )

    listeners = {"listeners": [("column_reflect", as_ours)]}
    with op.batch_alter_table(table.name, recreate="always", reflect_kwargs=listeners) as batch:
        if not _has_key(connection, table):
            batch.create_primary_key(f"pk_{table.name}", ["id"])


def _normalize_times(connection: Connection, table: Table, column: Column[Any]) -> None:
    """Rewrite times as UTC with six digits of a second: SQLite compares times as text."""
    written = type_coerce(column, Text)
    offset = written.op("GLOB")("*[+-][0-9][0-9]:[0-9][0-9]")
    odd = or_(written.like("%T%"), written.like("%Z"), offset)
    plain = func.strftime("%Y-%m-%d %H:%M:%f000", column)
    short = and_(func.length(column) == 19, func.typeof(column) == "text")
    connection.execute(
        update(table).where(or_(odd, short), plain.is_not(None)).values({column: plain})
    )


def _is_same_on_sqlite(connection: Connection, table: Table, found: dict[str, Any]) -> bool:
    def kind(type_: Any) -> str:
        return str(type_.compile(dialect=connection.dialect))

    return all(
        column.name in found
        and kind(found[column.name]["type"]) == kind(column.type)
        and found[column.name]["nullable"] == column.nullable
        and (found[column.name]["default"] is None)
        == (getattr(column.server_default, "arg", None) is None)
        for column in table.c
    )
