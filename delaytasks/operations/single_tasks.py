"""Changes single tasks: cancel, reschedule, retry and touch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from delaytasks.core.cancel_result import CancelResult
from delaytasks.core.errors import InvalidScheduleError, TaskStateError
from delaytasks.core.events import Events
from delaytasks.core.inputs import check_key, check_tag
from delaytasks.core.task import DelayTask, id_of
from delaytasks.core.text import shown
from delaytasks.operations.transactions import CallerTransactions
from delaytasks.routing.named_task import NamedTask, id_or_task, name_of

if TYPE_CHECKING:
    from delaytasks.sharding.router import Router


class SingleTasks:
    def __init__(self, router: Router, transactions: CallerTransactions, events: Events) -> None:
        self._router = router
        self._transactions = transactions
        self._events = events

    def cancel(
        self,
        task: object,
        tag: str | None,
        key: str | None,
        version: int | None,
        strict: bool,
        session: Any,
    ) -> CancelResult:
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
        self._events.emit("task.cancelled", id=cancelled.id, tag=cancelled.tag)
        shard.producer.disarm_after_commit(cancelled, named.transaction)
        return CancelResult.cancelled(cancelled)

    def reschedule(
        self,
        task: object,
        delay: float | timedelta | None,
        when: datetime | None,
        tag: str | None,
        key: str | None,
        version: int | None,
        session: Any,
    ) -> DelayTask:
        with self._named(task, tag, key, session) as named:
            shard, moved = named.move(
                lambda at, on: at.store.tasks.reschedule(
                    named.id, at.producer.due_of(delay, when), version, on
                )
            )
        self._events.emit("task.rescheduled", id=moved.id, tag=moved.tag)
        shard.producer.arm_after_commit([moved], named.transaction)
        return moved

    def retry(
        self, task: object, delay: float | timedelta, version: int | None, session: Any
    ) -> DelayTask:
        with self._named(task, None, None, session) as named:
            shard, moved = named.move(
                lambda at, on: at.retry(named.id, at.producer.due_of(delay), version, on)
            )
        self._events.emit("task.retried", id=moved.id, tag=moved.tag)
        shard.producer.arm_after_commit([moved], named.transaction)
        return moved

    def touch(
        self,
        task: object,
        delay: float | timedelta | None,
        tag: str | None,
        key: str | None,
        session: Any,
    ) -> bool:
        name = name_of(task, tag, key)
        with self._transactions.guard(session) as transaction:
            return self._router.touch(name, delay, transaction)

    def touch_many(
        self,
        tasks: Iterable[object] | None,
        delay: float | timedelta | None,
        tag: str | None,
        keys: Iterable[str] | None,
        session: Any,
    ) -> list[int] | list[str]:
        """Return the ids, or the keys, of the tasks that no longer wait."""
        if (tasks is None) == (keys is None) or (tag is None) != (keys is None):
            raise InvalidScheduleError("give touch_many the tasks, or tag= and keys=")
        with self._transactions.guard(session) as transaction:
            if keys is None:
                names = [id_or_task(task) for task in _listed(tasks)]
                waiting = self._router.touch_many(names, delay, transaction)
                return [id for id in dict.fromkeys(map(id_of, names)) if id not in waiting]
            wanted = [check_key(key) for key in _listed(keys)]
            touched = self._router.touch_keys(check_tag(tag), wanted, delay, transaction)
            return [key for key in dict.fromkeys(wanted) if key not in touched]

    @contextmanager
    def _named(
        self, task: object, tag: str | None, key: str | None, session: Any
    ) -> Iterator[NamedTask]:
        """Yield the task that a call names, inside the call's transaction."""
        name = name_of(task, tag, key)
        with self._transactions.guard(session) as transaction:
            yield self._router.named(name, transaction)


def _listed(items: Any) -> Iterable[Any]:
    if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
        raise InvalidScheduleError(
            f"touch_many takes a list of tasks or of keys, not {shown(items)}"
        )
    return items
