"""Column types and expressions that mean the same on PostgreSQL, MySQL/MariaDB and SQLite."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, DateTime, ScalarSelect, Text, literal, select
from sqlalchemy.dialects import mysql
from sqlalchemy.engine import Dialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import functions
from sqlalchemy.types import TypeDecorator, TypeEngine

from delaytasks.core.clock import UTC

#: Before all rows, and an instant that each database can say.
LONG_AGO = datetime(1000, 1, 1, tzinfo=UTC)

LongText = Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")


class UTCDateTime(TypeDecorator[datetime]):
    """Aware UTC with microseconds; databases that have no time zones store it naive."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name in ("mysql", "mariadb"):
            return dialect.type_descriptor(mysql.DATETIME(fsp=6))
        return dialect.type_descriptor(DateTime(timezone=True))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None or dialect.name == "postgresql":
            return value
        return value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)


class db_now(functions.GenericFunction[datetime]):
    """The database's statement clock, in UTC: not `now()`, which is the transaction's start on PostgreSQL."""

    type = UTCDateTime()
    inherit_cache = True
    name = "db_now"


class db_now_plus(functions.GenericFunction[datetime]):
    """The database's statement clock plus seconds, which may be negative."""

    type = UTCDateTime()
    inherit_cache = True
    name = "db_now_plus"


def once(instant: ColumnElement[datetime]) -> ScalarSelect[datetime]:
    """The instant, asked for once in a statement: an index can not be searched by PostgreSQL's clock_timestamp(),
    since that may differ from row to row."""
    return select(instant).scalar_subquery()


def is_past(column: ColumnElement[datetime], instant: ColumnElement[datetime]) -> ColumnElement[bool]:
    """`column <= instant`, as a range whose ends no planner knows. PostgreSQL expects such a one to be narrow; where it
    is open below, a third of all rows, and so it would read a large table from end to end."""
    return column.between(once(literal(LONG_AGO, UTCDateTime())), once(instant))


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
    return f"(UTC_TIMESTAMP(6) + INTERVAL ROUND({compiler.process(element.clauses, **kw)} * 1000000) MICROSECOND)"


@compiles(db_now_plus, "sqlite")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    seconds = compiler.process(element.clauses, **kw)
    return _escaped(compiler, f"{_SQLITE_NOW}, printf('%+.6f seconds', ") + f"{seconds}))"


def _escaped(compiler: Any, text: str) -> str:
    """Percent signs doubled for drivers whose placeholders are percent signs (Django's cursor for SQLite)."""
    return text.replace("%", "%%") if compiler.preparer._double_percents else text
