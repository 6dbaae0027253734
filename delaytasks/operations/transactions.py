"""Finds the transaction that a call belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from delaytasks.core.interfaces import Transaction


class CallerTransactions:
    """The transaction of `session=`, or without it the one that a web framework has open."""

    def __init__(self, ambient: Callable[[], Transaction | None]) -> None:
        self._ambient = ambient

    def of(self, session: Any) -> Transaction | None:
        if session is None:
            return self._ambient()
        from delaytasks.storage.transactions import transaction_of

        return transaction_of(session)

    @contextmanager
    def guard(self, session: Any) -> Iterator[Transaction | None]:
        """Yield the transaction; translate driver errors inside the block into ours."""
        transaction = self.of(session)
        with transaction.guard() if transaction is not None else nullcontext():
            yield transaction
