"""The column types, the SQL expressions that differ between databases, and what each database can
do."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import Boolean, ColumnElement, DateTime, ScalarSelect, Text, select
from sqlalchemy.engine import Dialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import functions
from sqlalchemy.types import TypeDecorator, TypeEngine

from delaytasks.model.clock import UTC
from delaytasks.model.errors import ConfigError

T = TypeVar("T")


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
        return dialect.type_descriptor(DateTime(timezone=True))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None or dialect.name == "postgresql":
            return value
        return value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)


class _Expression(functions.GenericFunction[T]):
    """An expression that each database writes in its own way.

    `{0}` and `{1}` in the texts are the arguments, and `{all}` is the list of them. A text with
    `{each}` is written for each argument, joined by AND. A text is empty if no statement for the
    database has the expression.
    """

    postgresql = mysql = sqlite = ""

    def __init_subclass__(cls) -> None:
        cls.inherit_cache = True  # SQLAlchemy reads it from each class
        super().__init_subclass__()


@compiles(_Expression)
def _(element: _Expression[Any], compiler: Any, **kw: Any) -> str:
    texts = {"mysql": element.mysql, "mariadb": element.mysql, "sqlite": element.sqlite}
    # A log also asks for dialects that are not supported.
    template = texts.get(compiler.dialect.name, element.postgresql)
    if compiler.preparer._double_percents:  # placeholders have them (Django's cursor for SQLite)
        template = template.replace("%", "%%")
    arguments = [compiler.process(clause, **kw) for clause in element.clauses]
    if "{each}" in template:
        return " AND ".join(template.format(each=argument) for argument in arguments)
    return template.format(*arguments, all=", ".join(arguments))


class _Condition(_Expression[bool]):
    """A condition that the compiler writes as an expression, not as a call of a function."""

    type = Boolean()

    def self_group(self, against: Any = None) -> Any:
        """Return the expression unchanged. As `(…) = 1`, for databases whose booleans are numbers,
        it could not use an index."""
        return self


_SQLITE_NOW = "strftime('%Y-%m-%d %H:%M:%f000', 'now'"


class db_now(_Expression[datetime]):
    """The clock of the database's statement in UTC. PostgreSQL's `now()` is the transaction's
    start."""

    type = UTCDateTime()
    postgresql = "clock_timestamp()"
    mysql = "UTC_TIMESTAMP(6)"
    sqlite = f"{_SQLITE_NOW})"


class db_now_plus(_Expression[datetime]):
    """The database's statement clock plus seconds, which may be negative."""

    type = UTCDateTime()
    postgresql = "(clock_timestamp() + {0} * interval '1 second')"
    mysql = "(UTC_TIMESTAMP(6) + INTERVAL ROUND({0} * 1000000) MICROSECOND)"
    sqlite = f"{_SQLITE_NOW}, printf('%+.6f seconds', {{0}}))"


def once(instant: ColumnElement[datetime]) -> ScalarSelect[datetime]:
    """Evaluate the instant once in a statement.

    PostgreSQL's clock_timestamp() may differ from row to row, and so could not be used to search an
    index.
    """
    return select(instant).scalar_subquery()


class latest(_Expression[datetime]):
    """The later one of two instants, of which the first may be NULL."""

    type = UTCDateTime()
    postgresql = "GREATEST({all})"
    mysql = "GREATEST(COALESCE({0}, {1}), {1})"
    sqlite = "max(coalesce({0}, {1}), {1})"


class is_past(_Condition):
    """`column <= instant`, on PostgreSQL as a range with bounds that the planner does not know.

    PostgreSQL estimates that such a range is narrow. It estimates a range without a lower bound as
    a third of all rows, and would scan a large table.
    """

    postgresql = "({0} BETWEEN (SELECT CAST('-infinity' AS TIMESTAMPTZ)) AND (SELECT {1}))"
    mysql = sqlite = "({0} <= (SELECT {1}))"


