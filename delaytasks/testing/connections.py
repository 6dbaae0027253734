"""The connections on which a test runs our statements, which read the test's clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import URL, Connection, Engine, event
from sqlalchemy.util import await_only, greenlet_spawn
from sqlalchemy.util.concurrency import in_greenlet

from delaytasks.db.database import Database
from delaytasks.db.engines import TRIES
from delaytasks.db.sessions import ConnectionSource, synchronous
from delaytasks.model.clock import from_us
from delaytasks.model.errors import ConfigError, SessionUnusableError

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

T = TypeVar("T")


async def on_the_loop(call: Callable[[], T]) -> T:
    """Return `call()`, which runs in a greenlet of the event loop's thread."""
    result: T = await greenlet_spawn(call)
    return result


def awaited_on_the_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await the coroutine, with the present context variables, in the event loop of this thread."""
    return await_only(asyncio.ensure_future(coroutine))


#: What marks a statement as one of ours: the names of the tables, or the label of the time.
_OUR_NAMES = ("yb_delay_", "db_now")
#: The statement clock of each database as `delaytasks.db.types` writes it, and the notation of
#: an instant in its place.
_CLOCKS = {
    "postgresql": ("clock_timestamp()", "CAST('{}+00:00' AS TIMESTAMPTZ)"),
    "mysql": ("UTC_TIMESTAMP(6)", "CAST('{}' AS DATETIME(6))"),
    "mariadb": ("UTC_TIMESTAMP(6)", "CAST('{}' AS DATETIME(6))"),
    "sqlite": ("%f000', 'now'", "%f000', '{:.23}'"),  # milliseconds
}


@contextmanager
def simulated_time(now_us: Callable[[], int]) -> Iterator[None]:
    """Let the statements of all engines of this process, the application's included, read the
    test's instant in place of the database's clock.

    The text of a statement changes with each instant, so statements must not be prepared.

    Parameters
    ----------
    now_us
        Returns the microseconds since 1970, in whole milliseconds: SQLite's clock has no more.
    """

    def rewrite(
        connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any
    ) -> tuple[str, Any]:
        clock, literal = _CLOCKS.get(connection.dialect.name, ("", ""))
        if clock and clock in statement and any(mark in statement for mark in _OUR_NAMES):
            instant = from_us(now_us()).strftime("%Y-%m-%d %H:%M:%S.%f")
            statement = statement.replace(clock, literal.format(instant))
        return statement, parameters

    event.listen(Engine, "before_cursor_execute", rewrite, retval=True)
    try:
        yield
    finally:
        event.remove(Engine, "before_cursor_execute", rewrite)


def source_of(given: Any) -> ConnectionSource:
    """Return the connections of what a test passes as `bind`.

    Raises
    ------
    ConfigError
        If it is neither an engine, nor a connection, nor a session.
    """
    from sqlalchemy.orm import Session

    bind = synchronous(given)
    if isinstance(bind, Session) and isinstance(bind.bind, Connection):
        # A rollback of the session's own savepoint must not undo what the tester has written.
        bind = bind.bind
    if not isinstance(bind, (Engine, Connection, Session)):
        raise ConfigError(
            "bind= takes a SQLAlchemy Engine, Connection or Session, or an asynchronous one of "
            f"them, not {type(given).__name__}"
        )
    connect = bind.begin if isinstance(bind, Engine) else partial(_in_savepoint, bind)
    return ConnectionSource(connect, in_framework=on_the_loop)


@contextmanager
def _in_savepoint(bind: Connection | Session) -> Iterator[Connection]:
    connection = bind if isinstance(bind, Connection) else bind.connection()
    if connection.dialect.is_async and not in_greenlet():
        raise SessionUnusableError(
            "bind= is asynchronous: await the twin of the tester's method, such as arun_due"
        )
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
        in_a_test = "call delaytasks.testing.create_tables(connection) in the test"
        super().__init__(url, pool_size, f"{in_a_test}, or {tables_remedy}")
        # The text of a prepared statement cannot change with the time.
        self.can = replace(self.can, prepare=False)


class BorrowedDatabase(SimulatedDatabase):
    """Runs every statement on the connections of a test."""

    def __init__(
        self, source: ConnectionSource, url: str, pool_size: int, tables_remedy: str
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

    def stream(self, query: Any, size: int, may_take_long: bool = False) -> Iterator[Any]:
        rows = self.rows(query)
        for start in range(0, len(rows), size):
            yield rows[start : start + size]

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
