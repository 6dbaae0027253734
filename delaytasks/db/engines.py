"""Engines for the three databases: URLs, addresses, files, forks, and rollbacks that are not
needed."""

from __future__ import annotations

import os
import socket
import threading
from datetime import datetime
from inspect import signature
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    ExceptionContext,
    QueuePool,
    create_engine,
    event,
    exc,
    make_url,
)
from sqlalchemy.engine.default import DefaultDialect

from delaytasks.db.driver_errors import mark_as_connecting
from delaytasks.db.types import capabilities_of, for_database
from delaytasks.model.errors import ConfigError, StoreError
from delaytasks.model.private_files import FOLDER_MODE, make_file
from delaytasks.model.text import mask_url

# -- Prevents needless ROLLBACK statements on MySQL and MariaDB -----------------------------------

# SQLAlchemy rolls back when a connection returns to its pool, even after a commit or an
# autocommitted statement. The drivers of PostgreSQL send nothing then, but those of MySQL send
# ROLLBACK, so that each call would wait for one more answer.


#: Marks a pooled connection with an open transaction.
_IS_OPEN = "delaytasks.open"
#: SQLAlchemy has this option since 2.0.43.
_SKIP = "skip_autocommit_rollback"


def _skip_needless_rollbacks(engine: Engine) -> None:
    """Roll back returned connections of this engine only if their transaction is still open."""
    event.listen(engine, "begin", _begin)
    event.listen(engine, "commit", _end)
    event.listen(engine, "rollback", _end)
    event.listen(engine, "reset", _reset)


def _begin(connection: Connection) -> None:
    connection.info[_IS_OPEN] = True


def _end(connection: Connection) -> None:
    if not connection.invalidated:  # a connection that was lost has no info, and is not used again
        connection.info.pop(_IS_OPEN, None)


def _reset(connection: Any, record: Any, _state: object) -> None:
    """Roll back what a caller has left open, for example in a generator that was not closed."""
    if record.info.pop(_IS_OPEN, False):
        connection.rollback()


# -- The addresses that a database URL contains, to compare databases, and URLs for messages ------


SEVERAL_HOSTS = (
    "several hosts of one PostgreSQL cluster are written as "
    "postgresql://user@/name?host=h1:5432&host=h2:5432"
)
_DEFAULT_PORTS = {"postgresql": 5432, "mysql": 3306}


class DatabaseAddress(NamedTuple):
    """The parts of two URLs that are equal if they name the same database. Users and options may
    differ."""

    backend: str
    host: str | None
    port: str
    database: str | None


def addresses_of(url: URL) -> frozenset[DatabaseAddress]:
    """Return one address for each host in the URL. The URL of a cluster has several."""
    backend = {"mariadb": "mysql"}.get(url.get_backend_name(), url.get_backend_name())
    default = _DEFAULT_PORTS.get(backend)
    hosts, ports = _listed(url, "host"), _listed(url, "port")
    addresses = set()
    for host, port in zip(hosts or [url.host], cycle(ports or [None])):
        name, own = host, ""
        if host and host.count(":") == 1:  # not a socket's folder, and not an IPv6 address
            name, _, own = host.partition(":")
        number = str(own or port or url.port or default or "")
        addresses.add(DatabaseAddress(backend, name, number, url.database))
    return frozenset(addresses)


def _listed(url: URL, name: str) -> list[str | None]:
    """Return the values of `name` in the query. Drivers take them instead of those before the
    query."""
    for key in (name, "unix_socket", "service") if name == "host" else (name,):
        given = url.query.get(key)
        if given:
            return list(given.split(",") if isinstance(given, str) else given)
    return list(url.host.split(",")) if name == "host" and url.host else []


def masked(url: URL) -> str:
    """Return a URL for messages, without its secrets."""
    return mask_url(url.render_as_string(hide_password=True))


#: The drivers of our own connections, with which the tests run. The first one is the default.
_DRIVERS = {
    "postgresql": ("psycopg2", "psycopg"),
    "mysql": ("pymysql",),
    "mariadb": ("pymysql",),
    "sqlite": ("pysqlite",),
}
#: Drivers that a URL shared with the caller's application may name. They reach the same database.
_OTHER_DRIVERS = frozenset(
    "psycopg2cffi asyncpg pg8000 aiosqlite mysqldb mysqlconnector mariadbconnector cymysql "
    "aiomysql asyncmy".split()
)


def normalize_url(text: str) -> URL:
    """Return the URL with the driver that delaytasks uses.

    Another driver of the application's is replaced by the default driver.
    """
    try:
        url = make_url(text)
    except (exc.ArgumentError, ValueError):  # a wrong port
        remedy = f"; {SEVERAL_HOSTS}" if "," in text else ""
        fact = "delaytasks_database_url is not a database URL (dialect://user:password@host/name)"
        raise ConfigError(fact + remedy) from None
    backend, _, driver = url.drivername.partition("+")
    backend = {"postgres": "postgresql"}.get(backend, backend)
    driver = {"psycopg_async": "psycopg"}.get(driver, driver)  # one package has both
    capabilities_of(backend)
    drivers = _DRIVERS[backend]
    if driver and driver not in drivers and driver not in _OTHER_DRIVERS:
        raise ConfigError(
            f"delaytasks_database_url names the driver {driver!r}, and delaytasks connects with "
            f"{' or '.join(drivers)}: begin the URL with {backend}:// or "
            f"{backend}+{drivers[0]}://"
        )
    ours = driver if driver in drivers else drivers[0]
    if driver == "asyncpg" and "ssl" in url.query:  # asyncpg's name of libpq's sslmode
        url = url.update_query_dict({"sslmode": url.query["ssl"]}).difference_update_query(["ssl"])
    return url.set(drivername=backend if backend == "sqlite" else f"{backend}+{ours}")


