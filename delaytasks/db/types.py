"""The column types, the SQL expressions that differ between databases, and what each database can
do."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, TypeVar

from sqlalchemy import BigInteger, Boolean, ColumnElement, DateTime, ScalarSelect, Text, select
from sqlalchemy.engine import Dialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import functions
from sqlalchemy.types import TypeDecorator, TypeEngine

from delaytasks.model.clock import UTC
from delaytasks.model.errors import ConfigError


class _LongText(TypeDecorator[str]):
    """LONGTEXT on MySQL. Each dialect is imported only if its database is used."""

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name not in ("mysql", "mariadb"):
            return Text()
        from sqlalchemy.dialects.mysql import LONGTEXT

        return LONGTEXT()


LongText = _LongText()


class UTCDateTime(TypeDecorator[datetime]):
    """Aware UTC with microseconds. Databases without time zones store it naive."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name in ("mysql", "mariadb"):
            from sqlalchemy.dialects.mysql import DATETIME

            return dialect.type_descriptor(DATETIME(fsp=6))
        if dialect.name == "sqlite":
            return dialect.type_descriptor(_sqlite_datetime())
        return dialect.type_descriptor(DateTime(timezone=True))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None or dialect.name == "postgresql":
            return value
        return value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if not isinstance(value, datetime):
            return None
        return value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)


@lru_cache(maxsize=1)
def _sqlite_datetime() -> TypeEngine[Any]:
    from sqlalchemy.dialects.sqlite import DATETIME

    class SQLiteDateTime(DATETIME):
        """Also accepts the instants that Django's connection has read already."""

        def result_processor(self, dialect: Dialect, coltype: object) -> Any:
            read: Any = super().result_processor(dialect, coltype)
            return lambda value: value if isinstance(value, datetime) else read(value)

    made: TypeEngine[Any] = SQLiteDateTime()  # type: ignore[no-untyped-call]
    return made


class db_now(functions.GenericFunction[datetime]):
    """The clock of the database's statement in UTC. PostgreSQL's `now()` is the transaction's
    start."""

    type = UTCDateTime()
    inherit_cache = True
    name = "db_now"


class db_now_plus(functions.GenericFunction[datetime]):
    """The database's statement clock plus seconds, which may be negative."""

    type = UTCDateTime()
    inherit_cache = True
    name = "db_now_plus"


def once(instant: ColumnElement[datetime]) -> ScalarSelect[datetime]:
    """Evaluate the instant once in a statement.

    PostgreSQL's clock_timestamp() may differ from row to row, and so could not be used to search an
    index.
    """
    return select(instant).scalar_subquery()


class earliest(functions.GenericFunction[datetime]):
    """An instant before all rows."""

    type = UTCDateTime()
    inherit_cache = True
    name = "earliest"


class epoch_s(functions.GenericFunction[int]):
    """The whole seconds since 1970 of an instant, rounded down."""

    type = BigInteger()
    inherit_cache = True
    name = "epoch_s"


class _Condition:
    """A condition that the compiler writes as an expression, not as a call of a function."""

    def self_group(self, against: Any = None) -> Any:
        """Return the expression unchanged. As `(…) = 1`, for databases whose booleans are numbers,
        it could not use an index."""
        return self


class is_past(_Condition, functions.GenericFunction[bool]):
    """`column <= instant`, on PostgreSQL as a range with bounds that the planner does not know.

    PostgreSQL estimates that such a range is narrow. It estimates a range without a lower bound as
    a third of all rows, and would scan a large table.
    """

    type = Boolean()
    inherit_cache = True
    name = "is_past"


@compiles(is_past)
def _(element: Any, compiler: Any, **kw: Any) -> str:
    column, instant = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"({column} <= (SELECT {instant}))"


@compiles(is_past, "postgresql")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    column, instant = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"({column} BETWEEN (SELECT CAST('-infinity' AS TIMESTAMPTZ)) AND (SELECT {instant}))"


class is_narrow(_Condition, functions.GenericFunction[bool]):
    """`column = value`, of which PostgreSQL's planner assumes that few rows meet it.

    It compares the column with two more values that the planner does not know. Therefore the index
    that begins with this column seems to find the fewest rows. Otherwise the planner may choose an
    index by due time alone, which begins with all rows that have ever run.
    """

    type = Boolean()
    inherit_cache = True
    name = "is_narrow"


@compiles(is_narrow)
def _(element: Any, compiler: Any, **kw: Any) -> str:
    column, value = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"({column} = {value})"


@compiles(is_narrow, "postgresql")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    column, value = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"({column} = {value} AND {column} BETWEEN (SELECT {value}) AND (SELECT {value}))"


class is_rare(_Condition, functions.GenericFunction[bool]):
    """A condition of which the planner assumes that few rows meet it.

    SQLite's statistics only contain how many rows each status has on average. If nearly all rows
    are finished, it would expect as many that run, and scan the table.
    """

    type = Boolean()
    inherit_cache = True
    name = "is_rare"


