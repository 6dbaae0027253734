"""The statements of the hot path, which PostgreSQL parses and plans once for each connection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple
from zlib import crc32

from sqlalchemy import Connection

from delaytasks.storage.database import Database
from delaytasks.storage.driver_errors import PREPARED_IS_GONE, told

#: What we ask for, and what many a server has of itself: a pooler may leave out what we ask for.
_UTC = {"UTC", "Etc/UTC"}


class Answer(NamedTuple):
    rows: Sequence[Sequence[Any]]
    #: How many rows it met.
    met: int


class Prepared:
    """One statement for all connections; where it can not be prepared it is executed as any other. Behind a pooler that
    gives each statement another connection of the server's that is so for good: what is prepared there is not found.
    That ends a transaction, which is then to be tried again."""

    def __init__(
        self,
        database: Database,
        statement: Any,
        is_planned_once: bool = True,
        names: Sequence[str] | None = None,
    ) -> None:
        self._statement = statement
        #: Of the columns that an INSERT gives values to.
        self._names = names
        self._is_on = is_planned_once and database.can.prepare

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
                if prepare not in link.info:
                    cursor.execute(prepare)
                    link.info[prepare] = True
                cursor.execute(execute, [_sent(given[name]) for name in names])
                return Answer(cursor.fetchall() if cursor.description else (), cursor.rowcount)
        except driver.Error as error:
            self._is_on = error.pgcode not in PREPARED_IS_GONE
            if self._is_on or not link.driver_connection.autocommit:
                raise told(on, "EXECUTE", error) from error
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
        """How to prepare and how to execute it; its parameters in their order, and those that never change."""
        from sqlalchemy.dialects import postgresql

        dialect: Any = postgresql.dialect(paramstyle="numeric_dollar")  # type: ignore[no-untyped-call]
        compiled = self._statement.compile(dialect=dialect, column_keys=self._names)
        # By its text, or another release that shares a connection of the server's would execute ours.
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
    """A list of numbers or instants as one text, which is read faster than an expression of so many constants."""
    if not isinstance(value, list):
        return value
    return "{" + ",".join(["NULL" if item is None else str(item) for item in value]) + "}"
