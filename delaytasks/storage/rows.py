"""Between rows and tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any, TypeVar

from sqlalchemy import (
    JSON,
    BigInteger,
    BindParameter,
    Column,
    ColumnElement,
    FromClause,
    Integer,
    Select,
    SmallInteger,
    Table,
    Text,
    Update,
    and_,
    any_,
    bindparam,
    case,
    cast,
    column,
    func,
    literal_column,
    select,
    text,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeEngine

from delaytasks.core.clock import UTC
from delaytasks.core.states import MOST_VERSIONS, Status
from delaytasks.core.task import DelayTask
from delaytasks.storage.database import Database
from delaytasks.storage.schema import BODY, RESULT, Schema
from delaytasks.storage.types import UTCDateTime

T = TypeVar("T")
S = TypeVar("S", Select[Any], Update)
#: Bytes of texts in one statement. Quoted for JSON and then for SQL they may be several times as long, and MariaDB
#: takes 16 MB.
MAX_TEXT = 2_000_000
#: What an INTEGER column holds.
MOST = 2**31 - 1
#: In the order of DelayTask's fields.
COLUMNS = (
    "id tag message_body expected_time status version queue priority task_key delay_time attempts lapses headers "
    "concurrency_key create_time due_time update_time execution_time lease_until worker ip_address error_stack result"
).split()
#: What a worker needs of a row it has claimed: everything before update_time.
CLAIMED = COLUMNS[: COLUMNS.index("update_time")]


def columns(schema: Schema, names: Sequence[str] = COLUMNS) -> list[Column[Any]]:
    return [schema.tasks.c[name] for name in names]


def task_of(row: Sequence[Any], schema: Schema) -> DelayTask:
    cipher = schema.cipher
    body = row[2] if cipher is None else cipher.read(row[2], BODY, row[0], row[1])
    # No row is so long that it has a shard of its own, which mypy fears.
    task = DelayTask(row[0], row[1], body, row[3], Status.of(row[4]), *row[5:], shard=schema.shard)  # type: ignore[misc]
    if cipher is not None and task.result_json is not None:
        task.result_json = cipher.read(task.result_json, RESULT, task.id, task.tag)
    return task


#: What a row has when its task is scheduled, and where the task has it.
_PLACES = {
    "id": "id",
    "message_body": "body_json",
    "expected_time": "expected_time",
    "tag": "tag",
    "status": "status",
    "version": "version",
    "delay_time": "delay_s",
    "create_time": "create_time",
    "update_time": "create_time",
    "queue": "queue",
    "priority": "priority",
    "task_key": "key",
    "headers": "headers_json",
    "concurrency_key": "concurrency_key",
}
NEW_COLUMNS = tuple(_PLACES)
#: So many of them, the first ones, differ in nearly all rows.
DIFFERING = 3
_TAG = NEW_COLUMNS.index("tag")
_values: Callable[[DelayTask], tuple[Any, ...]] = attrgetter(*_PLACES.values())


def new_values(tasks: Iterable[DelayTask], schema: Schema) -> Iterator[tuple[Any, ...]]:
    """The values of those columns, as they are stored."""
    rows, cipher = map(_values, tasks), schema.cipher
    if cipher is None:
        return rows
    return ((row[0], cipher.seal(row[1], BODY, row[0], row[_TAG]), *row[2:]) for row in rows)


def values_of(task: DelayTask, schema: Schema) -> dict[str, Any]:
    """The row of a task that is scheduled now."""
    row = dict(zip(NEW_COLUMNS, next(new_values([task], schema)), strict=True))
    row["status"] = int(task.status)
    return row


#: The columns of a list of rows that travels as one JSON parameter, so that a statement's text never varies.
_TYPES: dict[str, tuple[TypeEngine[Any], str]] = {
    "id": (BigInteger(), "BIGINT"),
    "version": (BigInteger(), "BIGINT"),
    "status": (SmallInteger(), "SMALLINT"),
    "was": (SmallInteger(), "SMALLINT"),
    "lapses": (Integer(), "INT"),
    "error": (Text(), "LONGTEXT"),
    "began": (UTCDateTime(), "DATETIME(6)"),
    "due": (UTCDateTime(), "DATETIME(6)"),
    "due_time": (UTCDateTime(), "DATETIME(6)"),
    "returned": (Integer(), "INT"),
    "never_ran": (Integer(), "INT"),
    "result": (Text(), "LONGTEXT"),
    **dict.fromkeys(
        ("tag", "queue", "task_key", "concurrency_key", "message_body", "headers"),
        (Text(), "LONGTEXT"),
    ),
    **dict.fromkeys(
        ("expected_time", "create_time", "update_time"), (UTCDateTime(), "DATETIME(6)")
    ),
    "delay_time": (BigInteger(), "BIGINT"),
    "priority": (Integer(), "INT"),
}


def next_version(version: Column[int]) -> ColumnElement[int]:
    return case((version < MOST_VERSIONS, version + 1), else_=0)


def one_more(count: Column[int]) -> ColumnElement[int]:
    """Of a number that another program may have written as large as it goes: one such row must not stop all others."""
    return case((count < MOST, count + 1), else_=count)


def json_rows(dialect: str, names: Sequence[str]) -> FromClause:
    """A table `w` with these columns, made by the database from the JSON array parameter `rows`."""
    if dialect == "postgresql":
        shape = [column(name, _TYPES[name][0]) for name in names]
        return (
            func.json_to_recordset(cast(bindparam("rows", type_=Text()), JSON))
            .table_valued(*shape)
            .render_derived(name="w", with_types=True)
        )
    if dialect == "sqlite":
        picked = [
            func.json_extract(literal_column("j.value"), f"$.{name}", type_=_TYPES[name][0]).label(
                name
            )
            for name in names
        ]
        return select(*picked).select_from(text("json_each(:rows) AS j")).subquery("w")
    fields = ", ".join(f"{name} {_TYPES[name][1]} PATH '$.{name}'" for name in names)
    picked = [literal_column(f"j.{name}", _TYPES[name][0]).label(name) for name in names]
    return (
        select(*picked)
        .select_from(text(f"JSON_TABLE(:rows, '$[*]' COLUMNS ({fields})) AS j"))
        .subquery("w")
    )


def shared_name(name: str) -> str:
    """Of the parameter that takes the place of a column which is the same in all rows."""
    return f"all_{name}"


def shared_parameter(name: str) -> BindParameter[Any]:
    return bindparam(shared_name(name), type_=_TYPES[name][0])


def listed(database: Database, column: Column[Any], name: str) -> ColumnElement[bool]:
    """Its value is in the list parameter `name`. However long the list and whatever the statistics say, each is looked
    up by itself: PostgreSQL would rather read a middling table as a whole, unless the list is made while it asks."""
    if not database.can.array_parameters:
        return column.in_(listing(name))
    values = select(func.unnest(bindparam(name, type_=_array(column.type))))
    return column == any_(func.array(values.scalar_subquery()))


def _array(kind: Any) -> TypeEngine[Any]:
    from sqlalchemy.dialects.postgresql import ARRAY  # only where the database is PostgreSQL

    return ARRAY(kind)


def each_listed(database: Database, id: Column[int]) -> ColumnElement[bool]:
    """It is in the list of `list_of`, which a statement that is prepared can look up. Without it a table that was never
    analysed is read from end to end."""
    if not database.can.array_parameters:
        return id.in_(listing("ids"))
    return and_(id == any_(bindparam("ids", type_=_array(BigInteger()))), within_list(id))


def within_list(id: Column[int]) -> ColumnElement[bool]:
    """The range of the ids: a plan that is kept can tell by it, and not by a list, which partitions to open."""
    return id.between(bindparam("first", type_=BigInteger), bindparam("last", type_=BigInteger))


def list_of(database: Database, ids: list[int]) -> dict[str, Any]:
    """The parameters of a sorted list."""
    return (
        {"ids": ids, "first": ids[0], "last": ids[-1]}
        if database.can.array_parameters
        else {"ids": ids}
    )


def listing(name: str) -> Any:
    """A list parameter, written out."""
    return bindparam(name, expanding=True)


def by_id(statement: S, table: Table) -> S:
    """Tells MySQL to look up what is listed. It would rather read a small table from end to end, or go by the status,
    and wait for each row there that somebody has locked."""
    for dialect in ("mysql", "mariadb"):
        statement = statement.with_hint(
            text="FORCE INDEX (PRIMARY)", selectable=table, dialect_name=dialect
        )
    return statement


class _AtPlace(FunctionElement[Any]):
    inherit_cache = True


def at_place(database: Database, id: Column[int], name: str) -> ColumnElement[Any]:
    """Of the list parameter `name`, of as many values as `list_of` has ids, the one at the place that a row's id has;
    of rows that `each_listed` finds."""
    kind = _TYPES[name][0]
    if not database.can.array_parameters:
        return _AtPlace(id, listing("ids"), bindparam(name, type_=kind, expanding=True))
    return _AtPlace(
        id, bindparam("ids", type_=_array(BigInteger())), bindparam(name, type_=_array(kind))
    )


@compiles(_AtPlace, "postgresql")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    id, ids, values = (compiler.process(clause, **kw) for clause in element.clauses)
    # The ids are sorted, and a place among them is found by halves.
    return f"({values})[width_bucket({id}, {ids})]"


@compiles(_AtPlace, "mysql")
@compiles(_AtPlace, "mariadb")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    id, *lists = (compiler.process(clause, **kw) for clause in element.clauses)
    # As IN needs them, lists have parentheses.
    ids, values = (written.removeprefix("(").removesuffix(")") for written in lists)
    return f"ELT(FIELD({id}, {ids}), {values})"


def parts(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """In their order, so many that one statement can carry them."""
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


def instant_text(dialect: str, instant: datetime | None) -> str | None:
    """An instant inside a JSON parameter."""
    if instant is None:
        return None
    # isoformat is several times as fast as strftime, and each row of a chunk has one.
    shown = instant.astimezone(UTC).isoformat(" ", "microseconds")
    return shown if dialect == "postgresql" else shown.removesuffix("+00:00")