def unindexed(column: ColumnElement[int]) -> ColumnElement[int]:
    """Return the value of a column as `column + 0`, for which planners use no index on the column.

    The other conditions of the statement name few rows, for example by their ids or due times. Yet
    planners may read all rows of a status, since their statistics can be from a time when few rows
    had it, or walk the whole primary key to avoid a sort. For the status, this function is the
    opposite of `is_rare`.
    """
    return column + 0


class are_counts(_Condition, functions.GenericFunction[bool]):
    """The columns have integers that are not negative. SQLite stores values of any type."""

    type = Boolean()
    inherit_cache = True
    name = "are_counts"


@compiles(are_counts)
def _(element: Any, compiler: Any, **kw: Any) -> str:
    columns = [compiler.process(clause, **kw) for clause in element.clauses]
    return f"LEAST({', '.join(columns)}) >= 0" if len(columns) > 1 else f"{columns[0]} >= 0"


@compiles(are_counts, "sqlite")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    columns = [compiler.process(clause, **kw) for clause in element.clauses]
    return " AND ".join(f"typeof({column}) = 'integer' AND {column} >= 0" for column in columns)


class are_instants(_Condition, functions.GenericFunction[bool]):
    """The columns have NULL, or instants that `datetime` can represent.

    PostgreSQL also stores infinity and years beyond 9999, MySQL dates without a day, and SQLite
    values of any type. Each CHECK that PostgreSQL has to parse for a statement costs some
    microseconds, and LEAST, which ignores NULLs, is the shortest form.
    """

    type = Boolean()
    inherit_cache = True
    name = "are_instants"


@compiles(are_instants, "postgresql")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    columns = ", ".join(compiler.process(clause, **kw) for clause in element.clauses)
    first, end = "'0001-01-01 00:00:00+00'", "'10000-01-01 00:00:00+00'"
    return f"LEAST({columns}) >= {first} AND GREATEST({columns}) < {end}"


@compiles(are_instants, "mysql")
@compiles(are_instants, "mariadb")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    columns = [compiler.process(clause, **kw) for clause in element.clauses]
    return " AND ".join(f"YEAR({c}) * MONTH({c}) * DAYOFMONTH({c}) > 0" for c in columns)


@compiles(are_instants, "sqlite")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    columns = [compiler.process(clause, **kw) for clause in element.clauses]
    return " AND ".join(
        # The change by no days corrects a day that the month does not have.
        f"datetime(substr({c}, 1, 19), '+0 days') IS substr({c}, 1, 19) "
        f"AND ({c} IS NULL OR {c} >= '0001-01-01')"
        for c in columns
    )


class is_queue_name(_Condition, functions.GenericFunction[bool]):
    """The column has a name that `model/inputs.py` accepts for a queue."""

    type = Boolean()
    inherit_cache = True
    name = "is_queue_name"


def _is_queue_name(comparison: str) -> Any:
    def compile(element: Any, compiler: Any, **kw: Any) -> str:
        [column] = [compiler.process(clause, **kw) for clause in element.clauses]
        return f"{column} <> '' AND {column} {comparison}"

    return compile


compiles(is_queue_name, "postgresql")(_is_queue_name("!~ '[^A-Za-z0-9_.-]'"))
compiles(is_queue_name, "mysql")(_is_queue_name("NOT REGEXP '[^A-Za-z0-9_.-]'"))
compiles(is_queue_name, "mariadb")(_is_queue_name("NOT REGEXP '[^A-Za-z0-9_.-]'"))
compiles(is_queue_name, "sqlite")(_is_queue_name("NOT GLOB '*[^A-Za-z0-9_.-]*'"))


class is_json_list(_Condition, functions.GenericFunction[bool]):
    """The column has NULL or a JSON list."""

    type = Boolean()
    inherit_cache = True
    name = "is_json_list"


@compiles(is_json_list, "postgresql")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    return f"json_typeof(CAST({compiler.process(element.clauses, **kw)} AS json)) = 'array'"


@compiles(is_json_list, "mysql")
@compiles(is_json_list, "mariadb")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    column = compiler.process(element.clauses, **kw)
    return f"JSON_VALID({column}) AND JSON_TYPE({column}) = 'ARRAY'"


@compiles(is_json_list, "sqlite")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    column = compiler.process(element.clauses, **kw)
    return f"json_valid({column}) AND json_type({column}) = 'array'"


@compiles(is_rare)
def _(element: Any, compiler: Any, **kw: Any) -> str:
    return f"({compiler.process(element.clauses, **kw)})"


@compiles(is_rare, "sqlite")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    return f"likelihood({compiler.process(element.clauses, **kw)}, 0.001)"


@compiles(earliest)
def _(element: Any, compiler: Any, **kw: Any) -> str:
    return "'0001-01-01 00:00:00'"


@compiles(earliest, "postgresql")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    return "CAST('-infinity' AS TIMESTAMPTZ)"


@compiles(earliest, "sqlite")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    return "-9223372036854775808"  # numbers come before all text


