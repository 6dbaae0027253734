"""A database with its connections: transactions, statements that are repeated, the kept connection,
and connections whose server is gone or gives no answer."""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import select as sockets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, Select, event, exc, select
from sqlalchemy.util import await_only
from sqlalchemy.util.concurrency import in_greenlet

from delaytasks.db.engines import (
    DEMOTED,
    LOCKED,
    TRIES,
    first_cause,
    forget_details,
    is_same_database,
    is_unsure,
    is_worth_a_retry,
    lacks_sqlite_file,
    make_engine,
    masked,
    normalize_url,
    translate,
    unknown_outcome,
)
from delaytasks.db.types import capabilities_of, db_now
from delaytasks.loops import ThreadPool, answer_limit
from delaytasks.model.clock import fork_safe
from delaytasks.model.errors import (
    DuplicateTaskError,
    SessionUnusableError,
    StoreError,
    StoreUnavailableError,
    TaskStateError,
)
from delaytasks.model.text import TABLES_REMEDY

# -- Runs the synchronous code on the caller's `AsyncSession` or `AsyncConnection` ----------------

# SQLAlchemy runs the code in a greenlet of the event loop's thread. A statement on the caller's
# connection switches to the event loop until the answer arrives. All other calls that wait for a
# network leave this thread through `off_the_loop`.


T = TypeVar("T")
#: The threads of `off_the_loop`. They send messages of committed tasks.
_threads = ThreadPool(4, "delaytasks-loop")


async def run_in_session(session: Any, call: Callable[[Any], T]) -> T:
    """Return `call(session)`, where `call` gets the synchronous form of the caller's session.

    Raises
    ------
    SessionUnusableError
        If the session is not asynchronous, or its connection was not opened.
    """
    given = type(session).__name__
    if callable(getattr(session, "registry", None)):
        session = session()  # async_scoped_session
    if not inspect.iscoroutinefunction(getattr(session, "run_sync", None)):
        raise SessionUnusableError(
            f"the asynchronous methods take an AsyncSession or AsyncConnection as session=, not "
            f"{given}: with a Session or Connection, call the synchronous method"
        )
    try:
        result: T = await session.run_sync(call)
    except exc.InvalidRequestError as error:  # such as a connection that was not opened
        raise SessionUnusableError(f"the caller's session cannot be used: {error}") from error
    return result


def is_on_the_loop() -> bool:
    """Whether SQLAlchemy runs this code in a greenlet of an event loop's thread."""
    return "greenlet" in sys.modules and in_greenlet()


def off_the_loop(call: Callable[[], T]) -> T:
    """Return `call()`, which runs in another thread if this is the thread of an event loop.

    If the waiting task is cancelled meanwhile, the call goes on.
    """
    return await_only(_in_thread(call)) if is_on_the_loop() else call()


async def _in_thread(call: Callable[[], T]) -> T:
    return await asyncio.shield(asyncio.wrap_future(_threads.submit(call)))


# -- Finds connections that the server has ended --------------------------------------------------


#: Marks a connection that was in use before.
_RETURNED = "delaytasks.returned"


def socket_of(connection: Any) -> int:
    """Return the number of the socket of a driver's connection."""
    number: int = (connection if hasattr(connection, "fileno") else connection._sock).fileno()
    return number


