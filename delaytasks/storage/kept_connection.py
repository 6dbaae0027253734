"""Keeps one connection outside its pool, for statements that are sent past SQLAlchemy.

For a prepared statement, checking a connection out of SQLAlchemy's pool and in again takes longer
than everything else that the process does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine

from delaytasks.storage.engines import has_input

#: The connections that the parent of this process kept. They are never released, since releasing
#: one returns it to the parent's pool, whose lock another thread may have held during the fork.
_of_parent: list[Connection] = []


class KeptConnection:
    """Lends connections of an engine that commits each statement by itself.

    A connection is kept for the next use if SQLAlchemy has begun nothing on it, as after a prepared
    statement. While it is in use, another thread gets a connection of the pool.
    """

    def __init__(self) -> None:
        #: The kept connection, if it is not in use. `clear` replaces the list, so that a connection
        #: that was in use meanwhile is not kept.
        self._free: list[Connection] = []

    @contextmanager
    def use(self, engine: Engine) -> Iterator[Connection]:
        free = self._free
        connection = self._take(free) or engine.connect()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        is_unused = not connection.in_transaction() and not connection.invalidated
        if is_unused and free is self._free and not free:
            free.append(connection)
        else:
            connection.close()

    def clear(self) -> None:
        """Close the kept connection."""
        free, self._free = self._free, []
        for connection in free:
            connection.close()

    def after_fork(self) -> None:
        _of_parent.extend(self._free)
        self._free = []

    def _take(self, free: list[Connection]) -> Connection | None:
        try:
            connection = free.pop()
        except IndexError:
            return None
        driver_connection = connection.connection.driver_connection
        if has_input(driver_connection):  # the server has ended it
            connection.invalidate()
            connection.close()
            return None
        return connection
