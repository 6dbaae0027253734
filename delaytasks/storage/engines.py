"""SQLAlchemy engines with options and listeners for each database."""

from __future__ import annotations

import select
import socket
from datetime import datetime
from typing import Any

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    ExceptionContext,
    QueuePool,
    create_engine,
    event,
    exc,
)

from delaytasks.core.errors import ConfigError
from delaytasks.storage import needless_rollbacks
from delaytasks.storage.capabilities import for_database
from delaytasks.storage.database_addresses import SEVERAL_HOSTS
from delaytasks.storage.driver_errors import mark_as_connecting
from delaytasks.storage.fork_gate import gate
from delaytasks.storage.postgresql_drivers import own_driver

#: The connection to a server that vanished ends after 25 seconds, not after TCP's two hours.
_KEEPALIVES = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}
_TCP_OPTIONS = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 25_000,
}
#: How long a statement waits for a row that another transaction has locked. `Database.run` tries
#: again.
ROW_LOCK_TIMEOUT_S = 1
_AUTOCOMMIT = "AUTOCOMMIT"
_RETURNED = "delaytasks.returned"
_PACKAGES = {
    "psycopg2": "psycopg2-binary",
    "psycopg": "'delaytasks[psycopg]'",
    "pymysql": "'delaytasks[mysql]'",
}


def make_engine(url: URL, pool_size: int, isolation_level: str) -> Engine:
    options: dict[str, Any] = {"pool_size": pool_size, "max_overflow": 20, "pool_timeout": 10}
    make = for_database(
        url.get_backend_name(),
        postgresql=_postgresql_engine,
        mysql=_mysql_engine,
        sqlite=_sqlite_engine,
    )
    try:
        return make(url, isolation_level, options)
    except exc.NoSuchModuleError:
        raise ConfigError(
            f"SQLAlchemy has no driver {url.drivername!r}; leave it out of the URL"
        ) from None
    except exc.ArgumentError as error:  # the numbers of hosts and ports differ
        raise ConfigError(
            f"delaytasks_database_url cannot be read: {error}; {SEVERAL_HOSTS}"
        ) from error
    except ModuleNotFoundError as error:
        package = _PACKAGES[url.get_driver_name()]
        raise ConfigError(
            f"no driver {error.name!r} for {url.drivername}: pip install {package}"
        ) from error


def _postgresql_engine(url: URL, isolation_level: str, options: dict[str, Any]) -> Engine:
    options["connect_args"] = {
        "connect_timeout": 5,
        "application_name": "delaytasks",
        "options": _postgresql_options(url),
        **_KEEPALIVES,
        **own_driver(url).connect_options(),
    }
    return _server_engine(url, isolation_level, options)


def _mysql_engine(url: URL, isolation_level: str, options: dict[str, Any]) -> Engine:
    is_autocommit = isolation_level == _AUTOCOMMIT
    options["connect_args"] = {"connect_timeout": 5, "read_timeout": 5, "charset": "utf8mb4"}
    options |= needless_rollbacks.options(is_autocommit)
    engine = _server_engine(url, isolation_level, options)
    event.listen(engine, "connect", _mysql_connect)
    if not is_autocommit:
        needless_rollbacks.skip(engine)
    return engine


def _server_engine(url: URL, isolation_level: str, options: dict[str, Any]) -> Engine:
    if isolation_level == _AUTOCOMMIT:
        # No transaction is ever open on such a connection: a ROLLBACK on return would waste a round
        # trip.
        options["pool_reset_on_return"] = None
    # SQLAlchemy would not read psycopg's count of the rows that an INSERT writes.
    options["execution_options"] = {"preserve_rowcount": True}
    # Parameters contain bodies and keys, which an error and its cause must not show.
    engine = create_engine(url, isolation_level=isolation_level, hide_parameters=True, **options)
    event.listen(engine, "do_connect", _connect)
    event.listen(engine, "handle_error", _connecting_sent_nothing)
    event.listen(engine, "checkin", _mark_returned)
    event.listen(engine, "checkout", _check_alive)
    return engine


