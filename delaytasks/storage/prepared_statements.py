"""The statements of the hot path, which reach PostgreSQL past SQLAlchemy.

Most are parsed and planned once for each connection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

from sqlalchemy import Connection

from delaytasks.storage.database import Database
from delaytasks.storage.driver_errors import PREPARED_IS_GONE, as_sqlalchemy_error, sqlstate_of
from delaytasks.storage.postgresql_drivers import PostgresqlDriver, driver_of

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
        self._statement = statement
        #: The columns to which an INSERT gives values.
        self._names = names
        self._is_planned_once = is_planned_once
        self._is_on = database.can.prepare
        self._made_texts: _Texts | None = None

    def __call__(self, on: Connection, values: Mapping[str, Any]) -> Answer:
        driver = self._driver(on)
        if driver is None:
            result = on.execute(self._statement, values)
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
        compiled = self._statement.compile(dialect=dialect, column_keys=self._names)
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
