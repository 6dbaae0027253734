"""Ends a search that takes too long: some filters have no index, and read the whole table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection, event, exc

from delaytasks.core.clock import monotonic
from delaytasks.core.errors import SearchTimeoutError
from delaytasks.storage.capabilities import for_database
from delaytasks.storage.database import Database
from delaytasks.storage.driver_errors import is_statement_timeout

T = TypeVar("T")
#: For the servers, 0 is no limit.
LEAST_LIMIT_S = 0.001
#: SQLite asks whether to go on each time it has executed this number of its instructions.
SQLITE_INSTRUCTIONS = 10_000


def search(database: Database, work: Callable[[Any], T], limit_s: float) -> T:
    """Run a search of one or more statements.

    Each statement ends after `limit_s` seconds, and no statement begins later.

    Raises
    ------
    SearchTimeoutError
        If the search has reached the limit.
    """
    limit_s = max(limit_s, LEAST_LIMIT_S)
    connect = for_database(database.backend, postgresql=_postgresql, mysql=_mysql, sqlite=_sqlite)

    def limited(connection: Connection) -> T:
        deadline = monotonic() + limit_s

        def check(*_: Any) -> None:
            if monotonic() > deadline:
                raise _timeout(limit_s)

        event.listen(connection, "before_cursor_execute", check)
        try:
            return work(connection)
        except exc.DBAPIError as error:
            if is_statement_timeout(error):
                raise _timeout(limit_s) from error
            raise
        finally:
            # The statement that resets the limit of the connection follows.
            event.remove(connection, "before_cursor_execute", check)

    return database.repeat(limited, partial(connect, database, limit_s))


def _timeout(limit_s: float) -> SearchTimeoutError:
    return SearchTimeoutError(
        f"the search took longer than {limit_s:.1f} s: narrow its filter, for example by a status, "
        "a queue or a range of times"
    )


@contextmanager
def _postgresql(database: Database, limit_s: float) -> Iterator[Connection]:
    with database.begin() as connection:
        # It ends with the transaction, so that no pooled connection keeps it.
        connection.exec_driver_sql(f"SET LOCAL statement_timeout = {round(limit_s * 1000)}")
        yield connection


@contextmanager
def _mysql(database: Database, limit_s: float) -> Iterator[Connection]:
    with database.auto.connect() as connection:
        is_mariadb = getattr(connection.dialect, "is_mariadb", False)
        limit = (
            f"max_statement_time = {limit_s:.3f}"
            if is_mariadb
            else f"max_execution_time = {round(limit_s * 1000)}"
        )
        connection.exec_driver_sql(f"SET SESSION {limit}")
        try:
            yield connection
        finally:
            if not connection.invalidated:
                name = limit.partition(" ")[0]
                connection.exec_driver_sql(f"SET SESSION {name} = DEFAULT")


@contextmanager
def _sqlite(database: Database, limit_s: float) -> Iterator[Connection]:
    with database.auto.connect() as connection:
        driver_connection: Any = connection.connection.driver_connection
        deadline = monotonic() + limit_s
        driver_connection.set_progress_handler(lambda: monotonic() > deadline, SQLITE_INSTRUCTIONS)
        try:
            yield connection
        finally:
            driver_connection.set_progress_handler(None, 0)
