"""Cancels the waiting rows of Celery tasks that are revoked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from celery.app.control import Control
from celery.utils.functional import maybe_list

from delaytasks.core.celery_calls import called_task, celery_key
from delaytasks.core.errors import DelayTaskError
from delaytasks.core.ids import MAX_ID
from delaytasks.core.interfaces import Transaction, connection_of
from delaytasks.core.task import DelayTask
from delaytasks.operations.tasks import cancel_task

if TYPE_CHECKING:
    from delaytasks.durable_eta.stored_message import StoredMessage
    from delaytasks.runtime import Runtime


#: The rows that `revoke_by_stamped_headers` reads in one statement.
STAMPS_PAGE = 500
_ID = re.compile(r"[0-9]{1,19}")


class Revocations:
    def __init__(self, runtime: Runtime) -> None:
        self._app = runtime.celery
        self._rows = runtime.store.celery_rows
        self._transactions = runtime.transactions
        self._runtime = runtime

    def revoke(self, task_ids: Iterable[str]) -> None:
        """Cancel the waiting rows of these Celery tasks, and store the state REVOKED of each.

        A row that is being published is asked to stop. If its worker dies before it has published
        the message, no other worker publishes it.
        """
        names = [str(task_id) for task_id in task_ids]
        keys = [celery_key(name) for name in names]
        # The id of a recurring Celery task is the id of its row.
        ids = [int(name) for name in names if _ID.fullmatch(name) and int(name) <= MAX_ID]
        with self._transactions.guard(None) as transaction:
            on = connection_of(transaction)
            self._cancel(self._rows.live(keys, on), transaction)
            recurring = (row for row in self._rows.live_of_ids(ids, on) if self._called_task(row))
            self._cancel(recurring, transaction)

    def revoke_by_stamped_headers(self, headers: Mapping[str, Any] | Iterable[str]) -> None:
        """Cancel the waiting rows of Celery tasks with one of these stamps.

        This reads all waiting rows of Celery tasks, since stamps are parts of bodies.
        """
        from delaytasks.durable_eta.revoking import has_stamp, stamps_of

        stamps = stamps_of(headers)
        with self._transactions.guard(None) as transaction:
            on = connection_of(transaction)
            page = self._rows.page(0, STAMPS_PAGE, on)
            while page:
                read = ((task, self._readable(task)) for task in page)
                named = [task for task, message in read if message and has_stamp(message, stamps)]
                self._cancel(named, transaction)
                page = self._rows.page(page[-1].id, STAMPS_PAGE, on)

    def _cancel(self, live: Iterable[DelayTask], transaction: Transaction | None) -> None:
        cancelled = [task for task in live if cancel_task(self._runtime, task.id, running=True)]
        if cancelled and transaction is not None:
            transaction.after_commit(cancelled, self._store_revoked)
        else:
            self._store_revoked(cancelled)

    def _store_revoked(self, tasks: Sequence[DelayTask], is_committed: bool = True) -> None:
        from delaytasks.durable_eta.revoking import store_revoked

        for task in tasks:
            if message := self._readable(task):
                store_revoked(self._app, message)

    def _readable(self, task: DelayTask) -> StoredMessage | None:
        """Return the message of a row; None if another program wrote it, or without its key."""
        from delaytasks.durable_eta.stored_message import StoredMessage

        if name := self._called_task(task):
            return StoredMessage.of_call(name, str(task.id))
        try:
            return StoredMessage.of_body(task.body)
        except (DelayTaskError, ValueError):
            return None

    def _called_task(self, task: DelayTask) -> str | None:
        """Return the Celery task that a row of a recurring schedule will call, else None."""
        try:
            return called_task(task.body)
        except (DelayTaskError, ValueError):
            return None


# -- Celery's remote control ----------------------------------------------------------------------


class RevokesRows:
    """Cancels waiting rows before workers are told to revoke the tasks."""

    app: Any

    @property
    def _revocations(self) -> Revocations:
        revocations: Revocations = self.app.delaytasks._runtime.revocations
        return revocations

    def broadcast(
        self, command: str, arguments: Mapping[str, Any] | None = None, *args: Any, **options: Any
    ) -> Any:
        given = {**options, **(arguments or {})}
        try:
            if command in ("revoke", "terminate"):
                self._revocations.revoke(maybe_list(given["task_id"]))
            elif command == "revoke_by_stamped_headers":
                self._revocations.revoke_by_stamped_headers(given["headers"])
        finally:
            # Also if the database is unavailable, since a worker may have the message already.
            replies = super().broadcast(command, arguments, *args, **options)  # type: ignore[misc]
        return replies


class DurableControl(RevokesRows, Control):  # type: ignore[misc]
    """The class of `app.control`."""