@compiles(epoch_s, "postgresql")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    return f"CAST(floor(extract(epoch FROM {compiler.process(element.clauses, **kw)})) AS BIGINT)"


@compiles(epoch_s, "mysql")
@compiles(epoch_s, "mariadb")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    return f"TIMESTAMPDIFF(SECOND, '1970-01-01', {compiler.process(element.clauses, **kw)})"


@compiles(epoch_s, "sqlite")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    begin = _escaped(compiler, "strftime('%s', ")
    return f"CAST({begin}{compiler.process(element.clauses, **kw)}) AS INTEGER)"


_SQLITE_NOW = "strftime('%Y-%m-%d %H:%M:%f000', 'now'"


@compiles(db_now, "postgresql")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    return "clock_timestamp()"


@compiles(db_now, "mysql")
@compiles(db_now, "mariadb")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    return "UTC_TIMESTAMP(6)"


@compiles(db_now, "sqlite")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    return _escaped(compiler, _SQLITE_NOW + ")")


@compiles(db_now_plus, "postgresql")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    return f"(clock_timestamp() + {compiler.process(element.clauses, **kw)} * interval '1 second')"


@compiles(db_now_plus, "mysql")
@compiles(db_now_plus, "mariadb")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    seconds = compiler.process(element.clauses, **kw)
    return f"(UTC_TIMESTAMP(6) + INTERVAL ROUND({seconds} * 1000000) MICROSECOND)"


@compiles(db_now_plus, "sqlite")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    seconds = compiler.process(element.clauses, **kw)
    return _escaped(compiler, f"{_SQLITE_NOW}, printf('%+.6f seconds', ") + f"{seconds}))"


def _escaped(compiler: Any, text: str) -> str:
    """Double the percent signs for drivers whose placeholders have them (Django's cursor for
    SQLite)."""
    return text.replace("%", "%%") if compiler.preparer._double_percents else text


# -- The features of each supported database ------------------------------------------------------


@dataclass(frozen=True)
class Capabilities:
    """The features of a database.

    Modules of the storage package ask for a database's name only where each database has a notation
    of its own: types, JSON lists, INSERT that skips rows, the catalogue. They choose with
    `for_database`, which refuses a database that is not supported.
    """

    #: One UPDATE can select, lock, change and return rows.
    update_returning: bool = False
    #: A list of ids is one parameter, and the index is used whatever the statistics contain.
    array_parameters: bool = False
    #: INSERT can skip rows that exist. Where it cannot, a failed INSERT leaves the transaction
    #: usable.
    insert_or_skip: bool = False
    #: COPY FROM STDIN.
    copy: bool = False
    #: An INSERT of many rows is fastest with a parameter for each value, not with a JSON list of
    #: rows.
    binds_values: bool = False
    #: A text can be split into an array, and an index can find the texts that contain some parts.
    text_arrays: bool = False
    #: LISTEN and NOTIFY: a commit sends messages to the connections that listen.
    notify: bool = False
    #: A list of ids finds rows faster than a join with a table of them.
    looks_up_lists: bool = False
    #: PREPARE works for statements that are sent past SQLAlchemy.
    prepare: bool = False
    #: The driver begins a transaction with the first statement that writes, not with the first
    #: statement.
    begins_late: bool = False
    #: A caller's transaction may read as of its start, and then does not see later commits.
    reads_as_of_start: bool = False
    #: A server-side cursor returns rows in parts, inside a transaction.
    server_side_cursors: bool = False
    #: TABLESAMPLE reads some blocks of a table, chosen at random.
    block_samples: bool = False
    #: The planner estimates how many rows a query returns.
    estimates: bool = False
    #: A column of instants has a time zone, and its text may name one.
    time_zones: bool = False


POSTGRESQL = Capabilities(
    update_returning=True,
    array_parameters=True,
    insert_or_skip=True,
    copy=True,
    text_arrays=True,
    notify=True,
    looks_up_lists=True,
    prepare=True,
    server_side_cursors=True,
    block_samples=True,
    estimates=True,
    time_zones=True,
)
MYSQL = Capabilities(
    looks_up_lists=True, estimates=True, reads_as_of_start=True, server_side_cursors=True
)
SQLITE = Capabilities(
    update_returning=True, insert_or_skip=True, binds_values=True, begins_late=True
)
T = TypeVar("T")


def for_database(name: str, *, postgresql: T, mysql: T, sqlite: T) -> T:
    """Return the choice for a database, whose name is that of its SQLAlchemy dialect.

    Raises
    ------
    ConfigError
        If delaytasks does not support the database.
    """
    choices = {"postgresql": postgresql, "mysql": mysql, "mariadb": mysql, "sqlite": sqlite}
    if name not in choices:
        raise ConfigError(
            f"delaytasks does not support the database {name!r}; it supports {', '.join(choices)}"
        )
    return choices[name]


def capabilities_of(name: str) -> Capabilities:
    return for_database(name, postgresql=POSTGRESQL, mysql=MYSQL, sqlite=SQLITE)