def is_readable(number: int, timeout_s: float) -> bool:
    if not hasattr(sockets, "poll"):  # Windows, and eventlet removes it
        return bool(sockets.select([number], [], [], timeout_s)[0])
    poll = sockets.poll()
    poll.register(number, sockets.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def has_input(connection: Any) -> bool:
    """Whether the server has ended the idle connection, or has sent something on it."""
    try:
        return is_readable(socket_of(connection), 0)
    except Exception:  # each driver has its own error for a closed connection
        return True


def _mark_returned(_connection: Any, record: Any) -> None:
    record.info[_RETURNED] = True


def _check_alive(connection: Any, record: Any, _proxy: Any) -> None:
    """Replace a pooled connection that the server has ended, before a statement is sent on it.

    The server sends nothing on an idle connection except its end. The check takes a microsecond,
    not a round trip, and prevents errors whose outcome would be unknown.
    """
    if _RETURNED in record.info and has_input(connection):
        raise exc.DisconnectionError


# -- Ends statements whose server gives no answer -------------------------------------------------

# A server that is frozen, or whose storage hangs, still acknowledges what it receives. So no
# timeout of TCP ends the wait, and only one of the drivers has a timeout of its own. A thread of
# each process that uses a database looks at the steps in progress once a second, and shuts the
# socket of one that takes too long: the driver raises the error of a lost connection.


#: Far more than a slow server needs: a statement of ours takes a fraction of a second.
ANSWER_LIMIT_S = 30.0


#: The time between two checks.
CHECK_S = 1.0
#: After this number of checks that find no step, the thread ends.
IDLE_CHECKS = 60


class BoundedStep:
    """Steps on a connection, one after another. The wait for each answer is bounded, but for the
    prepared statements of a step, which are bounded together.

    If the server does not answer, `on_silence` closes other connections to it.
    """

    __slots__ = ("_on_silence", "checks", "connection", "is_cut", "limit_s")

    def __init__(self, connection: Connection, on_silence: Callable[[], None]) -> None:
        self.connection = connection.connection.driver_connection
        self.limit_s = answer_limit.seconds or ANSWER_LIMIT_S
        self._on_silence = on_silence

    def __enter__(self) -> None:
        #: How many checks have seen it: while the whole process is frozen, no time passes.
        self.checks = 0
        self.is_cut = False
        _in_progress.add(self)

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        _in_progress.remove(self)
        if not self.is_cut:
            return
        self._on_silence()
        if isinstance(error, exc.DBAPIError) and error.orig is not None:
            number = [one for one in error.orig.args[:1] if isinstance(one, int)]
            error.orig.args = (*number, f"the server has not answered for {self.limit_s:g} s")

    def cut(self) -> None:
        """Shut the socket, whatever library reads it, and leave it to its owner to close it."""
        self.is_cut = True
        try:
            opened = socket.socket(fileno=socket_of(self.connection))
            try:
                opened.shutdown(socket.SHUT_RDWR)
            finally:
                opened.detach()
        except Exception:  # each driver has its own error for a connection that is closed already
            pass


class StepsInProgress:
    def __init__(self) -> None:
        fork_safe(self)

    def after_fork(self) -> None:
        #: The garbage collector may end a step in a thread that holds it.
        self._lock = threading.RLock()
        #: By the driver's connection: if an exception of a signal handler has kept a step from
        #: leaving, the next one on its connection takes its place.
        self._steps: dict[Any, BoundedStep] = {}
        self._watcher: threading.Thread | None = None

    def add(self, step: BoundedStep) -> None:
        with self._lock:
            self._steps[step.connection] = step
            if self._watcher is None:
                watcher = threading.Thread(
                    target=self._watch, name="delaytasks-answers", daemon=True
                )
                with suppress(RuntimeError):  # no thread can be started: the next step tries again
                    watcher.start()
                    self._watcher = watcher

    def remove(self, step: BoundedStep) -> None:
        with self._lock:
            if self._steps.get(step.connection) is step:
                del self._steps[step.connection]

    def answered(self, connection: Connection, *_: Any) -> None:
        """Note the answer to a statement. A transaction may have thousands of them."""
        step = self._steps.get(connection.connection.driver_connection)
        if step is not None:
            step.checks = 0

    def _watch(self) -> None:
        idle, rest = 0, threading.Event()
        while True:
            rest.wait(CHECK_S)  # not by `time.sleep`, which the simulation replaces
            with self._lock:  # until it is released, no step ends and closes its socket
                if self._watcher is not threading.current_thread():
                    return
                for step in list(self._steps.values()):
                    step.checks += 1
                    if step.checks * CHECK_S > step.limit_s:
                        self.remove(step)
                        step.cut()
                idle = 0 if self._steps else idle + 1
                if idle > IDLE_CHECKS:
                    self._watcher = None


_in_progress = StepsInProgress()


# -- Keeps one connection outside its pool, for statements that are sent past SQLAlchemy ----------

# For a prepared statement, checking a connection out of SQLAlchemy's pool and in again takes
# longer than everything else that the process does.


#: Bounds the wait for the answers on a connection.
Bounded = Callable[[Connection], AbstractContextManager[object]]
#: The connections that the parent of this process kept. They are never released, since releasing
#: one returns it to the parent's pool, whose lock another thread may have held during the fork.
_of_parent: list[Connection] = []


class KeptConnection:
    """Lends connections of an engine that commits each statement by itself.

    A connection is kept for the next use if SQLAlchemy has begun nothing on it, as after a prepared
    statement. While it is in use, another thread gets a connection of the pool.
    """

    def __init__(self, bounded: Bounded) -> None:
        self._bounded = bounded
        #: The kept connection, if it is not in use. `clear` replaces the list, so that a connection
        #: that was in use meanwhile is not kept.
        self._free: list[Connection] = []

    @contextmanager
    def use(self, engine: Engine) -> Iterator[Connection]:
        free = self._free
        connection = self._take(free) or engine.connect()
        try:
            with self._bounded(connection):
                yield connection
        except BaseException:
            connection.close()
            raise
        is_unused = not connection.in_transaction() and not connection.invalidated
        if is_unused and free is self._free and not free:
            free.append(connection)
        else:
            connection.close()

    def clear(self) -> None:
        """Close the kept connection."""
        free, self._free = self._free, []
        with suppress(IndexError):  # another thread may take it from the list meanwhile
            while True:
                free.pop().close()

    def after_fork(self) -> None:
        _of_parent.extend(self._free)
        self._free = []

    def _take(self, free: list[Connection]) -> Connection | None:
        try:
            connection = free.pop()
        except IndexError:
            return None
        driver_connection = connection.connection.driver_connection
        if has_input(driver_connection):  # the server has ended it
            connection.invalidate()
            connection.close()
            return None
        return connection


#: No further try begins after this time, since the caller waits for an answer, and none after the
#: limit of a thread that has its own, so that a step whose connection was cut ends there.
RETRY_FOR_S = 5.0


class Database:
    """Two engines on one database: `auto` for single statements, `tx` for transactions."""

    def __init__(self, url: str, pool_size: int = 5, tables_remedy: str = TABLES_REMEDY) -> None:
        self.url = normalize_url(url)
        #: What the user does if tables are missing or old, for messages.
        self.tables_remedy = tables_remedy
        #: The name of the kind of database, for `for_database`.
        self.backend = self.url.get_backend_name()
        self.can = capabilities_of(self.backend)
        self._pool_size = pool_size
        self._auto: Engine | None = None
        self._tx: Engine | None = None
        self._kept = KeptConnection(self.bounded)
        fork_safe(self)

    @property
    def shown_url(self) -> str:
        """The URL without its password."""
        return masked(self.url)

    def remedy_at(self, url: URL) -> str:
        """Return what the user does if a session on `url` does not find the tables."""
        if is_same_database(self.url, url):
            return f"to make the tables, {self.tables_remedy}"
        return (
            f"the session is on {masked(url)}, and "
            f"database_url is {self.shown_url}: open the session on that database; if both are "
            f"the same database, {self.tables_remedy}"
        )

    @property
    def auto(self) -> Engine:
        return self._auto or self._make("_auto", "AUTOCOMMIT")

    @property
    def tx(self) -> Engine:
        return self._tx or self._make("_tx", "READ COMMITTED")

    def bounded(self, connection: Connection) -> AbstractContextManager[object]:
        """Bound the wait for the answers on a connection."""
        # SQLite has no server, and waits for locks only.
        return nullcontext() if self.backend == "sqlite" else BoundedStep(connection, self.dispose)

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """Begin a transaction of our own, READ COMMITTED, and commit it at the end."""
        with self.tx.connect() as connection, self.bounded(connection), connection.begin():
            yield connection

    def connect(self) -> AbstractContextManager[Connection]:
        """Lend the kept connection, or another one that commits each statement by itself."""
        return self._kept.use(self.auto)

    def autocommitted(
        self, work: Callable[[Any], T], on: Any = None, unknown_id: int | None = None
    ) -> T:
        """Run `work` on the caller's connection `on`, or on a connection of our own on which each
        statement is a transaction."""
        if on is not None:
            return work(on)
        return self.repeat(work, self.connect, unknown_id)

    def transaction(
        self, work: Callable[[Any], T], on: Any = None, unknown_id: int | None = None
    ) -> T:
        """Run `work` on the caller's connection `on`, or in a transaction of our own, which is
        tried again as a whole."""
        if on is not None:
            return work(on)
        return self.repeat(work, self.begin, unknown_id)

    def rows(self, query: Select[Any]) -> Sequence[Any]:
        return self.autocommitted(lambda c: c.execute(query).all())

    def now(self, tries: int = TRIES) -> datetime:
        def ask(connection: Any) -> datetime:
            with self.bounded(connection):
                instant: datetime = connection.execute(select(db_now())).scalar_one()
            return instant

        # A clock holds a lock meanwhile, so an event loop must not run other calls of this thread.
        return self.repeat(ask, self.auto.connect, tries=tries, may_switch=False)

    def stream(
        self, query: Select[Any], size: int, may_take_long: bool = False
    ) -> Iterator[Sequence[Any]]:
        """Yield the rows of a query in the order in which the database finds them, `size` at a
        time. The wait for them is bounded each time, unless the query `may_take_long`."""
        engine = self.tx if self.can.server_side_cursors else self.auto

        def begin(_: object) -> tuple[ExitStack, Any, Iterator[Sequence[Any]]]:
            with ExitStack() as opened:
                connection = opened.enter_context(engine.connect())
                connection = connection.execution_options(yield_per=size)
                step = nullcontext() if may_take_long else self.bounded(connection)
                with step:
                    result = opened.enter_context(connection.execute(query))
                return opened.pop_all(), step, result.partitions()

        opened, step, parts = self.repeat(begin, nullcontext)
        try:
            while True:
                with step:
                    part = next(parts, None)
                if part is None:
                    return
                yield part
        except exc.DBAPIError as error:
            raise self._translated(error) from error
        finally:
            # The end of the transaction waits for an answer too. Nothing depends on it.
            with suppress(exc.DBAPIError), step:
                opened.close()

    def owns(self, connection: Any) -> bool:
        """Whether the connection is one of ours, not a caller's."""
        return isinstance(connection, Connection) and connection.engine in (self._auto, self._tx)

    def after_fork(self) -> None:
        """Drop the parent's connections: a forked child must neither use nor close them."""
        self._lock = threading.Lock()
        self._kept.after_fork()
        self.dispose(close=False)

    def dispose(self, close: bool = True) -> None:
        self._kept.clear()
        for engine in (self._auto, self._tx):
            if engine is not None:
                engine.dispose(close=close)

    def repeat(
        self,
        work: Callable[[Any], T],
        connect: Callable[[], AbstractContextManager[Any]],
        unknown_id: int | None = None,
        tries: int = TRIES,
        may_switch: bool = True,
        waits_for_locks: bool = True,
    ) -> T:
        """Call `work` with a connection, and repeat this after an error if that is safe.

        It is safe after a conflict, and after a lost connection too, because each of our statements
        is fenced by a version or names its own ids. Driver errors become errors of
        `delaytasks.model.errors`. `unknown_id` is the task that `work` changes, for the error
        raised if its outcome is unknown. Without `waits_for_locks`, no try follows one that waited
        for a locked row in vain. In the thread of an event loop, another thread does all this,
        unless `may_switch` is False.
        """
        if may_switch and is_on_the_loop():
            again = partial(self.repeat, work, connect, unknown_id, tries, False, waits_for_locks)
            return off_the_loop(again)
        began, is_sent = time.monotonic(), False
        retry_for_s = min(RETRY_FOR_S, answer_limit.seconds or RETRY_FOR_S)
        for attempt in range(1, tries + 1):
            try:
                with connect() as connection:
                    return work(connection)
            except TaskStateError as refusal:
                if not is_sent or unknown_id is None or isinstance(refusal, DuplicateTaskError):
                    raise
                # This try may have met the result of an earlier one, whose answer was lost.
                raise unknown_outcome(str(refusal), unknown_id) from refusal
            except exc.DBAPIError as raised:
                error = first_cause(raised)
                # An earlier try may have been executed, whatever the last error is.
                is_sent = is_sent or is_unsure(error)
                if DEMOTED.caused(error.orig):
                    self.dispose()  # the other connections of the pools lead to the same server
                is_over = attempt == tries or time.monotonic() - began > retry_for_s
                is_over |= not waits_for_locks and LOCKED.caused(error.orig)
                if is_over or not is_worth_a_retry(error):
                    forget_details(error)
                    raise self._translated(error, unknown_id if is_sent else None) from error
                time.sleep(random.uniform(0.01, 0.05) * 2**attempt)
            except exc.TimeoutError as error:
                pool = f"setting pool_size = {self._pool_size}"
                reason = f"the database has no free connection ({pool}): {error}"
                if is_sent and unknown_id is not None:
                    raise unknown_outcome(reason, unknown_id) from error
                raise StoreUnavailableError(reason) from error
        raise AssertionError("unreachable")

    def _translated(self, error: exc.DBAPIError, unknown_id: int | None = None) -> Exception:
        return translate(error, unknown_id, self.tables_remedy, self.shown_url)

    def _check_file(self, *_: Any) -> None:
        """Raise `StoreError` if the file is missing. SQLite would make an empty one."""
        if lacks_sqlite_file(self.url):
            raise StoreError(
                f"there is no database {os.path.abspath(str(self.url.database))}: go to your "
                "project's folder, name your Celery app (delaytasks -A APP …; with Django: python "
                "manage.py delays …) or its database (DELAYTASKS_DATABASE_URL); to make a new one "
                f"here, {self.tables_remedy}"
            )

    def _make(self, attribute: str, isolation_level: str) -> Engine:
        with self._lock:
            engine: Engine | None = getattr(self, attribute)
            if engine is None:
                engine = make_engine(self.url, self._pool_size, isolation_level)
                if self.backend == "sqlite":
                    event.listen(engine, "do_connect", self._check_file)
                else:
                    event.listen(engine, "checkin", _mark_returned)
                    event.listen(engine, "checkout", _check_alive)
                    event.listen(engine, "after_cursor_execute", _in_progress.answered)
                setattr(self, attribute, engine)
            return engine
