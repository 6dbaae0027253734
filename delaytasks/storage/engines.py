"""Engines made for each database's ways."""

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
    NullPool,
    QueuePool,
    create_engine,
    event,
    exc,
)

from delaytasks.core.errors import ConfigError
from delaytasks.storage.database_addresses import SEVERAL_HOSTS
from delaytasks.storage.driver_errors import mark_as_connecting
from delaytasks.storage.fork_gate import gate
from delaytasks.storage.types import nearest

#: A server that vanished without a goodbye is given up after 25 seconds, not after the two hours of TCP.
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
#: A row that some caller's open transaction has locked is waited for so long, at each of several tries.
LOCK_TIMEOUT_S = 1
_RESTED = "delaytasks.rested"


def make_engine(url: URL, pool_size: int, isolation_level: str) -> Engine:
    autocommit = isolation_level == "AUTOCOMMIT"
    options: dict[str, Any] = {"pool_size": pool_size, "max_overflow": 20, "pool_timeout": 10}
    backend = url.get_backend_name()
    if backend == "sqlite":
        options["connect_args"] = {"timeout": 30, "check_same_thread": False}
        # Also for a database in memory, whose own pool takes no sizes. It is another one for each connection, so rows
        # are the caller's session's alone, but the time can be asked.
        engine = create_engine(url, poolclass=QueuePool, hide_parameters=True, **options)
        event.listen(engine, "connect", _sqlite_connect)
        event.listen(engine, "handle_error", _tell_connecting_from_asking)
        event.listen(engine, "checkout", gate.enter)
        event.listen(engine, "checkin", gate.leave)
        if not autocommit:
            event.listen(engine, "begin", _sqlite_begin_immediate)
        return engine
    if backend == "postgresql":
        options["connect_args"] = {
            "connect_timeout": 5,
            "application_name": "delaytasks",
            "options": _postgresql_options(url),
            **_KEEPALIVES,
        }
    else:
        options["connect_args"] = {"connect_timeout": 5, "read_timeout": 5, "charset": "utf8mb4"}
    if autocommit:
        # Nothing is ever open on such a connection: a ROLLBACK on return would be a round trip for nothing.
        options["pool_reset_on_return"] = None
    try:
        # Parameters are bodies and keys: an error, its cause included, must not show them.
        engine = create_engine(
            url, isolation_level=isolation_level, hide_parameters=True, **options
        )
        if backend != "postgresql":
            event.listen(engine, "connect", _mysql_connect)
        elif engine.dialect.driver == "psycopg2":
            event.listen(engine, "connect", _psycopg2_connect)
        event.listen(engine, "do_connect", _connect)
        event.listen(engine, "handle_error", _tell_connecting_from_asking)
        event.listen(engine, "checkin", _rested)
        event.listen(engine, "checkout", _check_alive)
        return engine
    except exc.NoSuchModuleError:
        raise ConfigError(
            f"SQLAlchemy has no driver {url.drivername!r}; leave it out of the URL"
        ) from None
    except exc.ArgumentError as error:  # hosts and ports that do not fit together
        raise ConfigError(
            f"delaytasks_database_url can not be read: {error}; {SEVERAL_HOSTS}"
        ) from error
    except ModuleNotFoundError as error:
        package = "psycopg2-binary" if backend == "postgresql" else "'delaytasks[mysql]'"
        raise ConfigError(
            f"no driver {error.name!r} for {url.drivername}: pip install {package}"
        ) from error


def _connect(dialect: Any, _record: Any, arguments: Any, options: Any) -> Any:
    try:
        return dialect.connect(*arguments, **options)
    except TypeError as error:
        fact = f"delaytasks_database_url has an option in its query (after the ?) that {dialect.driver} does not take"
        raise ConfigError(f"{fact}: {error}") from error


