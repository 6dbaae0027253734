"""What differs between drivers: URLs, addresses, engines, files and errors."""

from __future__ import annotations

import os
import threading
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

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

from delaytasks.db.types import capabilities_of, for_database
from delaytasks.model.errors import (
    ConfigError,
    DelayTaskError,
    OutcomeUnknownError,
    StoreError,
    StoreUnavailableError,
)
from delaytasks.model.text import TABLES_REMEDY, mask_url
from delaytasks.settings import make_file, make_folder

# -- The URLs of databases ------------------------------------------------------------------------


_DEFAULT_PORTS = {"postgresql": 5432, "mysql": 3306}
#: The options of a URL that name a server. Drivers take them instead of the parts before the query.
_PLACES = ("host", "port", "unix_socket", "service")


def is_same_database(one: URL, other: URL) -> bool:
    """Return whether two URLs name a database in the same way. Users, drivers and other options
    may differ."""
    return _address(one) == _address(other)


def _address(url: URL) -> tuple[object, ...]:
    backend = url.get_backend_name().replace("mariadb", "mysql")
    port = url.port or _DEFAULT_PORTS.get(backend)
    return (backend, url.host, port, url.database, *map(url.query.get, _PLACES))


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


def normalize_url(text: str) -> URL:
    """Return the URL with the driver that delaytasks uses.

    Another driver, which a URL shared with the caller's application may name, is replaced by the
    default driver. It reaches the same database.
    """
    try:
        url = make_url(text)
    except (exc.ArgumentError, ValueError):  # a wrong port
        raise ConfigError(
            "delaytasks_database_url is not a database URL (dialect://user:password@host/name; "
            "several hosts of one PostgreSQL cluster are written as "
            "postgresql://user@/name?host=h1:5432&host=h2:5432)"
        ) from None
    backend, _, driver = url.drivername.partition("+")
    backend = {"postgres": "postgresql"}.get(backend, backend)
    driver = {"psycopg_async": "psycopg"}.get(driver, driver)  # one package has both
    capabilities_of(backend)
    drivers = _DRIVERS[backend]
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


# -- The engines ----------------------------------------------------------------------------------


#: An idle connection that listens for notices ends 25 seconds after its server has vanished, not
#: after TCP's two hours.
_KEEPALIVES = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}
#: How long a statement waits for a row that another transaction has locked. `Database.repeat` tries
#: again.
ROW_LOCK_TIMEOUT_S = 1
_PACKAGES = {
    "psycopg2": "psycopg2-binary",
    "psycopg": "'delaytasks[psycopg]'",
    "pymysql": "'delaytasks[mysql]'",
}


def make_engine(url: URL, pool_size: int, isolation_level: str) -> Engine:
    """Return an engine with transactions of this isolation level, or "AUTOCOMMIT"."""
    make = for_database(
        url.get_backend_name(),
        postgresql=_postgresql_engine,
        mysql=_mysql_engine,
        sqlite=_sqlite_engine,
    )
    options: dict[str, Any] = {"pool_size": pool_size, "max_overflow": 20, "pool_timeout": 10}
    # Parameters contain bodies and keys, which an error and its cause must not show.
    options["hide_parameters"] = True
    try:
        engine = make(url, isolation_level, options)
    except exc.ArgumentError as error:  # the numbers of hosts and ports differ
        raise ConfigError(f"delaytasks_database_url cannot be read: {error}") from error
    except ModuleNotFoundError as error:
        package = _PACKAGES[url.get_driver_name()]
        raise ConfigError(
            f"no driver {error.name!r} for {url.drivername}: pip install {package}"
        ) from error
    event.listen(engine, "handle_error", _connecting_sent_nothing)
    return engine


def _postgresql_engine(url: URL, isolation_level: str, options: dict[str, Any]) -> Engine:
    options["connect_args"] = {
        "connect_timeout": 5,
        "application_name": "delaytasks",
        "options": _postgresql_options(url),
        **_KEEPALIVES,
    }
    if url.get_driver_name() == "psycopg":
        from psycopg import ClientCursor

        # The default cursor sends the parameters separately and prepares statements that are
        # repeated, with names that connections behind a pooler may share.
        options["connect_args"]["cursor_factory"] = ClientCursor
    return _server_engine(url, isolation_level, options)


