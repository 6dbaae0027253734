"""Changes single tasks: cancel, reschedule, rerun and touch."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from delaytasks.core.cancel_result import CancelResult
from delaytasks.core.durations import Delay
from delaytasks.core.errors import InvalidScheduleError, TaskStateError
from delaytasks.core.inputs import check_key, check_tag
from delaytasks.core.interfaces import connection_of
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask, id_of
from delaytasks.core.text import shown
from delaytasks.core.touch_result import TouchResult
from delaytasks.operations.lookup import find_id, id_or_task, name_of

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime
    from delaytasks.scheduling.producer import Producer


class SingleTasks:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._store = runtime.store
        self._transactions = runtime.transactions
        self._events = runtime.events

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
        name = name_of(task, tag, key)
        try:
            with self._transactions.guard(session) as transaction:
                on = connection_of(transaction)
                id = find_id(self._store, name, on)
                cancelled = self._store.tasks.cancel(id, version, on, request)
        except TaskStateError as error:
            refused = CancelResult.of_refusal(error)
            if strict or refused is None:
                raise
            return refused
        if cancelled is None:
            return CancelResult.cancelled_before(id)
        if cancelled.status is Status.RUNNING:
            self._events.emit("task.cancel_requested", **cancelled.event_fields)
            return CancelResult.requested(cancelled)
        self._events.emit("task.cancelled", **cancelled.event_fields)
        self._producer.disarm_after_commit(cancelled, transaction)
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
        name = name_of(task, tag, key)
        with self._transactions.guard(session) as transaction:
            on = connection_of(transaction)
            id, due = find_id(self._store, name, on), self._producer.due_of(delay, at)
            moved = self._store.tasks.reschedule(id, due, version, on)
        self._events.emit("task.rescheduled", **moved.event_fields)
        self._producer.arm_after_commit([moved], transaction)
        return moved

    def rerun(self, task: object, delay: Delay, version: int | None, session: Any) -> DelayTask:
        name = name_of(task, None, None)
        with self._transactions.guard(session) as transaction:
            on = connection_of(transaction)
            id, due = find_id(self._store, name, on), self._producer.due_of(delay)
            moved = self._store.tasks.rerun(id, due, version, on)
        self._events.emit("task.rerun", **moved.event_fields)
        self._producer.arm_after_commit([moved], transaction)
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
            due, on = self._producer.due_of(delay), connection_of(transaction)
            if isinstance(name, tuple):
                waits = self._store.touches.touch_key(*name, due, on)
            else:
                waits = self._store.touches.touch(id_of(name), due, on)
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
            on, touches = connection_of(transaction), self._store.touches
            if keys is None:
                ids = [id_of(id_or_task(task)) for task in _listed(tasks)]
                return TouchResult.of(
                    ids, touches.touch_many(ids, self._producer.due_of(delay), on)
                )
            wanted = [check_key(key) for key in _listed(keys)]
            ids_of_keys = touches.ids_of_keys(check_tag(tag), wanted, on)
            touched = touches.touch_many(ids_of_keys.values(), self._producer.due_of(delay), on)
            return TouchResult.of(wanted, {key for key, id in ids_of_keys.items() if id in touched})

    @property
    def _producer(self) -> Producer:
        return self._runtime.producer


def _listed(items: Any) -> Iterable[Any]:
    if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
        raise InvalidScheduleError(
            f"touch_many takes a list of tasks or of keys, not {shown(items)}"
        )
    return items
