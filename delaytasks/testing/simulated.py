"""What takes the place of production in a test: the time, the connections and the processors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kombu import Message as BrokerMessage
from sqlalchemy import URL, Connection, Engine, event
from sqlalchemy.util import greenlet_spawn
from sqlalchemy.util.concurrency import in_greenlet

from delaytasks.broker.link import Outgoing
from delaytasks.db.database import Database
from delaytasks.db.sessions import ConnectionSource, synchronous
from delaytasks.model.clock import Clock, from_us, to_us, wall_ms
from delaytasks.model.errors import ConfigError, SessionUnusableError
from delaytasks.registry import ProcessorSpec, Registry

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

T = TypeVar("T")


# -- The time of a test, which the clock and the statements read ----------------------------------


class SettableClock(Clock):
    """The time of one tester, which producers and runners read.

    It continues with the host's clock, which freezegun and time-machine replace, and asks no
    database. It is in whole milliseconds, because SQLite's clock has no more.
    """

    is_due = False

    def __init__(self) -> None:
        super().__init__()
        self._offset_us = 0

    def now_us(self) -> int:
        return wall_ms() * 1000 + self._offset_us

    def move_to(self, instant: datetime) -> None:
        """Continue at `instant`, rounded up to a millisecond so that what is due then is due."""
        self._offset_us = (-(-to_us(instant) // 1000) - wall_ms()) * 1000


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
def simulated_time(clock: Clock) -> Iterator[None]:
    """Let the statements of all engines of this process, the application's included, read `clock`
    in place of the database's clock.

    The text of a statement changes with each instant, so statements must not be prepared.
    """

    def rewrite(
        connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any
    ) -> tuple[str, Any]:
        function, literal = _CLOCKS.get(connection.dialect.name, ("", ""))
        if function and function in statement and any(name in statement for name in _OUR_NAMES):
            instant = from_us(clock.now_us()).strftime("%Y-%m-%d %H:%M:%S.%f")
            statement = statement.replace(function, literal.format(instant))
        return statement, parameters

    event.listen(Engine, "before_cursor_execute", rewrite, retval=True)
    try:
        yield
    finally:
        event.remove(Engine, "before_cursor_execute", rewrite)


# -- The connections on which a test runs the statements of delaytasks ----------------------------


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


async def on_the_loop(call: Callable[[], T]) -> T:
    """Return `call()`, which runs in a greenlet of the event loop's thread."""
    result: T = await greenlet_spawn(call)
    return result


class SimulatedDatabase(Database):
    """Connections of our own, whose statements read the test's clock."""

    def __init__(self, url: str, pool_size: int, tables_remedy: str) -> None:
        in_a_test = "call delaytasks.testing.create_tables(connection) in the test"
        super().__init__(url, pool_size, f"{in_a_test}, or {tables_remedy}")
        # The text of a prepared statement cannot change with the time.
        self.can = replace(self.can, prepare=False)


class BorrowedDatabase(SimulatedDatabase):
    """Runs every statement on the connections of a test."""

    def __init__(self, source: ConnectionSource, *arguments: Any) -> None:
        super().__init__(*arguments)
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

    def repeat(self, work: Callable[[Any], T], connect: Any, *_: Any, **__: Any) -> T:
        """Call `work` once, in this thread: after an error the test's transaction cannot go on."""
        on = connect if connect is nullcontext else self.begin
        return super().repeat(work, on, tries=1, may_switch=False)


# -- What would be sent is kept -------------------------------------------------------------------


@dataclass(frozen=True)
class SentTask:
    """A Celery task that waited as a row and was published.

    Attributes
    ----------
    name, id
        The name and the id of the Celery task.
    args, kwargs
        Its arguments.
    queue
        The routing key of its message.
    headers
        The headers of its message.
    """

    name: str
    id: str
    args: list[Any]
    kwargs: dict[str, Any]
    queue: str
    headers: Mapping[str, Any]

    @classmethod
    def of(cls, message: Outgoing) -> SentTask:
        """Return the task of a message in Celery's protocol."""
        options = message.options
        headers, kind = options["headers"], options["content_type"]
        encoding = {"content_type": kind, "content_encoding": options["content_encoding"]}
        decode: Any = BrokerMessage
        args, kwargs, _ = decode(message.body, headers=headers, accept={kind}, **encoding).payload
        name, queue = headers["task"], options["routing_key"]
        return cls(name, headers["id"], list(args), dict(kwargs), queue, headers)


class SequentialRegistry(Registry):
    """The registered processors, none of which runs its tasks in threads of its own.

    A test has one connection, and its transaction belongs to one thread.
    """

    def __init__(self, registry: Registry) -> None:
        self.__dict__ = registry.__dict__  # what a test registers is in both of them

    def get(self, tag: str) -> ProcessorSpec | None:
        found = super().get(tag)
        return found if found is None else replace(found, in_flight=None)
