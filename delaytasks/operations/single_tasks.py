"""Changes single tasks: cancel, reschedule, rerun and touch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

from delaytasks.core.cancel_result import CancelResult
from delaytasks.core.durations import Delay
from delaytasks.core.errors import InvalidScheduleError, TaskStateError
from delaytasks.core.events import Events
from delaytasks.core.inputs import check_key, check_tag
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask, id_of
from delaytasks.core.text import shown
from delaytasks.core.touch_result import TouchResult
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
        request: int | None,
        session: Any,
    ) -> CancelResult:
        try:
            with self._named(task, tag, key, session) as named:
                shard, cancelled = named.move(
                    lambda shard, on: shard.store.tasks.cancel(named.id, version, on, request)
                )
        except TaskStateError as error:
            refused = CancelResult.of_refusal(error)
            if strict or refused is None:
                raise
            return refused
        if cancelled is None:
            return CancelResult.cancelled_before(named.id)
        if cancelled.status is Status.RUNNING:
            self._events.emit("task.cancel_requested", **cancelled.event_fields)
            return CancelResult.requested(cancelled)
        self._events.emit("task.cancelled", **cancelled.event_fields)
        shard.producer.disarm_after_commit(cancelled, named.transaction)
        return CancelResult.cancelled(cancelled)

    def reschedule(
        self,
        task: object,
        delay: Delay | None,
        at: datetime | None,
        tag: str | None,
        key: str | None,
        version: int | None,
        session: Any,
    ) -> DelayTask:
        with self._named(task, tag, key, session) as named:
            shard, moved = named.move(
                lambda shard, on: shard.store.tasks.reschedule(
                    named.id, shard.producer.due_of(delay, at), version, on
                )
            )
        self._events.emit("task.rescheduled", **moved.event_fields)
        shard.producer.arm_after_commit([moved], named.transaction)
        return moved

    def rerun(self, task: object, delay: Delay, version: int | None, session: Any) -> DelayTask:
        with self._named(task, None, None, session) as named:
            shard, moved = named.move(
                lambda shard, on: shard.rerun(named.id, shard.producer.due_of(delay), version, on)
            )
        self._events.emit("task.rerun", **moved.event_fields)
        shard.producer.arm_after_commit([moved], named.transaction)
        return moved

    def touch(
        self,
        task: object,
        delay: Delay | None,
        tag: str | None,
        key: str | None,
        session: Any,
    ) -> TouchResult[int] | TouchResult[str]:
        name = name_of(task, tag, key)
        with self._transactions.guard(session) as transaction:
            waits = self._router.touch(name, delay, transaction)
        if isinstance(name, tuple):
            return TouchResult.of([name[1]], {name[1]} if waits else set())
        return TouchResult.of([id_of(name)], {id_of(name)} if waits else set())

    def touch_many(
        self,
        tasks: Iterable[object] | None,
        delay: Delay | None,
        tag: str | None,
        keys: Iterable[str] | None,
        session: Any,
    ) -> TouchResult[int] | TouchResult[str]:
        if (tasks is None) == (keys is None) or (tag is None) != (keys is None):
            raise InvalidScheduleError("give touch_many the tasks, or tag= and keys=")
        with self._transactions.guard(session) as transaction:
            if keys is None:
                names = [id_or_task(task) for task in _listed(tasks)]
                waiting = self._router.touch_many(names, delay, transaction)
                return TouchResult.of(map(id_of, names), waiting)
            wanted = [check_key(key) for key in _listed(keys)]
            touched = self._router.touch_keys(check_tag(tag), wanted, delay, transaction)
            return TouchResult.of(wanted, touched)

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
