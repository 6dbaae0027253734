"""Rows in the caller's transaction: sessions and connections that a framework lends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import URL, Connection, event, exc
from sqlalchemy.util.concurrency import in_greenlet

from delaytasks.db.database import off_the_loop
from delaytasks.db.engines import MISSING, reason_of, unknown_outcome
from delaytasks.model.errors import SessionUnusableError
from delaytasks.model.task import CallerConnection, DelayedTask, Transaction

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

CommitAction = Callable[..., None]
#: Says how to make the tables that a session on a URL does not find.
RemedyAt = Callable[[URL], str]
#: Actions that wait for a session's commit, in its `info`. A session with this entry has our
#: listeners.
_PENDING = "delaytasks.pending"
_OUTSIDE_OF_RUN_SYNC = (
    "session= is asynchronous, and this call was not made inside its run_sync(); await the "
    "asynchronous twin of the method, whose name begins with an a: "
    "await delays.aschedule_delay(..., session=session)"
)


def transaction_of(session: Any, remedy_at: RemedyAt) -> Transaction:
    """Return the transaction of the object that the caller passed as `session=`."""
    from sqlalchemy.orm import Session  # a process without sessions does not import the ORM

    given, session = type(session).__name__, synchronous(session)
    if isinstance(session, Connection):
        return ConnectionTransaction(session, remedy_at)
    if isinstance(session, Session):
        return SessionTransaction(session, remedy_at)
    raise SessionUnusableError(
        "session= takes a SQLAlchemy Session or Connection, "
        f"or an asynchronous one inside its run_sync(), not {given}"
    )


def synchronous(given: Any) -> Any:
    """Return the session, connection or engine itself that a scoped or asynchronous one has."""
    if callable(getattr(given, "registry", None)):
        given = given()  # scoped_session, as Flask-SQLAlchemy has it
    for attribute in ("sync_session", "sync_connection", "sync_engine"):
        given = getattr(given, attribute, given)
    return given


class _CallersTransaction:
    connection: Any
    reports_changes = False
    _remedy_at: RemedyAt

    @property
    def stands_alone(self) -> bool:
        return _stands_alone(self.connection)

    @contextmanager
    def guard(self, unknown_id: int | None = None) -> Iterator[CallerConnection]:
        stands_alone, url = False, None
        try:
            connection = self.connection
            url = connection.engine.url
            if connection.dialect.is_async and not in_greenlet():
                raise SessionUnusableError(_OUTSIDE_OF_RUN_SYNC)
            stands_alone = _stands_alone(connection)
            yield connection
        except exc.DBAPIError as error:
            if stands_alone and unknown_id is not None and error.connection_invalidated:
                raise unknown_outcome(
                    reason_of(error), unknown_id
                ) from error  # there is nothing to roll back
            # We never try again: the caller's transaction may be rolled back as a whole, with the
            # caller's own work.
            remedy = "roll it back, nothing was sent"
            if stands_alone:
                remedy = "of many tasks the first ones may be there"
            if url is not None and MISSING.caused(error.orig):
                remedy += f"; {self._remedy_at(url)}"
            raise SessionUnusableError(
                f"the caller's transaction cannot be used: {reason_of(error)}; {remedy}"
            ) from error
        except exc.MissingGreenlet as error:
            raise SessionUnusableError(_OUTSIDE_OF_RUN_SYNC) from error
        except exc.SQLAlchemyError as error:
            # The text of a StatementError contains the statement and its parameters, which are
            # bodies and keys.
            reason = str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
            raise SessionUnusableError(f"the caller's session cannot be used: {reason}") from error


def _stands_alone(connection: Any) -> bool:
    return bool(connection._is_autocommit_isolation())


class SessionTransaction(_CallersTransaction):
    """Keeps actions in the session, each under the (nested) transaction that wrote its rows."""

    def __init__(self, session: Session, remedy_at: RemedyAt) -> None:
        self._session = session
        self._remedy_at = remedy_at
        #: The connection of the last guard. A caller that ends a transaction between two steps gets
        #: another one.
        self._last_connection: Connection | None = None

    @property
    def connection(self) -> Connection:
        self._last_connection = self._session.connection()
        return self._last_connection

    def after_commit(self, tasks: Sequence[DelayedTask], action: CommitAction) -> None:
        session, connection = self._session, self._last_connection or self.connection
        if _stands_alone(connection):  # each statement is committed
            off_the_loop(partial(action, tasks))
            return
        if _PENDING not in session.info:
            event.listen(session, "after_commit", _on_commit)
            event.listen(session, "after_soft_rollback", _on_rollback)
            event.listen(session, "after_transaction_end", _on_end)
            session.info[_PENDING] = []
        transaction = session.get_nested_transaction() or session.get_transaction()
        session.info[_PENDING].append((transaction, connection, tasks, action))


def _on_commit(session: Session) -> None:
    """Run the actions. SQLAlchemy calls this for savepoints too, but only the outermost commit
    counts."""
    if session.in_nested_transaction():
        return
    pending, session.info[_PENDING] = session.info.get(_PENDING, ()), []
    for _, connection, tasks, action in pending:
        if not connection.closed and connection.in_transaction():
            # The session joined a transaction that the caller began elsewhere and will end there.
            _after_connection_commit(connection, tasks, action)
        else:
            off_the_loop(partial(action, tasks))


def _on_rollback(session: Session, ended: Any) -> None:
    pending = session.info.get(_PENDING)
    if pending:
        session.info[_PENDING] = [
            waiting for waiting in pending if not _is_inside(waiting[0], ended)
        ]


def _on_end(session: Session, ended: Any) -> None:
    """Forget the actions of a session that is closed, for which SQLAlchemy reports no rollback."""
    if ended.parent is None:
        session.info[_PENDING] = []


def _is_inside(transaction: Any, ended: Any) -> bool:
    while transaction is not None:
        if transaction is ended:
            return True
        transaction = transaction.parent
    return False


#: Actions that wait for a Connection's commit: open savepoints, tasks, action. They are not in
#: `Connection.info`, which belongs to the driver's connection and which the pool gives to other
#: users.
_waiting: WeakKeyDictionary[
    Connection, list[tuple[set[str], Sequence[DelayedTask], CommitAction]]
] = WeakKeyDictionary()


class ConnectionTransaction(_CallersTransaction):
    """SQLAlchemy reports a Connection's commit just before it, so the rows are not visible yet."""

    def __init__(self, connection: Connection, remedy_at: RemedyAt) -> None:
        self._connection = connection
        self._remedy_at = remedy_at
        if connection.closed or connection.invalidated:
            raise SessionUnusableError("the caller's connection is closed; nothing was sent")

    @property
    def connection(self) -> CallerConnection:
        return self._connection

    def after_commit(self, tasks: Sequence[DelayedTask], action: CommitAction) -> None:
        _after_connection_commit(self._connection, tasks, action)