def _sqlite_engine(url: URL, isolation_level: str, options: dict[str, Any]) -> Engine:
    options["connect_args"] = {"timeout": 30, "check_same_thread": False}
    # A database in memory needs this pool too, since its own takes no sizes. Each of its
    # connections is another database, so rows exist in the caller's session only, but any
    # connection can return the time.
    engine = create_engine(url, poolclass=QueuePool, hide_parameters=True, **options)
    event.listen(engine, "connect", _sqlite_connect)
    event.listen(engine, "handle_error", _connecting_sent_nothing)
    event.listen(engine, "checkout", gate.enter)
    event.listen(engine, "checkin", gate.leave)
    if isolation_level != _AUTOCOMMIT:
        event.listen(engine, "begin", _sqlite_begin_immediate)
    return engine


def _connect(dialect: Any, _record: Any, arguments: Any, options: Any) -> Any:
    try:
        return dialect.connect(*arguments, **options)
    except TypeError as error:
        raise ConfigError(
            f"delaytasks_database_url has an option in its query (after the ?) that "
            f"{dialect.driver} does not take: {error}"
        ) from error


def _postgresql_options(url: URL) -> str:
    """Return libpq's `options`. Those of the URL come last, so that they win."""
    ours = {
        "lock_timeout": f"{ROW_LOCK_TIMEOUT_S}s",
        "default_transaction_isolation": r"read\ committed",
        "timezone": "UTC",
        # Each of our statements has an index. A plan is kept while the table grows, and one made
        # for a table of a few rows would scan all of a large one. A plan that has to scan is not
        # worth compiling either.
        "enable_seqscan": "off",
        "jit": "off",
        "plan_cache_mode": "force_generic_plan",
    }
    given = url.query.get("options", "")
    set_ours = (f"-c {name}={value}" for name, value in ours.items())
    return " ".join([*set_ours, *([given] if isinstance(given, str) else given)]).strip()


def _sqlite_connect(connection: Any, _record: Any) -> None:
    # We send BEGIN IMMEDIATE ourselves: a deferred transaction fails if two writers meet.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA busy_timeout = 30000")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = NORMAL")
    # Pages that are written again and again, such as those of indexes, go to the file once for some
    # thousand rows.
    cursor.execute("PRAGMA wal_autocheckpoint = 4000")
    cursor.close()


def _connecting_sent_nothing(context: ExceptionContext) -> None:
    """If connecting fails, no statement was sent, so no outcome is unknown."""
    if context.connection is None:
        context.is_disconnect = False
        mark_as_connecting(context.original_exception)


def _mark_returned(_connection: Any, record: Any) -> None:
    record.info[_RETURNED] = True


def _check_alive(connection: Any, record: Any, _proxy: Any) -> None:
    """Replace a pooled connection that the server has ended, before a statement is sent on it.

    The server sends nothing on an idle connection except its end. The check takes a microsecond,
    not a round trip, and prevents errors whose outcome would be unknown.
    """
    if _RETURNED in record.info and has_input(connection):
        raise exc.DisconnectionError


def has_input(connection: Any) -> bool:
    """Whether the server has ended the idle connection, or has sent something on it."""
    try:
        number = (connection if hasattr(connection, "fileno") else connection._sock).fileno()
        if not hasattr(select, "poll"):
            return bool(select.select([number], [], [], 0)[0])
        poll = select.poll()
        poll.register(number, select.POLLIN)
        return bool(poll.poll(0))
    except Exception:  # each driver has its own error for a closed connection
        return True


def _mysql_connect(connection: Any, _record: Any) -> None:
    from pymysql.constants import FIELD_TYPE

    def instant(written: str) -> datetime | str:
        try:
            return datetime.fromisoformat(written)
        except ValueError:
            return written  # "0000-00-00"

    # The driver's own converter is a regular expression, and each row of a chunk has two instants.
    connection.decoders = {**connection.decoders, FIELD_TYPE.DATETIME: instant}
    # The time limit is for connecting only. A statement may take longer.
    connection._read_timeout = None
    if connection._sock.family != getattr(socket, "AF_UNIX", None):
        for option, value in _TCP_OPTIONS.items():
            if hasattr(socket, option):
                connection._sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    with connection.cursor() as cursor:
        # This applies to autocommitted statements too. At REPEATABLE READ they would lock gaps in
        # the indexes, and block the producers' inserts.
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        cursor.execute(f"SET SESSION innodb_lock_wait_timeout = {ROW_LOCK_TIMEOUT_S}")


def _sqlite_begin_immediate(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
