"""Rows: their columns, how they become tasks, and many of them as one parameter of a statement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any, TypeVar

from sqlalchemy import (
    BigInteger,
    BindParameter,
    Column,
    ColumnElement,
    FromClause,
    MetaData,
    Select,
    String,
    Table,
    Text,
    Update,
    and_,
    any_,
    bindparam,
    case,
    column,
    func,
    select,
    text,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeEngine

from delaytasks.db.database import Database
from delaytasks.db.schema import BODY, RESULT, Schema, task_table
from delaytasks.db.types import Capabilities, LongText, db_now, for_database
from delaytasks.model.clock import UTC
from delaytasks.model.errors import StoreError
from delaytasks.model.moves import MOST_VERSIONS, MOVES, LateReason, Status
from delaytasks.model.task import DelayedTask

T = TypeVar("T")
S = TypeVar("S", Select[Any], Update)
#: The largest value of an INTEGER column.
MAX_INTEGER = 2**31 - 1
#: The columns in the order of DelayedTask's fields.
COLUMNS = (
    "id tag message_body expected_time status version queue priority task_key delay_time runs "
    "lapses headers limit_key create_time due_time meta cancel_request "
    "late_by update_time execution_time lease_until worker ip_address error_stack result"
).split()
#: The columns that a worker reads of a row that it claims.
CLAIMED = COLUMNS[: COLUMNS.index("update_time")]


def columns(schema: Schema, names: Sequence[str] = COLUMNS) -> list[Column[Any]]:
    return [schema.tasks.c[name] for name in names]


def task_of(row: Sequence[Any], schema: Schema) -> DelayedTask:
    cipher = schema.cipher
    body = row[2] if cipher is None else cipher.read(row[2], BODY, row[0], row[1])
    task = DelayedTask(row[0], row[1], body, row[3], Status(row[4]), *row[5:])
    if cipher is not None and task.result_json is not None:
        task.result_json = cipher.read(task.result_json, RESULT, task.id, task.tag)
    return task


#: The columns of a new row, and the attribute of the task for each.
_ATTRIBUTES = {
    "id": "id",
    "message_body": "body_json",
    "expected_time": "expected_time",
    "task_key": "key",
    "tag": "tag",
    "status": "status",
    "version": "version",
    "delay_time": "delay_s",
    "create_time": "create_time",
    "update_time": "create_time",
    "queue": "queue",
    "priority": "priority",
    "headers": "headers_json",
    "limit_key": "limit_key",
    "meta": "meta_json",
}
NEW_COLUMNS = tuple(_ATTRIBUTES)
#: The first columns, which differ in nearly all rows, or are NULL.
DIFFERING_COLUMNS = 4
_TAG = NEW_COLUMNS.index("tag")
#: The columns of new rows without meta, so that the others cost nothing.
PLAIN_COLUMNS = tuple(name for name in NEW_COLUMNS if name != "meta")
_Values = Callable[[DelayedTask], tuple[Any, ...]]
_values: dict[tuple[str, ...], _Values] = {
    names: attrgetter(*map(_ATTRIBUTES.__getitem__, names))
    for names in (NEW_COLUMNS, PLAIN_COLUMNS)
}


def columns_of(tasks: Iterable[DelayedTask]) -> tuple[str, ...]:
    """Return the columns that these new rows need."""
    return NEW_COLUMNS if any(task.meta_json is not None for task in tasks) else PLAIN_COLUMNS


def new_values(
    tasks: Iterable[DelayedTask], schema: Schema, names: tuple[str, ...] = NEW_COLUMNS
) -> Iterator[tuple[Any, ...]]:
    """Yield the values of the columns as they are stored."""
    rows, cipher = map(_values[names], tasks), schema.cipher
    if cipher is None:
        return rows
    return ((row[0], cipher.seal(row[1], BODY, row[0], row[_TAG]), *row[2:]) for row in rows)


def values_of(task: DelayedTask, schema: Schema) -> dict[str, Any]:
    """Return the row of a new task by column."""
    row = dict(zip(NEW_COLUMNS, next(new_values([task], schema)), strict=True))
    row["status"] = int(task.status)
    return row


def moved(tasks: Table, move: str, **others: Any) -> dict[str, Any]:
    """Return the new values of rows that this move changes; `others` are the columns of its own."""
    target = MOVES[move].target
    held = {"late_by": int(LateReason.HELD)} if target is Status.HELD else {}
    version = next_version(tasks.c.version)
    return {"status": int(target), "version": version, "update_time": db_now(), **held, **others}


def next_version(version: Column[int]) -> ColumnElement[int]:
    return case((version < MOST_VERSIONS, version + 1), else_=0)


def one_more(count: Column[int]) -> ColumnElement[int]:
    """Add one, but not beyond the largest integer: such a row of another program must not fail the
    statement."""
    return case((count < MAX_INTEGER, count + 1), else_=count)


# -- Lists of values and of rows as one parameter --------------------------------------------------


#: Bytes of texts in one statement. Quoted for JSON and then for SQL they may be several times as
#: long, and MariaDB accepts 16 MB.
MAX_TEXT = 2_000_000


_COLUMN_TYPES = {column.name: column.type for column in task_table(MetaData(), "").columns}
#: The values that are not named as the column of the task table that has their type.
_SAME_TYPE_AS = {
    "old_status": "status",
    "uncounted": "runs",
    "never_ran": "runs",
    "name": "task_key",
    "next_at": "expected_time",
    "last_at": "expected_time",
    "last_task_id": "id",
    # of claims
    "wanted_id": "id",
    "wanted_version": "version",
    "wanted_status": "status",
    "most_lapses": "lapses",
}


def type_of(name: str) -> TypeEngine[Any]:
    """Return the type of a value, which is that of its column in the task table."""
    kind = _COLUMN_TYPES[_SAME_TYPE_AS.get(name, name)]
    # The column limits the length of a text. A list would cut the text, or replace it by NULL.
    return LongText if isinstance(kind, String) else kind


def json_query(database: Database, names: Sequence[str]) -> str:
    """Return a query of these columns, which the database makes from the JSON array parameter
    `rows`."""
    dialect = database.url.get_dialect()()
    types = {name: type_of(name).compile(dialect=dialect) for name in names}
    columns = ", ".join(f"{name} {kind}" for name, kind in types.items())
    paths = ", ".join(f"{name} {kind} PATH '$.{name}'" for name, kind in types.items())
    values = ", ".join(f"json_extract(value, '$.{name}') AS {name}" for name in names)
    return for_database(
        database.backend,
        postgresql=f"SELECT * FROM json_to_recordset(CAST(:rows AS JSON)) AS j ({columns})",
        mysql=f"SELECT * FROM JSON_TABLE(:rows, '$[*]' COLUMNS ({paths})) AS j",
        sqlite=f"SELECT {values} FROM json_each(:rows)",
    )


def json_rows(database: Database, names: Sequence[str]) -> FromClause:
    """Return this query as a table `w`."""
    query = text(json_query(database, names)).bindparams(bindparam("rows", type_=Text()))
    return query.columns(*(column(name, type_of(name)) for name in names)).subquery("w")


def shared_name(name: str) -> str:
    """Return the name of the parameter for a column that has one value in all rows."""
    return f"all_{name}"


def shared_parameter(name: str) -> BindParameter[Any]:
    return bindparam(shared_name(name), type_=type_of(name))


def listed(database: Database, column: Column[Any], name: str) -> ColumnElement[bool]:
    """The condition that a column's value is in the list parameter `name`.

    The index is searched for each value, whatever the statistics contain. PostgreSQL would rather
    scan a table of medium size, unless the list is made while the query runs.
    """
    if not database.can.array_parameters:
        return column.in_(listing(name))
    return _any_of(column, bindparam(name, type_=_array(column.type)))


def one_of(column: Column[Any], values: Sequence[Any], can: Capabilities) -> ColumnElement[bool]:
    """Return the condition that the column has one of these values."""
    if not can.array_parameters:
        return column.in_(values)
    return _any_of(column, bindparam(None, values, type_=_array(column.type)))


def _any_of(column: Column[Any], values: BindParameter[Any]) -> ColumnElement[bool]:
    made = select(func.unnest(values))
    return column == any_(func.array(made.scalar_subquery()))


def _array(kind: Any) -> TypeEngine[Any]:
    from sqlalchemy.dialects.postgresql import ARRAY  # only where the database is PostgreSQL

    return ARRAY(kind)


def each_listed(database: Database, id: Column[int]) -> ColumnElement[bool]:
    """The condition that an id is in the list of `list_of`, for prepared statements.

    Without it a table that was never analysed is scanned.
    """
    if not database.can.array_parameters:
        return id.in_(id_list(database))
    # A kept plan can choose partitions by a range, but not by a list.
    first, last = (bindparam(name, type_=BigInteger) for name in ("first", "last"))
    return and_(id == any_(id_list(database)), id.between(first, last))


def id_list(database: Database) -> BindParameter[Any]:
    """The parameter `ids` of `list_of`."""
    if not database.can.array_parameters:
        return listing("ids")
    return bindparam("ids", type_=_array(BigInteger()))


def list_of(database: Database, ids: list[int]) -> dict[str, Any]:
    """Return the parameters of a sorted list of ids."""
    if not database.can.array_parameters:
        return {"ids": ids}
    return {"ids": ids, "first": ids[0], "last": ids[-1]}


def listing(name: str) -> BindParameter[Any]:
    """A list parameter that is written out, one placeholder for each value."""
    return bindparam(name, expanding=True)


def by_id(statement: S, table: Table) -> S:
    """Let MySQL find the listed rows by their ids.

    It would rather scan a small table or use the index of the status, and wait for each locked row
    there.
    """
    return by_index(statement, table, "PRIMARY")


def by_index(statement: S, table: Table, name: str) -> S:
    """Let MySQL use the index of this name, whatever the table contains."""
    for dialect in ("mysql", "mariadb"):
        statement = statement.with_hint(
            text=f"FORCE INDEX (`{name}`)", selectable=table, dialect_name=dialect
        )
    return statement


class _ValueOfId(FunctionElement[Any]):
    inherit_cache = True


def at_place(database: Database, id: Column[int], name: str) -> ColumnElement[Any]:
    """The value of a row in the list parameter `name`, for rows that `each_listed` finds.

    The list has one value for each id of `list_of`, in the same order.
    """
    kind = type_of(name)
    if not database.can.array_parameters:
        return _ValueOfId(id, id_list(database), bindparam(name, type_=kind, expanding=True))
    return _ValueOfId(id, id_list(database), bindparam(name, type_=_array(kind)))


@compiles(_ValueOfId, "postgresql")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    id, ids, values = (compiler.process(clause, **kw) for clause in element.clauses)
    # The ids are sorted, so width_bucket finds an id's position by binary search.
    return f"({values})[width_bucket({id}, {ids})]"


@compiles(_ValueOfId, "mysql")
@compiles(_ValueOfId, "mariadb")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    id, *lists = (compiler.process(clause, **kw) for clause in element.clauses)
    # Lists have parentheses, as IN needs them.
    ids, values = (written.removeprefix("(").removesuffix(")") for written in lists)
    return f"ELT(FIELD({id}, {ids}), {values})"


def parts(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Split `items` into lists that one statement can carry each, in their order."""
    part: list[T] = []
    size = 0
    for item in items:
        length = size_of(item)
        if part and size + length > MAX_TEXT:
            yield part
            part, size = [], 0
        part.append(item)
        size += length
    if part:
        yield part


def instant_text(database: Database, instant: datetime | None) -> str | None:
    """Return an instant as text inside a JSON parameter."""
    if instant is None:
        return None
    # isoformat is several times as fast as strftime, and each row of a chunk has one.
    shown = instant.astimezone(UTC).isoformat(" ", "microseconds")
    return shown if database.can.time_zones else shown.removesuffix("+00:00")


# -- Checks that a statement changed exactly the rows that its transaction has locked -------------


def check_row_count(changed: int, locked: int, what: str) -> None:
    """Raise `StoreError`, which rolls the transaction back, if not all locked rows were changed."""
    if changed != locked:
        raise StoreError(
            f"{what}: {changed} of {locked} locked rows were changed, so the transaction is rolled "
            "back; look for a trigger or another program that changes rows which it has not locked"
        )


def move_locked(on: Any, change: Update, ids: Sequence[int], what: str) -> None:
    """Change the rows of these ids, which the transaction has locked."""
    table: Any = change.table
    statement = by_id(change.where(table.c.id.in_(ids)), table)
    check_row_count(on.execute(statement).rowcount, len(ids), what)
