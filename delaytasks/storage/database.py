"""Connections, safe across forks, with our errors and our retries."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, Select, event, exc, make_url

from delaytasks.core.errors import (
    ConfigError,
    DuplicateTaskError,
    StoreUnavailableError,
    TaskStateError,
)
from delaytasks.core.forks import reset_in_child
from delaytasks.storage import sqlite_file as sqlitefile
from delaytasks.storage.database_addresses import SEVERAL_HOSTS
from delaytasks.storage.driver_errors import (
    TRIES,
    first_cause,
    forget_details,
    is_demoted,
    is_unsure,
    is_worth_a_retry,
    name_of,
    translate,
    unknown_outcome,
)
from delaytasks.storage.engines import make_engine, make_plain_engine
from delaytasks.storage.standby_watch import StandbyWatch

T = TypeVar("T")
#: No further try after this time: a caller waits for an answer.
RETRY_FOR_S = 5.0


@dataclass(frozen=True)
class Capabilities:
    """What a database can do. Nobody outside the store asks for a database's name; inside it only those do who write
    or read what each database says in a way of its own: types, JSON lists, INSERT or skip, the catalogue."""

    #: One UPDATE can pick, lock, change and return rows.
    update_returning: bool
    #: A list of ids is one parameter, so that the index is used whatever the statistics say.
    array_parameters: bool
    #: An index is searched by a range of several columns, `(a, b) <= (1, 2)`.
    row_ranges: bool
    #: INSERT can pass over rows that exist; elsewhere a failed INSERT leaves the transaction usable.
    insert_or_skip: bool
    #: COPY FROM STDIN.
    copy: bool
    #: Many rows in one INSERT are best given as a parameter for each value, and not as a JSON list of rows.
    binds_values: bool
    #: Who listens hears what a transaction tells, at its commit.
    notify: bool
    #: Rows are better named by a list of ids and what they have in common than by a table of them.
    looks_up_lists: bool
    #: PREPARE, for what the driver sends by itself.
    prepare: bool
    #: The driver begins a transaction with the first statement that writes, not with the first one.
    begins_late: bool
    #: A caller's transaction may read as of its start, so what was committed since is not in what it reads.
    reads_as_of_start: bool
    #: A cursor of the server's can hand out rows bit by bit, inside a transaction.
    server_side_cursors: bool
    #: A table can be divided into ranges of ids, each of which can be dropped by itself.
    partitions: bool


POSTGRESQL = Capabilities(
    update_returning=True,
    array_parameters=True,
    row_ranges=True,
    insert_or_skip=True,
    copy=True,
    binds_values=False,
    notify=True,
    looks_up_lists=True,
    prepare=True,
    begins_late=False,
    reads_as_of_start=False,
    server_side_cursors=True,
    partitions=True,
)
MYSQL = Capabilities(
    update_returning=False,
    array_parameters=False,
    row_ranges=False,
    insert_or_skip=False,
    copy=False,
    binds_values=False,
    notify=False,
    looks_up_lists=True,
    prepare=False,
    begins_late=False,
    reads_as_of_start=True,
    server_side_cursors=True,
    partitions=False,
)
SQLITE = Capabilities(
    update_returning=True,
    array_parameters=False,
    row_ranges=False,
    insert_or_skip=True,
    copy=False,
    binds_values=True,
    notify=False,
    looks_up_lists=False,
    prepare=False,
    begins_late=True,
    reads_as_of_start=False,
    server_side_cursors=False,
    partitions=False,
)
_BY_NAME = {"postgresql": POSTGRESQL, "mysql": MYSQL, "mariadb": MYSQL, "sqlite": SQLITE}


def capabilities_of(dialect_name: str) -> Capabilities:
    try:
        return _BY_NAME[dialect_name]
    except KeyError:
        raise ConfigError(
            f"database {dialect_name!r} is not supported (known: {', '.join(_BY_NAME)})"
        ) from None


#: The driver that our own connections use, which the tests run with.
_DRIVERS = {
    "postgresql": "psycopg2",
    "mysql": "pymysql",
    "mariadb": "pymysql",
    "sqlite": "pysqlite",
}
#: Drivers of the caller's application that a shared URL may name. They reach the same database.
_OTHER_DRIVERS = {"psycopg", "psycopg_async", "psycopg2cffi", "asyncpg", "pg8000", "aiosqlite"}
_OTHER_DRIVERS |= {
    "mysqldb",
    "mysqlconnector",
    "mariadbconnector",
    "cymysql",
    "aiomysql",
    "asyncmy",
}


def normalize_url(text: str) -> URL:
    """The URL with the driver that delaytasks uses. An application that has another driver may give its own URL."""
    try:
        url = make_url(text)
    except (exc.ArgumentError, ValueError):  # a wrong port
        remedy = f"; {SEVERAL_HOSTS}" if "," in text else ""
        fact = "delaytasks_database_url is not a database URL (dialect://user:password@host/name)"
        raise ConfigError(fact + remedy) from None
    backend, _, driver = url.drivername.partition("+")
    backend = {"postgres": "postgresql"}.get(backend, backend)
    capabilities_of(backend)
    ours = _DRIVERS[backend]
    if driver not in ("", ours) and driver not in _OTHER_DRIVERS:
        raise ConfigError(
            f"delaytasks_database_url names the driver {driver!r}, and delaytasks connects with {ours}: begin the URL "
            f"with {backend}:// or {backend}+{ours}://"
        )
    if driver == "asyncpg" and "ssl" in url.query:  # asyncpg's name for what libpq calls sslmode
        url = url.update_query_dict({"sslmode": url.query["ssl"]}).difference_update_query(["ssl"])
    return url.set(drivername=backend if backend == "sqlite" else f"{backend}+{ours}")


class Database:
    """Two engines on one database: `auto` for single statements, `begin()` for transactions."""

    def __init__(self, url: str, pool_size: int = 5, shard: int | None = None) -> None:
        self.url = normalize_url(url)
        #: Which one it is of several.
        self._shard = shard
        self.can = capabilities_of(self.url.get_backend_name())
        self._pool_size = pool_size
        self._expects_file = False
        self._lock = threading.Lock()
        self._auto: Engine | None = None
        self._tx: Engine | None = None
        self._watch = StandbyWatch(
            self.url.get_backend_name(), partial(make_plain_engine, self.url)
        )
        reset_in_child(self)

    @property
    def auto(self) -> Engine:
        return self._auto or self._make("_auto", "AUTOCOMMIT")

    @property
    def tx(self) -> Engine:
        return self._tx or self._make("_tx", "READ COMMITTED")

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """A short transaction of our own, READ COMMITTED."""
        with self.tx.begin() as connection:
            yield connection

    def alone(self, work: Callable[[Connection], T]) -> T:
        """`work` with a connection on which each statement is a transaction of its own."""

        def once() -> T:
            with self.auto.connect() as connection:
                return work(connection)

        return self.run(once)

    def stream(self, query: Select[Any], size: int) -> Iterator[Sequence[Any]]:
        """Rows as the database finds them, `size` at a time, however many there are."""
        engine = self.tx if self.can.server_side_cursors else self.auto

        def begin() -> tuple[ExitStack, Iterator[Sequence[Any]]]:
            with ExitStack() as opened:
                connection = opened.enter_context(
                    engine.connect().execution_options(yield_per=size)
                )
                partitions = connection.execute(query).partitions()
                return opened.pop_all(), partitions

        opened, partitions = self.run(begin)
        with opened:
            try:
                yield from partitions
            except exc.DBAPIError as error:
                raise translate(error, shard=self._shard) from error

    def owns(self, connection: Any) -> bool:
        """Whether it is one of ours, and not a caller's."""
        return isinstance(connection, Connection) and connection.engine in (self._auto, self._tx)

    def after_fork(self) -> None:
        """A forked child must not use its parent's sockets, nor close them."""
        self._lock = threading.Lock()
        self._watch.after_fork()
        self.dispose(close=False)

    def dispose(self, close: bool = True) -> None:
        for engine in (self._auto, self._tx):
            if engine is not None:
                engine.dispose(close=close)

    def run(self, work: Callable[[], T], unknown_id: int | None = None, tries: int = TRIES) -> T:
        """`work`, tried again while that is safe: conflicts always, lost connections because all our
        statements either are fenced by a version or name their own ids. Driver errors become ours.

        `unknown_id` names the task that `work` changes, in case nobody can say whether it did."""
        began, is_sent = time.monotonic(), False
        for attempt in range(1, tries + 1):
            try:
                return work()
            except TaskStateError as refusal:
                if not is_sent or unknown_id is None or isinstance(refusal, DuplicateTaskError):
                    raise
                # This try may have met what an earlier one did, whose answer was lost.
                raise unknown_outcome(str(refusal), unknown_id) from refusal
            except exc.DBAPIError as raised:
                error = first_cause(raised)
                # An earlier try may have been done, whatever the last one says.
                is_sent = is_sent or is_unsure(error)
                if is_demoted(error.orig):
                    self.dispose()  # the other connections of the pools lead to the same server
                is_over = attempt == tries or time.monotonic() - began > RETRY_FOR_S
                if is_over or not is_worth_a_retry(error):
                    forget_details(error)
                    raise translate(error, unknown_id if is_sent else None, self._shard) from error
                time.sleep(random.uniform(0.01, 0.05) * 2**attempt)
            except exc.TimeoutError as error:
                pool = f"setting pool_size = {self._pool_size}"
                reason = f"{name_of(self._shard)} has no free connection ({pool}): {error}"
                if is_sent and unknown_id is not None:
                    raise unknown_outcome(reason, unknown_id) from error
                raise StoreUnavailableError(reason) from error
        raise AssertionError("unreachable")

    def expect_file(self) -> None:
        """From now on an SQLite database whose file is missing is an error; else connecting makes an empty one."""
        self._expects_file = True

    def _before_connecting(self, *_: Any) -> None:
        if self._expects_file:
            sqlitefile.check(self.url)
        sqlitefile.create(self.url)

    def _make(self, attribute: str, isolation_level: str) -> Engine:
        with self._lock:
            engine: Engine | None = getattr(self, attribute)
            if engine is None:
                engine = make_engine(self.url, self._pool_size, isolation_level)
                self._watch.observe(engine)
                event.listen(engine, "do_connect", self._before_connecting)
                setattr(self, attribute, engine)
            return engine