def _mysql_engine(url: URL, isolation_level: str, options: dict[str, Any]) -> Engine:
    options["connect_args"] = {"connect_timeout": 5, "read_timeout": 5, "charset": "utf8mb4"}
    # SQLAlchemy rolls back when a connection returns to its pool, even after a commit or an
    # autocommitted statement. The drivers of PostgreSQL send nothing then, but PyMySQL sends
    # ROLLBACK, so that each call would wait for one more answer. Our transactions are blocks, which
    # end them.
    options |= {"pool_reset_on_return": None, "skip_autocommit_rollback": True}
    engine = _server_engine(url, isolation_level, options)
    event.listen(engine, "connect", _mysql_connect)
    return engine


def _server_engine(url: URL, isolation_level: str, options: dict[str, Any]) -> Engine:
    if isolation_level == "AUTOCOMMIT":
        # No transaction is ever open on such a connection: a ROLLBACK on return would waste a round
        # trip.
        options["pool_reset_on_return"] = None
    # SQLAlchemy would not read psycopg's count of the rows that an INSERT writes.
    options["execution_options"] = {"preserve_rowcount": True}
    return create_engine(url, isolation_level=isolation_level, **options)


def _sqlite_engine(url: URL, isolation_level: str, options: dict[str, Any]) -> Engine:
    options["connect_args"] = {"timeout": 30, "check_same_thread": False}
    # A database in memory needs this pool too, since its own takes no sizes. Each of its
    # connections is another database, so rows exist in the caller's session only, but any
    # connection can return the time.
    engine = create_engine(url, poolclass=QueuePool, **options)
    event.listen(engine, "connect", _sqlite_connect)
    event.listen(engine, "checkout", fork_gate.enter)
    event.listen(engine, "checkin", fork_gate.leave)
    if isolation_level != "AUTOCOMMIT":
        event.listen(engine, "begin", lambda on: on.exec_driver_sql("BEGIN IMMEDIATE"))
    return engine


def _connecting_sent_nothing(context: ExceptionContext) -> None:
    """If connecting fails, no statement was sent, so no outcome is unknown."""
    if context.connection is None:
        context.is_disconnect = False
        context.original_exception.__dict__[_CONNECTING] = True


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


def _mysql_connect(connection: Any, _record: Any) -> None:
    from pymysql.constants import FIELD_TYPE

    # The driver's own converter is a regular expression, and each row of a chunk has two instants.
    connection.decoders = {**connection.decoders, FIELD_TYPE.DATETIME: datetime.fromisoformat}
    with connection.cursor() as cursor:
        # This applies to autocommitted statements too. At REPEATABLE READ they would lock gaps in
        # the indexes, and block the producers' inserts.
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        cursor.execute(f"SET SESSION innodb_lock_wait_timeout = {ROW_LOCK_TIMEOUT_S}")
        # A load balancer may send the settlement of a row to another node of Galera than its claim,
        # and each node applies what others have committed a little later. So reads (1), UPDATE and
        # DELETE (2) wait until the node has applied what was committed before. INSERT (4) does not:
        # a new task needs no other row, and a transaction that takes a key reads it first.
        cursor.execute("SHOW SESSION VARIABLES LIKE 'wsrep_on'")
        if ("wsrep_on", "ON") in cursor.fetchall():
            cursor.execute("SET SESSION wsrep_sync_wait = 3")
    # The time limit is for connecting only. A statement may take longer.
    connection._read_timeout = None


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


# -- The file of an SQLite database, readable by its owner only -----------------------------------


def sqlite_path(url: URL) -> Path | None:
    """Return the path; None for other databases, for a database in memory, and for a `file:` URI,
    whose file SQLite opens as its options say."""
    name = url.database
    if url.get_backend_name() != "sqlite" or not name or name.startswith((":memory:", "file:")):
        return None
    return Path(name)


def lacks_sqlite_file(url: URL) -> bool:
    path = sqlite_path(url)
    return path is not None and not path.exists()


