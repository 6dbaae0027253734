"""Finds the transaction that a call belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from delaytasks.core.interfaces import Transaction


class CallerTransactions:
    """The transaction of `session=`, or without it the one that a web framework has open."""

    def __init__(
        self, ambient: Callable[[], Transaction | None], remedy_at: Callable[[Any], str]
    ) -> None:
        """`remedy_at` says how to make the tables that a session on a URL does not find."""
        self._ambient = ambient
        self._remedy_at = remedy_at
        self._session: ContextVar[Any] = ContextVar("delaytasks_session", default=None)

    @contextmanager
    def using(self, session: Any) -> Iterator[None]:
        """Let calls without `session=` inside the block take part in the session's transaction."""
        token = self._session.set(session)
        try:
            yield
        finally:
            self._session.reset(token)

    def current_session(self) -> Any:
        """Return the session of the innermost `using`, or None."""
        return self._session.get()

    def of(self, session: Any) -> Transaction | None:
        session = self.current_session() if session is None else session
        if session is None:
            return self._ambient()
        from delaytasks.storage.transactions import transaction_of

        return transaction_of(session, self._remedy_at)

    @contextmanager
    def guard(self, session: Any) -> Iterator[Transaction | None]:
        """Yield the transaction; translate driver errors inside the block into ours."""
        transaction = self.of(session)
        with transaction.guard() if transaction is not None else nullcontext():
            yield transaction
