"""The statements of the hot path, which reach PostgreSQL past SQLAlchemy.

Most are parsed and planned once for each connection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple
from zlib import crc32

from sqlalchemy import Connection

from delaytasks.storage.database import Database
from delaytasks.storage.driver_errors import PREPARED_IS_GONE, as_sqlalchemy_error

#: We ask for UTC, but a pooler may ignore it. Many servers use UTC anyway.
_UTC = {"UTC", "Etc/UTC"}


class Answer(NamedTuple):
    rows: Sequence[Sequence[Any]]
    #: The number of rows that the statement changed or returned.
    row_count: int


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

    def __call__(self, on: Connection, values: Mapping[str, Any]) -> Answer:
        link = self._link(on)
        if link is None:
            result = on.execute(self._statement, values)
            return Answer(result.all() if result.returns_rows else (), result.rowcount)
        prepare, execute, names, constants = self._texts
        given = {**constants, **values}
        driver: Any = on.dialect.dbapi
        try:
            with link.cursor() as cursor:
                if self._is_planned_once and prepare not in link.info:
                    cursor.execute(prepare)
                    link.info[prepare] = True
                cursor.execute(execute, [_sent(given[name]) for name in names])
                return Answer(cursor.fetchall() if cursor.description else (), cursor.rowcount)
        except driver.Error as error:
            self._is_on = error.pgcode not in PREPARED_IS_GONE
            if self._is_on or not link.driver_connection.autocommit:
                raise as_sqlalchemy_error(on, "EXECUTE", error) from error
        return self(on, values)

    def _link(self, on: Connection) -> Any:
        """Return the pool's connection if the statement can be prepared on it, else None."""
        if not self._is_on or on.dialect.driver != "psycopg2":
            return None
        link: Any = on.connection
        # The driver returns instants in the session's time zone, which only SQLAlchemy converts.
        is_utc = link.driver_connection.get_parameter_status("TimeZone") in _UTC
        return link if is_utc else None

    @cached_property
    def _texts(self) -> tuple[str, str, Sequence[str], dict[str, Any]]:
        """The PREPARE and EXECUTE texts, the names of the parameters in order, and the constant
        parameters. A statement that is not planned once is its own EXECUTE text."""
        from sqlalchemy.dialects import postgresql

        if not self._is_planned_once:
            plain: Any = postgresql.dialect(paramstyle="format")  # type: ignore[no-untyped-call]
            compiled = self._statement.compile(dialect=plain, column_keys=self._names)
            return "", compiled.string, compiled.positiontup, compiled.params
        dialect: Any = postgresql.dialect(paramstyle="numeric_dollar")  # type: ignore[no-untyped-call]
        compiled = self._statement.compile(dialect=dialect, column_keys=self._names)
        # The name depends on the text. Else another release on the same server connection would
        # execute our statement.
        name = f"delaytasks_{crc32(compiled.string.encode()):08x}"
        places = ", ".join(["%s"] * len(compiled.positiontup))
        execute = f"EXECUTE {name} ({places})"
        return (
            f"PREPARE {name} AS {compiled.string}",
            execute,
            compiled.positiontup,
            compiled.params,
        )


def _sent(value: Any) -> Any:
    """Return a list of numbers or instants as one text, which PostgreSQL reads faster than an
    expression."""
    if not isinstance(value, list):
        return value
    return "{" + ",".join(["NULL" if item is None else str(item) for item in value]) + "}"
