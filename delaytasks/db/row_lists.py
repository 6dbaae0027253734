"""Lists of rows as one parameter, and statements that PostgreSQL plans once per connection."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

from sqlalchemy import (
    BigInteger,
    BindParameter,
    Column,
    ColumnElement,
    Connection,
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
    column,
    func,
    select,
    text,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeEngine

from delaytasks.db.database import Database
from delaytasks.db.driver_errors import PREPARED_IS_GONE, as_sqlalchemy_error, sqlstate_of
from delaytasks.db.engines import PostgresqlDriver, driver_of
from delaytasks.db.schema import task_table
from delaytasks.db.types import Capabilities, LongText, for_database
from delaytasks.model.clock import UTC
from delaytasks.model.errors import StoreError

T = TypeVar("T")
S = TypeVar("S", Select[Any], Update)
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


# -- The statements of the hot path, which reach PostgreSQL past SQLAlchemy -----------------------

# Most are parsed and planned once for each connection.


#: We ask for UTC, but a pooler may ignore it. Many servers use UTC anyway.
_UTC = {"UTC", "Etc/UTC"}


class Answer(NamedTuple):
    rows: Sequence[Sequence[Any]]
    #: The number of rows that the statement changed or returned.
    row_count: int


class _Texts(NamedTuple):
    """The texts of a statement. Parameters that are constant are written into `execute`."""

    #: Empty for a statement that is not prepared.
    prepare: str
    execute: str
    #: The names of the other parameters, in order.
    names: Sequence[str]


class Prepared:
    """One statement for all connections. Where it cannot be prepared, it is executed normally.

    With `is_planned_once=False` PostgreSQL plans it at each execution, and only SQLAlchemy's part
    of the work is saved.

    Behind a pooler that gives each statement another server connection, a prepared statement is not
    found. The first such error ends the transaction, which has to be tried again, and switches this
    statement to normal execution for the rest of the process.
    """

    def __init__(
        self,
        database: Database,
        statement: Any,
        is_planned_once: bool = True,
        names: Sequence[str] | None = None,
    ) -> None:
        self.statement = statement
        #: The columns to which an INSERT gives values.
        self._names = names
        self._is_planned_once = is_planned_once
        self._is_on = database.can.prepare
        self._made_texts: _Texts | None = None

    def __call__(self, on: Connection, values: Mapping[str, Any]) -> Answer:
        driver = self._driver(on)
        if driver is None:
            result = on.execute(self.statement, values)
            return Answer(result.all() if result.returns_rows else (), result.rowcount)
        link: Any = on.connection
        dbapi: Any = on.dialect.dbapi
        try:
            with driver.cursor(link.driver_connection) as cursor:
                prepare, execute, names = self._made_texts or self._make_texts(cursor)
                if self._is_planned_once and prepare not in link.info:
                    cursor.execute(prepare)
                    link.info[prepare] = True
                cursor.execute(execute, [_sent(values[name]) for name in names])
                return Answer(cursor.fetchall() if cursor.description else (), cursor.rowcount)
        except dbapi.Error as error:
            self._is_on = sqlstate_of(error) not in PREPARED_IS_GONE
            if self._is_on or not link.driver_connection.autocommit:
                raise as_sqlalchemy_error(on, "EXECUTE", error) from error
        return self(on, values)

    def _driver(self, on: Connection) -> PostgresqlDriver | None:
        """Return the driver of `on` if the statement can be prepared there, else None."""
        driver = driver_of(on) if self._is_on else None
        if driver is None:
            return None
        # The driver returns instants in the session's time zone, which only SQLAlchemy converts.
        return driver if driver.time_zone(on.connection.driver_connection) in _UTC else None

    def _make_texts(self, cursor: Any) -> _Texts:
        from sqlalchemy.dialects import postgresql

        dialect: Any = postgresql.dialect(  # type: ignore[no-untyped-call]
            paramstyle="numeric_dollar" if self._is_planned_once else "format"
        )
        compiled = self.statement.compile(dialect=dialect, column_keys=self._names)
        is_given = {name: compiled.binds[name].required for name in compiled.positiontup}
        places = [
            "%s" if is_given[name] else _literal(cursor, compiled.params[name])
            for name in compiled.positiontup
        ]
        if self._is_planned_once:
            # The name depends on the text. Else another release on the same server connection would
            # execute our statement.
            name = f"delaytasks_{crc32(compiled.string.encode()):08x}"
            prepare = f"PREPARE {name} AS {compiled.string}"
            execute = f"EXECUTE {name} ({', '.join(places)})"
        else:
            prepare, execute = "", compiled.string.replace("%%", "%%%%") % tuple(places)
        names = [name for name in compiled.positiontup if is_given[name]]
        self._made_texts = _Texts(prepare, execute, names)
        return self._made_texts


def _literal(cursor: Any, value: Any) -> str:
    """Return a constant as the driver writes it into a statement."""
    written: str | bytes = cursor.mogrify("%s", [value])
    text = written.decode() if isinstance(written, bytes) else written
    return text.replace("%", "%%")


def _sent(value: Any) -> Any:
    """Return a list of numbers or instants as one text, which PostgreSQL reads faster than an
    expression."""
    if not isinstance(value, list):
        return value
    return "{" + ",".join(["NULL" if item is None else str(item) for item in value]) + "}"
