"""Ends a commit that waits too long for a standby.

A COMMIT waits until a synchronous standby confirms it, and no timeout of the server ends that wait:
PostgreSQL's `statement_timeout` is over before the commit, and semi-sync replication may have a
timeout of years. A timeout of the driver would also end long statements that make progress.
Therefore a thread checks the connections that have been in use for a while, asks the database which
of their sessions wait for a standby, and ends those that continue to wait.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Engine, ExceptionContext, bindparam, event, exc, text

from delaytasks.core.clock import monotonic
from delaytasks.storage.capabilities import for_database

logger = logging.getLogger(__name__)

#: A commit may wait for a standby for this long.
COMMIT_LIMIT_S = 10.0
#: The interval of the checks. A connection that has been in use for less is not checked.
CHECK_S = 1.0
#: The thread ends when no connection was in use for this long.
IDLE_S = 10.0
REASON = (
    f"no standby confirmed the commit within {COMMIT_LIMIT_S:g} s; it is stored on this server only"
)


@dataclass(frozen=True)
class Sessions:
    """SQL that finds the sessions which wait for a standby, and ends one."""

    #: Returns the session and something that differs between its statements.
    waiting: str
    #: If it is a query, it has ended a session only if it returns a row.
    end: str


_POSTGRESQL_SESSIONS = Sessions(
    "SELECT pid, query_start FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND pid IN :ids",
    # The condition is checked again, since the session may execute another statement by now.
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE pid = :id AND wait_event = 'SyncRep' AND query_start = :statement",
)
_MYSQL_SESSIONS = Sessions(
    "SELECT id, 0 FROM information_schema.processlist "
    "WHERE state LIKE 'Waiting for semi-sync ACK%' AND id IN :ids",
    "KILL :id",
)


@dataclass
class _Use:
    """A connection in use."""

    driver_connection: Any
    info: dict[Any, Any]
    since: float = field(default_factory=monotonic)


class StandbyWatch:
    """Watches the engines of one database. `make_engine` makes the engine for the watch's own
    queries."""

    def __init__(self, backend: str, make_engine: Any) -> None:
        self._sessions = for_database(
            backend, postgresql=_POSTGRESQL_SESSIONS, mysql=_MYSQL_SESSIONS, sqlite=None
        )
        self._make_engine = make_engine
        self._engine: Engine | None = None
        self.after_fork()

    def after_fork(self) -> None:
        """Forget the parent's connections and thread."""
        self._lock = threading.Lock()
        self._uses: dict[int, _Use] = {}
        self._thread: threading.Thread | None = None

    def observe(self, engine: Engine) -> None:
        if self._sessions is not None:
            event.listen(engine, "checkout", self.begin)
            event.listen(engine, "checkin", lambda _, record: self.end(record))
            event.listen(engine, "handle_error", _explain)

    def begin(self, driver_connection: Any, record: Any, _proxy: Any = None) -> None:
        """Record that a connection is in use; `record` is that of its pool."""
        with self._lock:
            self._uses[id(record)] = _Use(driver_connection, record.info)
            if self._thread is None:
                thread = threading.Thread(
                    target=self._watch, name="delaytasks standbys", daemon=True
                )
                self._thread = thread
                try:
                    thread.start()
                except (
                    RuntimeError
                ) as error:  # the interpreter shuts down, or there are too many threads
                    self._thread = None
                    logger.debug("commits that wait for a standby are not watched: %s", error)

    def end(self, record: Any) -> None:
        """Record that the connection is idle."""
        with self._lock:
            self._uses.pop(id(record), None)

    # -- in the thread ----------------------------------------------------------------------------

    def _watch(self) -> None:
        me = threading.current_thread()
        try:
            self._watch_until_idle(me)
        finally:  # after an error too, so that the next connection in use starts another thread
            with self._lock:
                if self._thread is me:
                    self._thread = None

    def _watch_until_idle(self, me: threading.Thread) -> None:
        rest = threading.Event()
        used_at = monotonic()
        first_seen: dict[tuple[int, Any, float], float] = {}
        while True:
            rest.wait(CHECK_S)
            with self._lock:
                if self._thread is not me:
                    return
                uses = list(self._uses.values())
                if uses:
                    used_at = monotonic()
                elif monotonic() - used_at > IDLE_S:
                    self._thread = None
                    return
            old = [use for use in uses if monotonic() - use.since > CHECK_S]
            try:
                first_seen = self._check(old, first_seen) if old else {}
            except exc.SQLAlchemyError as error:
                logger.debug(
                    "cannot ask which sessions wait for a standby: %s", type(error).__name__
                )

    def _check(
        self, uses: list[_Use], first_seen: dict[tuple[int, Any, float], float]
    ) -> dict[tuple[int, Any, float], float]:
        """Return the commits that wait for a standby, and when each was seen first."""
        sessions = self._sessions
        by_id = {number: use for use in uses if (number := _number(use)) is not None}
        if not by_id or sessions is None:
            return {}
        if self._engine is None:
            self._engine = self._make_engine()
        waiting = text(sessions.waiting).bindparams(bindparam("ids", expanding=True))
        seen: dict[tuple[int, Any, float], float] = {}
        with self._engine.connect() as connection:
            for number, statement in connection.execute(waiting, {"ids": list(by_id)}):
                use = by_id[number]
                name = number, statement, use.since
                seen[name] = first_seen.get(name, monotonic())
                if monotonic() - seen[name] < COMMIT_LIMIT_S - CHECK_S:
                    continue
                use.info[REASON] = True
                ended = connection.execute(
                    text(sessions.end), {"id": number, "statement": statement}
                )
                if ended.returns_rows and ended.first() is None:
                    use.info.pop(REASON, None)
                    continue
                logger.warning(
                    "ended a commit that waited for a standby for %g s; "
                    "bring a synchronous standby back",
                    COMMIT_LIMIT_S,
                )
        return seen


def _number(use: _Use) -> int | None:
    """Return the session of a connection that executes a statement; None if it is idle or
    closed."""
    driver_connection = use.driver_connection
    try:
        if hasattr(driver_connection, "thread_id"):  # pymysql and mysqlclient
            return int(driver_connection.thread_id())
        info = driver_connection.info  # psycopg2 and psycopg
        return int(info.backend_pid) if info.transaction_status == _ACTIVE else None
    except Exception:  # drivers have errors of their own for a connection that is closed
        return None


#: libpq's PQTRANS_ACTIVE: a command is in progress.
_ACTIVE = 1


def _explain(context: ExceptionContext) -> None:
    connection = context.connection
    if connection is not None and not connection.closed and not connection.invalidated:
        explain(connection, context.original_exception)


def explain(connection: Connection, error: BaseException) -> None:
    """Put the reason of the connection's end into the driver's error, which only reports that it
    ended."""
    if connection.info.pop(REASON, False):
        error.args = (REASON,)
