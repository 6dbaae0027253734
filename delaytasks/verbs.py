"""What callers do with delayed tasks: schedule, look up, cancel, reschedule, retry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from delaytasks.core.cancel_result import CancelResult
from delaytasks.core.errors import InvalidScheduleError, TaskStateError
from delaytasks.core.events import Events
from delaytasks.core.ids import check_id
from delaytasks.core.inputs import check_instant, check_key, check_limit, check_status, check_tag
from delaytasks.core.interfaces import OnConflict, Transaction
from delaytasks.core.retry_schedule import RetrySchedule
from delaytasks.core.states import Status
from delaytasks.core.task import Attempt, DelayTask, NewTask, Page
from delaytasks.core.text import shown

if TYPE_CHECKING:
    from delaytasks.sharding.router import Name, Named, ShardRouter
    from delaytasks.sharding.shard import Shard


class Verbs(ABC):
    """The verbs, for a class that brings their parts."""

    events: Events
    #: How a call without `session=` finds the caller's transaction; Django's integration sets it.
    ambient_transaction: Callable[[], Transaction | None]

    @property
    @abstractmethod
    def routes(self) -> ShardRouter: ...

    # -- schedule ---------------------------------------------------------------------------------

    def schedule_delay(
        self,
        tag: str,
        body: Any,
        delay: float | timedelta,
        *,
        key: str | None = None,
        on_conflict: OnConflict = "reject",
        max_wait: float | str | timedelta | None = None,
        queue: str | None = None,
        priority: int = 0,
        id: int | None = None,
        retry: RetrySchedule | str | int | None = None,
        expires: float | str | timedelta | None = None,
        concurrency_key: str | None = None,
        session: Any = None,
    ) -> DelayTask:
        """Runs the processor of `tag` with `body`, `delay` seconds (or a timedelta) from now.

        `key` names the task within its tag; while a live task has the key, `on_conflict` says what happens:
        "reject" raises `DuplicateTaskError`, "keep" returns that task, "replace" gives it the new body and time, but
        puts it off no longer than `max_wait` after it was scheduled first.
        `session` is a SQLAlchemy Session or Connection: the row becomes part of its transaction. `priority` is 0
        to 9, higher first. Scheduling again with the same `id` is harmless. `retry` is a ladder of its own or a number
        of retries, `expires` how late it may begin; without them those of the tag's processor count. `concurrency_key`
        is whom the task is for, where limits are counted for each.
        """
        new = NewTask(
            tag,
            body,
            delay,
            None,
            key,
            queue,
            priority,
            id,
            retry,
            expires,
            max_wait,
            concurrency_key,
        )
        return self.routes.schedule(new, on_conflict, self._transaction(session))

    def schedule_at(
        self,
        tag: str,
        body: Any,
        when: datetime,
        *,
        key: str | None = None,
        on_conflict: OnConflict = "reject",
        max_wait: float | str | timedelta | None = None,
        queue: str | None = None,
        priority: int = 0,
        id: int | None = None,
        retry: RetrySchedule | str | int | None = None,
        expires: float | str | timedelta | None = None,
        concurrency_key: str | None = None,
        session: Any = None,
    ) -> DelayTask:
        """As `schedule_delay`, at an instant (an aware datetime). The past means now."""
        new = NewTask(
            tag,
            body,
            None,
            when,
            key,
            queue,
            priority,
            id,
            retry,
            expires,
            max_wait,
            concurrency_key,
        )
        return self.routes.schedule(new, on_conflict, self._transaction(session))

    def schedule_many(
        self,
        tasks: Iterable[NewTask | tuple[str, Any, float | timedelta | datetime]],
        *,
        on_conflict: OnConflict = "reject",
        session: Any = None,
        on_batch: Callable[[Sequence[DelayTask]], None] | None = None,
    ) -> int:
        """Schedules many tasks, given as `NewTask` or as (tag, body, delay or instant), and returns their number.

        Takes a generator, and holds a few thousand tasks at a time; `on_batch` is called with each lot once it is
        written, for progress and for the ids. Without `session` each lot is a transaction of its own; with several
        databases it is one of each.
        """
        return self.routes.schedule_many(
            map(_new_task, tasks), on_conflict, self._transaction(session), on_batch
        )

    def new_id(self, tag: str | None = None, key: str | None = None) -> int:
        """An id to schedule with, for who wants to know it before; with several databases a key's task needs one of
        its shard."""
        return self.routes.new_id(tag, key)

    def shard_for(self, tag: str, key: str) -> Shard:
        """The database that a key's tasks belong to: `session=` has to be on `shard.url` to schedule them."""
        return self.routes.shard_for(tag, key)

    # -- operate ----------------------------------------------------------------------------------

    def cancel(
        self,
        task: int | str | DelayTask | None = None,
        *,
        tag: str | None = None,
        key: str | None = None,
        version: int | None = None,
        strict: bool = False,
        session: Any = None,
    ) -> CancelResult:
        """Cancels a task that waits, named by its id or by its tag and key.

        The result is true if this call cancelled the task: the task then never starts (inside a transaction of yours:
        once that is committed). The result is false if nothing is left to cancel, because no such task exists, or the
        task runs, has ended or was cancelled before; `result.reason` and `result.status` say which.
        With `strict=True` the call raises `TaskNotFoundError` if no such task exists, `CancelTooLateError` while it
        runs, and `InvalidStatusError` after that. With `version` it raises `StaleVersionError` if the task has another
        version by now, strict or not.

        >>> if not cancel(tag="order.close", key="7"):
        ...     return "too late to pay"
        """
        try:
            with self._named(task, tag, key, session) as named:
                shard, cancelled = named.move(
                    lambda at, on: at.store.tasks.cancel(named.id, version, on)
                )
        except TaskStateError as error:
            refused = CancelResult.of_refusal(error)
            if strict or refused is None:
                raise
            return refused
        if cancelled is None:
            return CancelResult.cancelled_before(named.id)
        self.events.emit("task.cancelled", id=cancelled.id, tag=cancelled.tag)
        shard.producer.disarm_after_commit(cancelled, named.transaction)
        return CancelResult.cancelled(cancelled)

    def reschedule(
        self,
        task: int | str | DelayTask | None = None,
        delay: float | timedelta | None = None,
        *,
        when: datetime | None = None,
        tag: str | None = None,
        key: str | None = None,
        version: int | None = None,
        session: Any = None,
    ) -> DelayTask:
        """Gives a task that waits another time: `delay` seconds from now, or the instant `when`.

        With `version` (as read before), `StaleVersionError` if somebody moved it meanwhile.
        """
        with self._named(task, tag, key, session) as named:
            shard, moved = named.move(
                lambda at, on: at.store.tasks.reschedule(
                    named.id, at.producer.due_of(delay, when), version, on
                )
            )
        self.events.emit("task.rescheduled", id=moved.id, tag=moved.tag)
        shard.producer.arm_after_commit([moved], named.transaction)
        return moved

    def retry(
        self,
        task: int | str | DelayTask | None = None,
        delay: float | timedelta = 0,
        *,
        version: int | None = None,
        session: Any = None,
    ) -> DelayTask:
        """Runs a FAILED or CANCELLED task again, `delay` seconds from now; attempts are counted anew."""
        with self._named(task, None, None, session) as named:
            retry_at = self.routes.databases.retry
            shard, moved = named.move(
                lambda at, on: retry_at(at.number, named.id, at.producer.due_of(delay), version, on)
            )
        self.events.emit("task.retried", id=moved.id, tag=moved.tag)
        shard.producer.arm_after_commit([moved], named.transaction)
        return moved

    # -- look up ----------------------------------------------------------------------------------

    def get(
        self,
        task: int | str | DelayTask | None = None,
        *,
        tag: str | None = None,
        key: str | None = None,
        session: Any = None,
    ) -> DelayTask:
        """The task as it is now; `TaskNotFoundError` if there is none."""
        with self._named(task, tag, key, session) as named:
            return named.read(lambda at, on: at.store.tasks.read(named.id, on))

    def attempts(self, task: int | str | DelayTask, *, session: Any = None) -> list[Attempt]:
        """The failed attempts of a task, the last 50 of them: when, how long, where, and why."""
        with self._named(task, None, None, session) as named:
            return named.read(lambda at, on: at.store.tasks.attempts(named.id, on))

    def find(
        self,
        *,
        tag: str | None = None,
        status: Status | str | None = None,
        key: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        cursor: str | None = None,
        limit: int = 100,
        newest_first: bool = False,
        session: Any = None,
    ) -> Page:
        """Tasks by tag, status, key and due time (since ≤ expected_time < until), in the order of their due times; with
        `newest_first` in the opposite order.

        `page.cursor` gets the next page, and is None at the end.
        """
        check_limit(limit)
        by = (
            None if tag is None else check_tag(tag),
            None if status is None else check_status(status),
            None if key is None else check_key(key),
            None if since is None else check_instant(since),
            None if until is None else check_instant(until),
        )
        with self._guarded(session) as transaction:
            return self.routes.find(by, cursor, limit, transaction, newest_first)

    # -- inside -----------------------------------------------------------------------------------

    def transaction_for(self, session: Any, task: DelayTask) -> Transaction | None:
        """For `task.complete`."""
        transaction = self._transaction(session)
        self.routes.same(task, transaction)
        return transaction

    def _transaction(self, session: Any) -> Transaction | None:
        if session is None:
            return self.ambient_transaction()
        from delaytasks.storage.transactions import transaction_of

        return transaction_of(session)

    @contextmanager
    def _guarded(self, session: Any) -> Iterator[Transaction | None]:
        """The transaction that a call is part of."""
        transaction = self._transaction(session)
        with transaction.guard() if transaction is not None else nullcontext():
            yield transaction

    @contextmanager
    def _named(self, task: Any, tag: str | None, key: str | None, session: Any) -> Iterator[Named]:
        """The task that a call names, in the transaction that the call is part of."""
        name = name_of(task, tag, key)
        with self._guarded(session) as transaction:
            yield self.routes.named(name, transaction)


def name_of(task: Any, tag: str | None, key: str | None) -> Name:
    if (task is None) == (key is None) or (key is not None and tag is None):
        raise InvalidScheduleError("name the task by its id, or by tag= and key=")
    return (check_tag(tag), check_key(key)) if task is None else checked(task)


def checked(task: Any) -> int | DelayTask:
    return task if isinstance(task, DelayTask) else check_id(task)


def _new_task(item: Any) -> NewTask:
    if isinstance(item, NewTask):
        return item
    if isinstance(item, tuple) and len(item) == 3:
        tag, body, at = item
        return NewTask(tag, body, when=at) if isinstance(at, datetime) else NewTask(tag, body, at)
    raise InvalidScheduleError(
        f"schedule_many takes NewTask, or (tag, body, delay or instant), not {shown(item)}"
    )