def create_sqlite_file(url: URL) -> None:
    """Make an empty database file unless it exists. SQLite gives -wal, -shm and -journal its
    mode."""
    path = sqlite_path(url)
    if path is not None and not path.exists():
        make_folder(path.parent)
        make_file(path)


# -- Classifies errors: try again, unavailable, outcome unknown, refused --------------------------

TRIES = 5
#: The attribute of a driver's error that was raised while connecting.
_CONNECTING = "delaytasks_was_connecting"


class Failure(NamedTuple):
    """A reason for which databases refuse statements, and the errors with which they report it."""

    #: The SQLSTATEs of PostgreSQL, or their first characters.
    sqlstates: tuple[str, ...] = ()
    #: The numbers of MySQL and MariaDB.
    numbers: frozenset[int] = frozenset()
    #: Parts of SQLite's texts.
    texts: tuple[str, ...] = ()

    def caused(self, driver_error: object) -> bool:
        """Return whether the driver raised this error for this reason."""
        first = _first_of(driver_error)
        if _is_sqlite(driver_error):
            return any(words in str(first) for words in self.texts)
        return (sqlstate_of(driver_error) or "").startswith(self.sqlstates) or first in self.numbers


#: A prepared statement is missing, exists already or is out of date. It is not used again.
PREPARED_IS_GONE = Failure(("26000", "42P05", "0A000"))
#: A row stayed locked for `ROW_LOCK_TIMEOUT_S`.
LOCKED = Failure(("55P03",), frozenset({1205}), ("database is locked",))
#: The same transaction may simply be tried again: serialization failure, deadlock (or a failed
#: certification of Galera), a locked row, record has changed, rolled back by group replication.
CONFLICT = Failure(
    ("40001", "40P01", *LOCKED.sqlstates, *PREPARED_IS_GONE.sqlstates),
    LOCKED.numbers | {1213, 1020, 3101},
    LOCKED.texts,
)
#: A server that accepts no writes: it was the primary, or lost its cluster (Galera's "not ready",
#: read-only servers, sessions and InnoDB, group replication without a majority). A new connection
#: may reach the primary.
DEMOTED = Failure(("25006",), frozenset({1047, 1290, 1792, 1836, 1874, 3100}))
#: COMMIT failed. On Galera the other nodes may have the transaction, if this node lost its cluster
#: meanwhile.
UNSURE = Failure(numbers=frozenset({1180}))
#: A server that answers but cannot serve any client now: out of memory, disk or connections,
#: shutting down, failed over. The same statement may succeed later.
UNABLE = Failure(
    ("53", "57", "58", *DEMOTED.sqlstates),
    frozenset({1021, 1040, 1053, 1114, 1203, 1226, 1317}) | DEMOTED.numbers | UNSURE.numbers,
    ("disk is full", "disk I/O error", "readonly database"),
)
#: Tables, columns or schemas are missing. Such a server has no tables, or those of another version.
MISSING = Failure(
    ("42P01", "42703", "3F000"),
    frozenset({1146, 1054}),
    ("no such table", "no such column", "has no column named"),
)
#: A statement reached its time limit.
TIMED_OUT = Failure(("57014",), frozenset({1969, 3024}), ("interrupted",))
#: The row exists.
DUPLICATE = Failure(("23505",), frozenset({1062}), ("UNIQUE",))
#: Errors about values that MySQL's driver does not classify as such. Their texts quote the values.
_ABOUT_VALUES = Failure(numbers=frozenset({1062, 1264, 1292, 1366, 1406, 3140, 4025}))


def as_sqlalchemy_error(on: Connection, statement: str, error: Exception) -> BaseException:
    """Wrap an error of a statement that was sent past SQLAlchemy. A broken connection is
    invalidated."""
    dialect: Any = on.dialect
    is_broken = dialect.is_disconnect(error, on.connection.driver_connection, None)
    instance = exc.DBAPIError.instance(
        statement,
        None,
        error,
        dialect.dbapi.Error,
        connection_invalidated=is_broken,
        dialect=dialect,
    )
    if is_broken:
        on.invalidate(instance)
    return instance