class is_narrow(_Condition):
    """`column = value`, of which PostgreSQL's planner assumes that few rows meet it.

    It compares the column with two more values that the planner does not know. Therefore the index
    that begins with this column seems to find the fewest rows. Otherwise the planner may choose an
    index by due time alone, which begins with all rows that have ever run.
    """

    postgresql = "({0} = {1} AND {0} BETWEEN (SELECT {1}) AND (SELECT {1}))"
    mysql = sqlite = "({0} = {1})"


class is_rare(_Condition):
    """A condition of which the planner assumes that few rows meet it.

    SQLite's statistics only contain how many rows each status has on average. If nearly all rows
    are finished, it would expect as many that run, and scan the table.
    """

    postgresql = mysql = "({0})"
    sqlite = "likelihood({0}, 0.001)"


def unindexed(column: ColumnElement[int]) -> ColumnElement[int]:
    """Return the value of a column as `column + 0`, for which planners use no index on the column.

    The other conditions of the statement name few rows, for example by their ids or due times. Yet
    planners may read all rows of a status, since their statistics can be from a time when few rows
    had it, or walk the whole primary key to avoid a sort. For the status, this function is the
    opposite of `is_rare`.
    """
    return column + 0


# -- Conditions of CHECK constraints. Each of them costs PostgreSQL some microseconds a statement -


class are_counts(_Condition):
    """The columns have integers that are not negative. SQLite stores values of any type."""

    postgresql = mysql = "LEAST({all}, 0) = 0"
    sqlite = "typeof({each}) = 'integer' AND {each} >= 0"


class are_instants(_Condition):
    """The columns have NULL, or instants that `datetime` can represent.

    PostgreSQL also stores infinity and years beyond 9999, MySQL dates without a day, and SQLite
    values of any type. LEAST, which ignores NULLs, is the shortest form for PostgreSQL to parse.
    """

    postgresql = (
        "LEAST({all}) >= '0001-01-01 00:00:00+00' AND GREATEST({all}) < '10000-01-01 00:00:00+00'"
    )
    mysql = "YEAR({each}) * MONTH({each}) * DAYOFMONTH({each}) > 0"
    # The change by no days corrects a day that the month does not have.
    sqlite = (
        "datetime(substr({each}, 1, 19), '+0 days') IS substr({each}, 1, 19) "
        "AND ({each} IS NULL OR {each} >= '0001-01-01')"
    )


class is_queue_name(_Condition):
    """The column has a name that `model/inputs.py` accepts for a queue."""

    # Each claim and settlement checks it, and the collation makes that twice as fast.
    postgresql = "{0} ~ '^[A-Za-z0-9_.-]+$' COLLATE \"C\""
    mysql = "{0} <> '' AND {0} NOT REGEXP '[^A-Za-z0-9_.-]'"
    sqlite = "{0} <> '' AND {0} NOT GLOB '*[^A-Za-z0-9_.-]*'"


class is_json_list(_Condition):
    """The column has NULL or a JSON list."""

    postgresql = "json_typeof(CAST({0} AS json)) = 'array'"
    mysql = "JSON_VALID({0}) AND JSON_TYPE({0}) = 'ARRAY'"
    sqlite = "json_valid({0}) AND json_type({0}) = 'array'"


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
    #: A list is one parameter, and its index is used whatever the statistics contain. A text can be
    #: split into an array, and an index can find the texts that contain some parts.
    arrays: bool = False
    #: INSERT can skip rows that exist. Where it cannot, a failed INSERT leaves the transaction
    #: usable.
    insert_or_skip: bool = False
    #: COPY FROM STDIN.
    copy: bool = False
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
    #: A column of instants has a time zone, and its text may name one.
    time_zones: bool = False


POSTGRESQL = Capabilities(
    update_returning=True,
    arrays=True,
    insert_or_skip=True,
    copy=True,
    notify=True,
    looks_up_lists=True,
    prepare=True,
    server_side_cursors=True,
    time_zones=True,
)
MYSQL = Capabilities(looks_up_lists=True, reads_as_of_start=True, server_side_cursors=True)
SQLITE = Capabilities(update_returning=True, insert_or_skip=True, begins_late=True)


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
