"""Runs all statements of delaytasks on a connection of Django's, for tests.

Django's tests roll a transaction back, so its connection is the only one that sees their rows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

from asgiref.sync import async_to_sync, sync_to_async
from django.db import Error, connections, transaction
from sqlalchemy import Connection, Engine, StaticPool, make_url

from delaytasks.core.task import DelayTask
from delaytasks.storage.borrowed_connections import ConnectionSource
from delaytasks.storage.simulated_time import SimulatedTime


def source_at(alias: str) -> ConnectionSource:
    """Return the connections of a database in `settings.DATABASES`."""
    return ConnectionSource(
        partial(_connect, alias),
        partial(_around_processor, alias),
        partial(_rewriting, alias),
        async_to_sync(_awaited),
        lambda call: sync_to_async(call, thread_sensitive=True)(),
    )


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


@contextmanager
def _connect(alias: str) -> Iterator[Connection]:
    """Open a SQLAlchemy connection on Django's, in an atomic block that commits or rolls back."""
    with transaction.atomic(using=alias):
        django_connection = connections[alias]
        pool = StaticPool(lambda: _Lent(django_connection.connection), dialect=_dialect(alias))
        engine = Engine(pool, _dialect(alias), make_url(f"{_dialect(alias).name}://"))
        with engine.connect() as connection:
            if getattr(engine.dialect, "server_version_info", None) is None:
                engine.dialect.initialize(connection)
            yield connection


@contextmanager
def _around_processor(alias: str, task: DelayTask) -> Iterator[None]:
    """Leave the test's transaction usable if a statement of the processor fails.

    A worker has no transaction around a processor, so only that statement would be undone.
    """
    connection = connections[alias]
    if not connection.in_atomic_block:
        yield
        return
    savepoint = transaction.savepoint(using=alias)
    try:
        yield
    except BaseException:
        if connection.needs_rollback or not _is_usable(connection):
            connection.needs_rollback = False
            transaction.savepoint_rollback(savepoint, using=alias)
        raise
    transaction.savepoint_commit(savepoint, using=alias)


def _is_usable(connection: Any) -> bool:
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except Error:
        return False
    return True


@contextmanager
def _rewriting(alias: str, time: SimulatedTime) -> Iterator[None]:
    """Let the statements that producers write on Django's connection read the test's clock."""
    connection = connections[alias]
    dialect = _dialect(alias).name

    def execute(run: Callable[..., Any], sql: Any, *rest: Any) -> Any:
        return run(time.rewritten(sql, dialect) if isinstance(sql, str) else sql, *rest)

    with connection.execute_wrapper(execute):
        yield


class _Lent:
    """Django's connection of the driver, without the methods that end a transaction."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def cursor(self, *arguments: Any, **options: Any) -> Any:
        cursor = self._connection.cursor(*arguments, **options)
        if hasattr(cursor, "adapters"):  # psycopg 3, for which Django has registered its own
            from psycopg.types.datetime import TimestamptzLoader

            cursor.adapters.register_loader("timestamptz", TimestamptzLoader)
        return cursor

    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    def close(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def _dialect(alias: str) -> Any:
    connection = connections[alias]
    return _dialect_of(connection.vendor, connection.Database)


@lru_cache
def _dialect_of(vendor: str, driver: Any) -> Any:
    """Return SQLAlchemy's dialect for the driver that Django uses."""
    name = f"{vendor}+{_DRIVER_NAMES.get(driver.__name__, driver.__name__)}"
    dialect: Any = make_url(f"{name}://").get_dialect()
    # Our tables have no hstore, and looking for it would need more of the connection.
    options = {"use_native_hstore": False} if vendor == "postgresql" else {}
    return dialect(dbapi=driver, **options)


#: SQLAlchemy's names of drivers. Where PyMySQL takes the place of mysqlclient, both work alike.
_DRIVER_NAMES = {"MySQLdb": "mysqldb", "sqlite3": "pysqlite", "sqlite3.dbapi2": "pysqlite"}