def _after_connection_commit(
    connection: Connection, tasks: Sequence[DelayedTask], action: CommitAction
) -> None:
    if not connection.in_transaction() or _stands_alone(connection):
        off_the_loop(partial(action, tasks))
        return
    waiting = _waiting.get(connection)
    if waiting is None:  # the first one of this transaction
        if not event.contains(connection, "commit", _on_connection_commit):
            event.listen(connection, "commit", _on_connection_commit)
            event.listen(connection, "rollback", _on_connection_rollback)
            event.listen(connection, "rollback_savepoint", _on_rollback_to_savepoint)
        waiting = _waiting[connection] = []
    waiting.append((_savepoints(connection), tasks, action))


def _on_connection_commit(connection: Connection) -> None:
    for _, tasks, action in _waiting.pop(connection, ()):
        off_the_loop(partial(action, tasks, is_committed=False))


def _on_connection_rollback(connection: Connection) -> None:
    _waiting.pop(connection, None)


def _on_rollback_to_savepoint(connection: Connection, name: str, context: None) -> None:
    if connection in _waiting:
        _waiting[connection] = [item for item in _waiting[connection] if name not in item[0]]


def _savepoints(connection: Connection) -> set[str]:
    """Return the names of the open savepoints, which SQLAlchemy reports only when they end."""
    names = set()
    nested = connection.get_nested_transaction()
    while nested is not None:
        names.add(nested._savepoint)
        nested = nested._previous_nested
    return names


# -- The connections on which a test runs the statements of delaytasks ----------------------------


T = TypeVar("T")
#: Runs a call of a coroutine.
RunCall = Callable[[Callable[[], Any]], Awaitable[Any]]


@dataclass(frozen=True, eq=False)
class ConnectionSource:
    """Connections of a test or of a framework.

    Attributes
    ----------
    connect
        Opens a connection for a few statements, in a savepoint if the test has a transaction.
    around_processor
        Is entered around each call of a processor.
    run_coroutine
        Runs the coroutine of a processor in this thread; None means an event loop of its own.
    in_framework
        Runs the calls of coroutines; None means as the web framework requires.
    """

    connect: Callable[[], AbstractContextManager[Connection]]
    around_processor: Callable[[DelayedTask], AbstractContextManager[Any]] = nullcontext
    run_coroutine: Callable[[Coroutine[Any, Any, Any]], Any] | None = None
    in_framework: RunCall | None = None