def first_cause(error: exc.DBAPIError) -> exc.DBAPIError:
    """Return the error that ended the transaction.

    A full disk and a deadlock end the whole transaction, and then a missing savepoint is only the
    consequence.
    """
    before: BaseException | None = error
    while before is not None and "savepoint" in str(getattr(before, "orig", before)).lower():
        before = before.__context__
    return before if isinstance(before, exc.DBAPIError) else error


def _is_connecting(error: exc.DBAPIError) -> bool:
    """Return whether no connection came about, so that no statement was refused."""
    return getattr(error.orig, _CONNECTING, False) and not CONFLICT.caused(error.orig)


def is_disconnect(error: exc.DBAPIError) -> bool:
    return error.connection_invalidated or _is_connecting(error)


def is_unsure(error: exc.DBAPIError) -> bool:
    """Whether the statement may have been executed despite the error."""
    return error.connection_invalidated or UNSURE.caused(error.orig)


def is_worth_a_retry(error: exc.DBAPIError) -> bool:
    failures = (CONFLICT, DEMOTED, UNSURE)
    return is_disconnect(error) or any(each.caused(error.orig) for each in failures)


def _is_about_values(error: exc.DBAPIError) -> bool:
    is_of_this_type = isinstance(error, (exc.IntegrityError, exc.DataError))
    return is_of_this_type or _ABOUT_VALUES.caused(error.orig)


def _is_sqlite(driver_error: object) -> bool:
    return "sqlite3" in type(driver_error).__module__


def _first_of(driver_error: object) -> object:
    arguments = getattr(driver_error, "args", ())
    return arguments[0] if arguments else None


def sqlstate_of(driver_error: object) -> str | None:
    """Return the SQLSTATE, which psycopg2 and psycopg 3 or asyncpg (a caller's) name
    differently."""
    return getattr(driver_error, "pgcode", None) or getattr(driver_error, "sqlstate", None)


def reason_of(error: exc.DBAPIError) -> str:
    """Return the first line of the driver's text, since the rest may show the row.

    An error about values may quote them, so its text is replaced by its type and number.
    """
    if _is_about_values(error):
        code = sqlstate_of(error.orig) or getattr(error.orig, "sqlite_errorname", None)
        first = _first_of(error.orig)
        number = code or (first if isinstance(first, int) else "")
        return f"a value cannot be stored, {type(error.orig).__name__} {number}".rstrip()
    return (str(error.orig).strip().splitlines() or [type(error.orig).__name__])[0]


def forget_details(error: exc.DBAPIError) -> None:
    """Remove values from the driver's error, which stays the cause of ours and is logged with
    it."""
    if _is_about_values(error):
        reason, number = reason_of(error), _first_of(error.orig)
        if error.orig is not None:
            error.orig.args = (number, reason) if isinstance(number, int) else (reason,)
        error.args = (reason,)
        return
    for each in (error, error.orig):
        if each is not None and each.args and isinstance(each.args[0], str):
            each.args = (each.args[0].strip().partition("\n")[0], *each.args[1:])


def unknown_outcome(reason: str, id: int) -> OutcomeUnknownError:
    return OutcomeUnknownError(
        f"the connection broke before the answer ({reason}), so it may be done or not: "
        f"look at task {id}; scheduling again with id={id} is safe",
        id,
    )


def translate(
    error: exc.DBAPIError,
    unknown_id: int | None = None,
    tables_remedy: str = TABLES_REMEDY,
    shown_url: str = "",
) -> DelayTaskError:
    """Return the typed error for a driver's error. Its text contains no values, which may be
    secrets."""
    reason = reason_of(error)
    if unknown_id is not None:
        return unknown_outcome(reason, unknown_id)
    if is_disconnect(error):
        return StoreUnavailableError(f"the database cannot be reached: {reason}")
    if CONFLICT.caused(error.orig):
        return StoreUnavailableError(f"the database stayed busy: {reason}", is_locked=True)
    if UNABLE.caused(error.orig):
        return StoreUnavailableError(f"the database cannot work now: {reason}", is_unable=True)
    if MISSING.caused(error.orig):
        where = f"the database {shown_url}".rstrip()
        return StoreError(f"the tables of {where} are missing or old ({reason}); {tables_remedy}")
    return StoreError(f"the database refused: {reason}")