def make_plain_engine(url: URL) -> Engine:
    """For a question now and then, beside a pool in which every connection may be in use."""
    limits = (
        {"connect_timeout": 5}
        if url.get_backend_name() == "postgresql"
        else {"connect_timeout": 5, "read_timeout": 5}
    )
    return create_engine(
        url,
        poolclass=NullPool,
        isolation_level="AUTOCOMMIT",
        hide_parameters=True,
        connect_args=limits,
    )


def _postgresql_options(url: URL) -> str:
    """What the URL asks for comes last, so that it wins."""
    ours = {
        "lock_timeout": f"{LOCK_TIMEOUT_S}s",
        "default_transaction_isolation": r"read\ committed",
        "timezone": "UTC",
        # Each of our statements has an index. A plan is kept while the table grows, and one that was made for a table
        # of a few rows would read it from end to end; a plan that can not help it is not worth compiling either.
        "enable_seqscan": "off",
        "jit": "off",
        "plan_cache_mode": "force_generic_plan",
    }
    given = url.query.get("options", "")
    set_ours = (f"-c {name}={value}" for name, value in ours.items())
    return " ".join([*set_ours, *([given] if isinstance(given, str) else given)]).strip()


def _psycopg2_connect(connection: Any, _record: Any) -> None:
    from psycopg2 import extensions

    read = extensions.PYDATETIMETZ

    def instant(written: Any, cursor: Any) -> datetime | None:
        try:
            told: datetime | None = read(written, cursor)
            return told
        except ValueError:
            return nearest(written)

    extensions.register_type(extensions.new_type(read.values, "INSTANT", instant), connection)


def _sqlite_connect(connection: Any, _record: Any) -> None:
    # We say BEGIN ourselves, and say it IMMEDIATE: a deferred one fails when two writers meet.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA busy_timeout = 30000")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = NORMAL")
    # Pages that are written again and again, as indexes' are, go to the file once for some thousand rows.
    cursor.execute("PRAGMA wal_autocheckpoint = 4000")
    cursor.close()


def _tell_connecting_from_asking(context: ExceptionContext) -> None:
    """Where no connection came about nothing was asked, so no outcome is unknown."""
    if context.connection is None:
        context.is_disconnect = False
        mark_as_connecting(context.original_exception)


def _rested(_connection: Any, record: Any) -> None:
    record.info[_RESTED] = True


def _check_alive(connection: Any, record: Any, _proxy: Any) -> None:
    """A server says nothing to a connection at rest, except that it ends it: so the pool makes another one, and
    nothing was sent whose outcome would be unknown. Costs a microsecond, not a round trip."""
    if _RESTED in record.info and _has_something_to_say(connection):
        raise exc.DisconnectionError


def _has_something_to_say(connection: Any) -> bool:
    try:
        number = (connection if hasattr(connection, "fileno") else connection._sock).fileno()
        if not hasattr(select, "poll"):
            return bool(select.select([number], [], [], 0)[0])
        poll = select.poll()
        poll.register(number, select.POLLIN)
        return bool(poll.poll(0))
    except Exception:  # drivers say in their own ways that it is closed
        return True


def _mysql_connect(connection: Any, _record: Any) -> None:
    from pymysql.constants import FIELD_TYPE

    def instant(written: str) -> datetime | str:
        try:
            return datetime.fromisoformat(written)
        except ValueError:
            return written  # "0000-00-00"

    # Its own way is a regular expression, and each row of a chunk has two.
    connection.decoders = {**connection.decoders, FIELD_TYPE.DATETIME: instant}
    # The driver's time limit is for connecting, which would wait for ever; a statement may take its time.
    connection._read_timeout = None
    if connection._sock.family != getattr(socket, "AF_UNIX", None):
        for option, value in _TCP_OPTIONS.items():
            if hasattr(socket, option):
                connection._sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    with connection.cursor() as cursor:
        # For statements that stand alone too: else they lock gaps in the indexes that those who schedule insert into.
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        cursor.execute(f"SET SESSION innodb_lock_wait_timeout = {LOCK_TIMEOUT_S}")


def _sqlite_begin_immediate(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
