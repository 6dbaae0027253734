"""The differences between psycopg2 and psycopg 3 that SQLAlchemy does not hide.

SQLAlchemy sends most statements. COPY, prepared statements and notices go directly to the driver.
"""

from __future__ import annotations

import select as io
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Protocol

from sqlalchemy import URL, Connection


class PostgresqlDriver(Protocol):
    def connect_options(self) -> dict[str, Any]:
        """Return the options of this driver for connections of our own."""

    def time_zone(self, connection: Any) -> str | None:
        """Return the session's time zone, which the server reports without a query."""

    def cursor(self, connection: Any) -> Any:
        """Return a cursor that puts the parameters into the text, which EXECUTE requires."""

    def copy(self, cursor: Any, statement: str, parts: Iterator[str]) -> None:
        """Execute COPY FROM STDIN with the text of `parts`."""

    def notices(self, connection: Any, timeout_s: float) -> Sequence[str]:
        """Return the payloads of the notices that have arrived, as soon as there is one."""


class Psycopg2:
    def connect_options(self) -> dict[str, Any]:
        return {}

    def time_zone(self, connection: Any) -> str | None:
        zone: str | None = connection.get_parameter_status("TimeZone")
        return zone

    def cursor(self, connection: Any) -> Any:
        return connection.cursor()

    def copy(self, cursor: Any, statement: str, parts: Iterator[str]) -> None:
        text = _CopyFile(parts)
        try:
            cursor.copy_expert(statement, text)
        except Exception:
            if text.interrupted is not None:
                raise text.interrupted from None
            raise

    def notices(self, connection: Any, timeout_s: float) -> Sequence[str]:
        if not connection.notifies:
            poll = io.poll()
            poll.register(connection.fileno(), io.POLLIN)
            if not poll.poll(timeout_s * 1000):
                return ()
            connection.poll()
        payloads = [notice.payload for notice in connection.notifies]
        connection.notifies.clear()
        return payloads


class _CopyFile:
    """The input of psycopg2's COPY, which is made while the database reads the part before."""

    def __init__(self, parts: Iterator[str]) -> None:
        #: The exception of Ctrl-C or of a time limit, which the driver turns into an error of the
        #: database.
        self.interrupted: BaseException | None = None
        reader = self._read(parts)
        next(reader)
        #: The generator's own method: an exception that arrived while the driver was sending is
        #: raised inside the generator, not before it.
        self.read = reader.send

    def _read(self, parts: Iterator[str]) -> Generator[str, int, None]:
        try:
            yield ""
            while True:
                yield next(parts, "")
        except BaseException as error:
            self.interrupted = error
            raise


class Psycopg3:
    def connect_options(self) -> dict[str, Any]:
        from psycopg import ClientCursor

        # The default cursor sends the parameters separately and prepares statements that are
        # repeated, with names that connections behind a pooler may share.
        return {"cursor_factory": ClientCursor}

    def time_zone(self, connection: Any) -> str | None:
        zone: str | None = connection.info.parameter_status("TimeZone")
        return zone

    def cursor(self, connection: Any) -> Any:
        from psycopg import ClientCursor

        return ClientCursor(connection)

    def copy(self, cursor: Any, statement: str, parts: Iterator[str]) -> None:
        with cursor.copy(statement) as copy:
            for part in parts:
                copy.write(part)

    def notices(self, connection: Any, timeout_s: float) -> Sequence[str]:
        return [notice.payload for notice in connection.notifies(timeout=timeout_s, stop_after=1)]


#: By the name of SQLAlchemy's driver.
_BY_NAME: dict[str, PostgresqlDriver] = {"psycopg2": Psycopg2(), "psycopg": Psycopg3()}


def own_driver(url: URL) -> PostgresqlDriver:
    """Return the driver of our own connections to a PostgreSQL database."""
    return _BY_NAME[url.get_driver_name()]


def driver_of(connection: Any) -> PostgresqlDriver | None:
    """Return the driver of a SQLAlchemy connection, or None if it is neither of the two."""
    if not isinstance(connection, Connection) or connection.dialect.is_async:
        return None
    return _BY_NAME.get(connection.dialect.driver)
