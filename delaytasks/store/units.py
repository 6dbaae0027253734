"""A caller's transaction: rows are written in it, and armed after it is committed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, event, exc
from sqlalchemy.orm import Session

from delaytasks.core.errors import SessionUnusableError
from delaytasks.core.ports import Executor, Unit
from delaytasks.core.task import DelayTask

Action = Callable[[Sequence[DelayTask]], None]
_PENDING = "delaytasks.pending"


def unit_of(session: Any) -> Unit:
    """The unit for what the caller gave as `session=`."""
    if isinstance(session, Connection):
        return ConnectionUnit(session)
    session = getattr(session, "sync_session", session)  # AsyncSession
    if callable(getattr(session, "registry", None)):
        session = session()  # scoped_session, as Flask-SQLAlchemy has it
    if isinstance(session, Session):
        return SessionUnit(session)
    raise SessionUnusableError(
        f"session= takes a SQLAlchemy Session, AsyncSession.sync_session or Connection, not {type(session).__name__}"
    )


class _Unit:
    @contextmanager
    def guard(self) -> Iterator[None]:
        try:
            yield
        except exc.DBAPIError as error:
            # Never tried again by us: the transaction may be rolled back as a whole, with what the caller did.
            raise SessionUnusableError(
                f"the caller's transaction can not be used: {str(error.orig).strip()}; roll it back, nothing was sent"
            ) from error
        except exc.SQLAlchemyError as error:
            raise SessionUnusableError(f"the caller's session can not be used: {error}") from error


class SessionUnit(_Unit):
    """Entries wait in the session, each under the (nested) transaction that wrote it."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def executor(self) -> Executor:
        return self._session.connection()

    def after_commit(self, tasks: Sequence[DelayTask], action: Action) -> None:
        session = self._session
        pending: list[tuple[Any, Sequence[DelayTask], Action]] | None = session.info.get(_PENDING)
        if pending is None:
            pending = session.info[_PENDING] = []
        if not event.contains(session, "after_commit", _on_commit):
            event.listen(session, "after_commit", _on_commit)
            event.listen(session, "after_soft_rollback", _on_rollback)
            event.listen(session, "after_transaction_end", _on_end)
        pending.append((session.get_nested_transaction() or session.get_transaction(), tasks, action))


def _on_commit(session: Session) -> None:
    """Fires for savepoints too; only the outermost commit is one that others see."""
    if session.in_nested_transaction():
        return
    for _, tasks, action in session.info.pop(_PENDING, ()):
        action(tasks)


def _on_rollback(session: Session, ended: Any) -> None:
    pending = session.info.get(_PENDING)
    if pending:
        session.info[_PENDING] = [waiting for waiting in pending if not _is_inside(waiting[0], ended)]


def _on_end(session: Session, ended: Any) -> None:
    """A session that is closed tells of no rollback."""
    if ended.parent is None:
        session.info.pop(_PENDING, None)


def _is_inside(transaction: Any, ended: Any) -> bool:
    while transaction is not None:
        if transaction is ended:
            return True
        transaction = transaction.parent
    return False


class ConnectionUnit(_Unit):
    """SQLAlchemy tells of a Connection's commit just before it happens: what is armed then is a message that comes
    a moment later, and one that comes too early is found by the sweep."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        if connection.closed or connection.invalidated:
            raise SessionUnusableError("the caller's connection is closed; nothing was sent")

    @property
    def executor(self) -> Executor:
        return self._connection

    def after_commit(self, tasks: Sequence[DelayTask], action: Action) -> None:
        connection = self._connection
        if not connection.in_transaction():
            action(tasks)  # AUTOCOMMIT
            return
        if not event.contains(connection, "commit", _on_connection_commit):
            event.listen(connection, "commit", _on_connection_commit)
            event.listen(connection, "rollback", _on_connection_rollback)
        connection.info.setdefault(_PENDING, []).append((tasks, action))


def _on_connection_commit(connection: Connection) -> None:
    for tasks, action in connection.info.pop(_PENDING, ()):
        action(tasks)


def _on_connection_rollback(connection: Connection) -> None:
    connection.info.pop(_PENDING, None)
