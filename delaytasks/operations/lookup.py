"""Reads tasks and their failed attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delaytasks.core.attempt import Attempt
from delaytasks.core.filters import Filters, filter_of
from delaytasks.core.inputs import check_page_limit
from delaytasks.core.page import Page
from delaytasks.core.task import DelayTask
from delaytasks.operations.transactions import CallerTransactions
from delaytasks.routing.named_task import name_of

if TYPE_CHECKING:
    from delaytasks.sharding.router import Router


class Lookup:
    def __init__(self, router: Router, transactions: CallerTransactions) -> None:
        self._router = router
        self._transactions = transactions

    def get(self, task: object, tag: str | None, key: str | None, session: Any) -> DelayTask:
        name = name_of(task, tag, key)
        with self._transactions.guard(session) as transaction:
            named = self._router.named(name, transaction)
            return named.read(lambda at, on: at.store.tasks.read(named.id, on))

    def attempts(self, task: object, session: Any) -> list[Attempt]:
        name = name_of(task, None, None)
        with self._transactions.guard(session) as transaction:
            named = self._router.named(name, transaction)
            return named.read(lambda at, on: at.store.tasks.attempts(named.id, on))

    def find(
        self,
        filters: Filters,
        cursor: str | None,
        limit: int,
        newest_first: bool,
        session: Any,
        time_limit_s: float | None = None,
    ) -> Page:
        """Return a page of tasks. Without a session, `time_limit_s` may limit the search."""
        check_page_limit(limit)
        where = filter_of(filters)
        with self._transactions.guard(session) as transaction:
            return self._router.find(where, cursor, limit, transaction, newest_first, time_limit_s)
