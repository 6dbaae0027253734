"""The connections on which a test runs the statements of delaytasks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, event

from delaytasks.core.errors import ConfigError
from delaytasks.core.task import DelayTask
from delaytasks.storage.async_sessions import on_the_loop
from delaytasks.storage.database import Database
from delaytasks.storage.driver_errors import TRIES
from delaytasks.storage.simulated_time import SimulatedTime

T = TypeVar("T")
#: Runs a call of a coroutine.
RunCall = Callable[[Callable[[], Any]], Awaitable[Any]]


def _no_context(task: DelayTask) -> AbstractContextManager[Any]:
    return nullcontext()


def _engines_only(time: SimulatedTime) -> AbstractContextManager[Any]:
    return nullcontext()


@dataclass(frozen=True, eq=False)
class ConnectionSource:
    """Connections of a test or of a framework.

    Attributes
    ----------
    connect
        Opens a connection for a few statements, in a savepoint if the test has a transaction.
    around_processor
        Is entered around each call of a processor.
    rewriting
        Lets connections that SQLAlchemy does not know read the test's clock.
    run_coroutine
        Runs the coroutine of a processor in this thread; None means an event loop of its own.
    in_framework
        Runs the calls of coroutines; None means as the web framework requires.
    """

    connect: Callable[[], AbstractContextManager[Connection]]
    around_processor: Callable[[DelayTask], AbstractContextManager[Any]] = _no_context
    rewriting: Callable[[SimulatedTime], AbstractContextManager[Any]] = _engines_only
    run_coroutine: Callable[[Coroutine[Any, Any, Any]], Any] | None = None
    in_framework: RunCall | None = None


def source_of(given: Any) -> ConnectionSource:
    """Return the connections of what a test passes as `bind`.

    Raises
    ------
    ConfigError
        If it is neither an engine, nor a connection, nor a session.
    """
    from sqlalchemy.orm import Session

    bind = given
    if callable(getattr(bind, "registry", None)):
        bind = bind()  # scoped_session
    for attribute in ("sync_session", "sync_connection", "sync_engine"):
        bind = getattr(bind, attribute, bind)  # the asynchronous forms
    if isinstance(bind, Engine):
        return ConnectionSource(bind.begin, in_framework=on_the_loop)
    if isinstance(bind, Connection):
        return ConnectionSource(partial(_in_savepoint, lambda: bind), in_framework=on_the_loop)
    if isinstance(bind, Session):
        return ConnectionSource(
            partial(_in_savepoint, partial(_connection_of, bind)), in_framework=on_the_loop
        )
    raise ConfigError(
        "bind= takes a SQLAlchemy Engine, Connection or Session, or an asynchronous one of them, "
        f"not {type(given).__name__}"
    )


def _connection_of(session: Any) -> Connection:
    """Return the connection that the test's session was made with, else that of its transaction.

    A rollback of the session's own savepoint must not undo what the tester has written.
    """
    bind = session.bind
    return bind if isinstance(bind, Connection) else session.connection()


@contextmanager
def _in_savepoint(connection_of: Callable[[], Connection]) -> Iterator[Connection]:
    connection = connection_of()
    with connection.begin_nested():
        yield connection


@contextmanager
def calling_after_sessions(call: Callable[[], object]) -> Iterator[None]:
    """Call `call` after the end of each transaction of a SQLAlchemy session in this process.

    A session that takes part in the transaction of a test never commits for good, so that its end
    is the only sign of a commit.
    """
    from sqlalchemy.orm import Session

    def ended(_session: Any, transaction: Any) -> None:
        if transaction.parent is None:
            call()

    event.listen(Session, "after_transaction_end", ended)
    try:
        yield
    finally:
        event.remove(Session, "after_transaction_end", ended)


class SimulatedDatabase(Database):
    """Connections of our own, whose statements read the test's clock."""

    def __init__(self, url: str, pool_size: int, tables_remedy: str) -> None:
        in_a_test = "call create_tables(connection) of the DelayTasks in the test"
        super().__init__(url, pool_size, f"{in_a_test}, or {tables_remedy}")
        # The text of a prepared statement cannot change with the time.
        self.can = replace(self.can, prepare=False)


class BorrowedDatabase(SimulatedDatabase):
    """Runs every statement on the connections of a test."""

    def __init__(
        self,
        source: ConnectionSource,
        url: str,
        pool_size: int,
        tables_remedy: str,
    ) -> None:
        super().__init__(url, pool_size, tables_remedy)
        self._source = source

    def remedy_at(self, url: URL) -> str:
        return self.tables_remedy  # the test's connection need not be on the URL of the settings

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        with self._source.connect() as connection:
            # As on our own engines: psycopg 3 and asyncpg do not count rows otherwise.
            yield connection.execution_options(preserve_rowcount=True)

    def autocommitted(
        self,
        work: Callable[[Any], T],
        on: Any = None,
        unknown_id: int | None = None,
        tries: int = TRIES,
    ) -> T:
        return self.transaction(work, on, unknown_id)

    def now(self, tries: int = TRIES) -> datetime:
        raise AssertionError("a test has a clock of its own")

    def stream(self, query: Any, size: int) -> Iterator[Any]:
        rows = self.rows(query)
        for start in range(0, len(rows), size):
            yield rows[start : start + size]

    def owns(self, connection: Any) -> bool:
        return False

    def repeat(
        self,
        work: Callable[[Any], T],
        connect: Callable[[], AbstractContextManager[Any]],
        unknown_id: int | None = None,
        tries: int = TRIES,
        may_switch: bool = True,
    ) -> T:
        """Call `work` once, in this thread: after an error the test's transaction cannot go on."""
        on = connect if connect is nullcontext else self.begin
        return super().repeat(work, on, unknown_id, 1, False)