# -- Prevents forks while a thread of this process uses SQLite ------------------------------------

# SQLite records in the process which of its connections has which lock. A child that is forked in
# the middle of a transaction inherits the record of a lock whose connection the child does not
# have, and waits for it forever.


#: A bound on the wait, since a thread that forks inside its own transaction would wait for itself.
MAX_WAIT_S = 5.0


class ForkGate:
    """Lets threads use connections while no thread forks, and lets a thread fork while no
    connection is used."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._is_forking = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._before, after_in_parent=self._after, after_in_child=self._in_child
            )

    def enter(self, *_: Any) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_forking, MAX_WAIT_S)
            self._inside += 1

    def leave(self, *_: Any) -> None:
        with self._changed:
            self._inside = max(self._inside - 1, 0)
            self._changed.notify_all()

    def _before(self) -> None:
        with self._changed:
            self._is_forking = True
            self._changed.wait_for(lambda: not self._inside, MAX_WAIT_S)

    def _after(self) -> None:
        with self._changed:
            self._is_forking = False
            self._changed.notify_all()

    def _in_child(self) -> None:
        self._changed = threading.Condition()
        self._inside, self._is_forking = 0, False


fork_gate = ForkGate()


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
        **_cursor_options(url),
    }
    return _server_engine(url, isolation_level, options)


def _cursor_options(url: URL) -> dict[str, Any]:
    if url.get_driver_name() != "psycopg":
        return {}
    from psycopg import ClientCursor

    # The default cursor sends the parameters separately and prepares statements that are repeated,
    # with names that connections behind a pooler may share.
    return {"cursor_factory": ClientCursor}


def _mysql_engine(url: URL, isolation_level: str, options: dict[str, Any]) -> Engine:
    is_autocommit = isolation_level == _AUTOCOMMIT
    options["connect_args"] = {"connect_timeout": 5, "read_timeout": 5, "charset": "utf8mb4"}
    if not is_autocommit:
        options["pool_reset_on_return"] = None
    elif _SKIP in signature(DefaultDialect.__init__).parameters:
        options[_SKIP] = True
    engine = _server_engine(url, isolation_level, options)
    event.listen(engine, "connect", _mysql_connect)
    if not is_autocommit:
        _skip_needless_rollbacks(engine)
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
    return engine


def _sqlite_engine(url: URL, isolation_level: str, options: dict[str, Any]) -> Engine:
    options["connect_args"] = {"timeout": 30, "check_same_thread": False}
    # A database in memory needs this pool too, since its own takes no sizes. Each of its
    # connections is another database, so rows exist in the caller's session only, but any
    # connection can return the time.
    engine = create_engine(url, poolclass=QueuePool, hide_parameters=True, **options)
    event.listen(engine, "connect", _sqlite_connect)
    event.listen(engine, "handle_error", _connecting_sent_nothing)
    event.listen(engine, "checkout", fork_gate.enter)
    event.listen(engine, "checkin", fork_gate.leave)
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


def _mysql_connect(connection: Any, _record: Any) -> None:
    from pymysql.constants import FIELD_TYPE

    # The driver's own converter is a regular expression, and each row of a chunk has two instants.
    connection.decoders = {**connection.decoders, FIELD_TYPE.DATETIME: datetime.fromisoformat}
    if connection._sock.family != getattr(socket, "AF_UNIX", None):
        for option, value in _TCP_OPTIONS.items():
            if hasattr(socket, option):
                connection._sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    with connection.cursor() as cursor:
        # This applies to autocommitted statements too. At REPEATABLE READ they would lock gaps in
        # the indexes, and block the producers' inserts.
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        cursor.execute(f"SET SESSION innodb_lock_wait_timeout = {ROW_LOCK_TIMEOUT_S}")
    # The time limit is for connecting only. A statement may take longer.
    connection._read_timeout = None


def _sqlite_begin_immediate(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


# -- The file of an SQLite database, readable by its owner only -----------------------------------


def sqlite_path(url: URL) -> Path | None:
    """Return the path; None for other databases and for a database in memory."""
    name = url.database
    if url.get_backend_name() != "sqlite" or not name or name == ":memory:":
        return None
    if not (name.startswith("file:") and "uri" in url.query):
        return Path(name)
    path = unquote(urlsplit(name).path)
    return Path(path) if path not in ("", ":memory:") and _mode_of(url) != "memory" else None


def _mode_of(url: URL) -> str | None:
    """Return how a URL with a `file:` URI opens the database: `ro`, `rw`, `rwc` or `memory`."""
    given = url.query.get("mode") or dict(parse_qsl(urlsplit(url.database or "").query)).get("mode")
    return given if isinstance(given, str) else None


def lacks_sqlite_file(url: URL) -> bool:
    path = sqlite_path(url)
    return path is not None and not path.exists()


def create_sqlite_file(url: URL) -> None:
    """Make an empty database file unless it exists. SQLite gives -wal, -shm and -journal its
    mode."""
    path = sqlite_path(url)
    if path is not None and not path.exists() and _mode_of(url) not in ("ro", "rw"):
        path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        make_file(path)


def check_sqlite_file(url: URL, tables_remedy: str) -> None:
    """Raise `StoreError` if the file is missing: SQLite would make an empty one in the current
    folder."""
    path = sqlite_path(url)
    if path is not None and not path.exists():
        raise StoreError(
            f"there is no database {path.absolute()}: go to your project's folder, name your "
            "Celery app (delaytasks -A APP …) or its database (DELAYTASKS_DATABASE_URL); "
            f"to make a new one here, {tables_remedy}"
        )
