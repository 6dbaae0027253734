"""Connections, safe across forks, with our errors and our retries."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, Select, exc, make_url

from delaytasks.core.errors import (
    ConfigError,
    DelayTaskError,
    OutcomeUnknownError,
    StoreError,
    StoreUnavailableError,
)
from delaytasks.core.forks import reset_in_child
from delaytasks.store.engines import make_engine

T = TypeVar("T")
TRIES = 5
#: No further try after this time: a caller waits for an answer.
RETRY_FOR_S = 5.0

#: What databases answer when a transaction should simply be tried again.
_RETRY_PG = {"40001", "40P01", "55P03"}  # serialization failure, deadlock, lock not available
_RETRY_MYSQL = {1205, 1213}  # lock wait timeout, deadlock


@dataclass(frozen=True)
class Capabilities:
    """What a database can do; the store asks these, never for a database's name."""

    #: One UPDATE can pick, lock, change and return rows.
    update_returning: bool
    #: A list of ids is one parameter, so that the index is used whatever the statistics say.
    array_parameters: bool
    #: INSERT can pass over rows that exist; elsewhere a failed INSERT leaves the transaction usable.
    insert_or_skip: bool
    #: COPY FROM STDIN.
    copy: bool
    #: The driver begins a transaction with the first statement that writes, not with the first one.
    begins_late: bool
    #: A cursor of the server's can hand out rows bit by bit, inside a transaction.
    server_side_cursors: bool


POSTGRESQL = Capabilities(
    update_returning=True,
    array_parameters=True,
    insert_or_skip=True,
    copy=True,
    begins_late=False,
    server_side_cursors=True,
)
MYSQL = Capabilities(
    update_returning=False,
    array_parameters=False,
    insert_or_skip=False,
    copy=False,
    begins_late=False,
    server_side_cursors=True,
)
SQLITE = Capabilities(
    update_returning=True,
    array_parameters=False,
    insert_or_skip=True,
    copy=False,
    begins_late=True,
    server_side_cursors=False,
)
_BY_NAME = {"postgresql": POSTGRESQL, "mysql": MYSQL, "mariadb": MYSQL, "sqlite": SQLITE}


def capabilities_of(dialect_name: str) -> Capabilities:
    try:
        return _BY_NAME[dialect_name]
    except KeyError:
        raise ConfigError(f"database {dialect_name!r} is not supported (known: {', '.join(_BY_NAME)})") from None


def normalize_url(text: str) -> URL:
    """The URL with the driver that this project is tested with, where it names none."""
    try:
        url = make_url(text)
    except (exc.ArgumentError, ValueError):  # a wrong port
        raise ConfigError("delaytasks_database_url is not a database URL (dialect://user:password@host/name)") from None
    drivers = {"postgres": "postgresql+psycopg2", "postgresql": "postgresql+psycopg2"}
    drivers |= {"mysql": "mysql+pymysql", "mariadb": "mariadb+pymysql"}
    url = url.set(drivername=drivers.get(url.drivername, url.drivername))
    capabilities_of(url.get_backend_name())
    return url


class Database:
    """Two engines on one database: `auto` for single statements, `begin()` for transactions."""

    def __init__(self, url: str, pool_size: int = 5) -> None:
        self.url = normalize_url(url)
        self.can = capabilities_of(self.url.get_backend_name())
        self._pool_size = pool_size
        self._lock = threading.Lock()
        self._auto: Engine | None = None
        self._tx: Engine | None = None
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
        try:
            with engine.connect().execution_options(yield_per=size) as connection:
                yield from connection.execute(query).partitions()
        except exc.DBAPIError as error:
            raise translate(error) from error

    def after_fork(self) -> None:
        """A forked child must not use its parent's sockets, nor close them."""
        self._lock = threading.Lock()
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
            except exc.DBAPIError as error:
                # An earlier try may have been done, whatever the last one says.
                is_sent = is_sent or error.connection_invalidated
                is_over = attempt == tries or time.monotonic() - began > RETRY_FOR_S
                if is_over or not (is_conflict(error) or is_disconnect(error)):
                    _forget_details(error)
                    raise translate(error, unknown_id if is_sent else None) from error
                time.sleep(random.uniform(0.01, 0.05) * 2**attempt)
            except exc.TimeoutError as error:
                raise StoreUnavailableError(
                    f"no free database connection (setting pool_size = {self._pool_size}): {error}"
                ) from error
        raise AssertionError("unreachable")

    def _make(self, attribute: str, isolation_level: str) -> Engine:
        with self._lock:
            engine: Engine | None = getattr(self, attribute)
            if engine is None:
                engine = make_engine(self.url, self._pool_size, isolation_level)
                setattr(self, attribute, engine)
            return engine


def is_disconnect(error: exc.DBAPIError) -> bool:
    return error.connection_invalidated or (
        isinstance(error, (exc.OperationalError, exc.InterfaceError))
        and _sqlstate(error) in (None, "57P03", "53300")
        and not is_conflict(error)
        and "sqlite3" not in type(error.orig).__module__
        and not _mysql_says(error)
    )


def _mysql_says(error: exc.DBAPIError) -> bool:
    """A MySQL server answered, so the connection works; client-side trouble has numbers from 2000 on."""
    code = error.orig.args[0] if error.orig is not None and error.orig.args else None
    return isinstance(code, int) and not 2000 <= code < 3000


def is_conflict(error: exc.DBAPIError) -> bool:
    if _sqlstate(error) in _RETRY_PG:
        return True
    code = error.orig.args[0] if error.orig is not None and error.orig.args else None
    return code in _RETRY_MYSQL or (isinstance(code, str) and "database is locked" in code)


def _sqlstate(error: exc.DBAPIError) -> str | None:
    return getattr(error.orig, "pgcode", None)


def _forget_details(error: exc.DBAPIError) -> None:
    """Only the first line of a driver's message stays: what follows may show the row, and that may be secret."""
    for said in (error, error.orig):
        if said is not None and said.args and isinstance(said.args[0], str):
            said.args = (said.args[0].strip().partition("\n")[0], *said.args[1:])


def translate(error: exc.DBAPIError, unknown_id: int | None = None) -> DelayTaskError:
    """The typed error for a driver's error. Its own text says no values: those may be secrets."""
    reason = (str(error.orig).strip().splitlines() or [type(error.orig).__name__])[0]
    if unknown_id is not None:
        return OutcomeUnknownError(
            f"the connection broke before the answer ({reason}), so it may be done or not: look at task {unknown_id}; "
            f"scheduling again with id={unknown_id} is safe",
            unknown_id,
        )
    if is_disconnect(error):
        return StoreUnavailableError(f"the database can not be reached: {reason}")
    if is_conflict(error):
        return StoreUnavailableError(f"the database stayed busy for {TRIES} tries: {reason}")
    if "no such table" in reason or "does not exist" in reason or "doesn't exist" in reason:
        return StoreError(f"the tables are missing or old ({reason}); run: delaytasks db upgrade")
    return StoreError(f"the database refused: {reason}")
