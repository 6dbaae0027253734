"""What callers do with delayed tasks: schedule, look up, cancel, reschedule, touch, retry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime, timedelta
from typing import Any, overload

from delaytasks.core.errors import InvalidQueryError, InvalidScheduleError, TaskNotFoundError
from delaytasks.core.events import Events
from delaytasks.core.ids import check_id
from delaytasks.core.inputs import check_instant, check_key, check_tag
from delaytasks.core.ladder import Ladder
from delaytasks.core.ports import OnConflict, Unit
from delaytasks.core.states import Status
from delaytasks.core.task import Attempt, DelayTask, NewTask, Page
from delaytasks.core.text import shown
from delaytasks.engine.producer import Producer
from delaytasks.store.store import Store
from delaytasks.store.units import unit_of

PAGE_MAX = 1000


class Verbs(ABC):
    """The verbs, for a class that brings their parts."""

    events: Events
    #: How a call without `session=` finds the caller's transaction; Django's integration sets it.
    ambient_unit: Callable[[], Unit | None]

    @property
    @abstractmethod
    def store(self) -> Store: ...

    @property
    @abstractmethod
    def producer(self) -> Producer: ...

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
        retry: Ladder | str | None = None,
        expires: float | str | timedelta | None = None,
        session: Any = None,
    ) -> DelayTask:
        """Runs the processor of `tag` with `body`, `delay` seconds (or a timedelta) from now.

        `key` names the task within its tag; while a live task has the key, `on_conflict` says what happens:
        "reject" raises `DuplicateTaskError`, "keep" returns that task, "replace" gives it the new body and time, but
        puts it off no longer than `max_wait` after it was scheduled first.
        `session` is a SQLAlchemy Session or Connection: the row becomes part of its transaction. `priority` is 0
        to 9, higher first. Scheduling again with the same `id` is harmless. `retry` is a ladder of its own, `expires`
        how late it may begin; without them those of the tag's processor count.
        """
        new = NewTask(tag, body, delay, None, key, queue, priority, id, retry, expires, max_wait)
        return self.producer.schedule(new, on_conflict, self._unit(session))

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
        retry: Ladder | str | None = None,
        expires: float | str | timedelta | None = None,
        session: Any = None,
    ) -> DelayTask:
        """As `schedule_delay`, at an instant (an aware datetime). The past means now."""
        new = NewTask(tag, body, None, when, key, queue, priority, id, retry, expires, max_wait)
        return self.producer.schedule(new, on_conflict, self._unit(session))

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
        written, for progress and for the ids. Without `session` each lot is a transaction of its own.
        """
        return self.producer.schedule_many(map(_new_task, tasks), on_conflict, self._unit(session), on_batch)

    # -- operate ----------------------------------------------------------------------------------

    def cancel(
        self,
        task: int | str | DelayTask | None = None,
        *,
        tag: str | None = None,
        key: str | None = None,
        version: int | None = None,
        session: Any = None,
    ) -> bool:
        """Cancels a task that waits, named by id or by tag and key. False if it was cancelled already;
        `CancelTooLateError` while it runs, `InvalidStatusError` after that."""
        with self._named(task, tag, key, session) as (id, unit):
            cancelled = self.store.tasks.cancel(id, version, _executor(unit))
        if cancelled is not None:
            self.events.emit("task.cancelled", id=id, tag=cancelled.tag)
            self.producer.disarm_after_commit(cancelled, unit)
        return cancelled is not None

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
        due = self.producer.due_of(delay, when)
        with self._named(task, tag, key, session) as (id, unit):
            moved = self.store.tasks.reschedule(id, due, version, _executor(unit))
        self.events.emit("task.rescheduled", id=id, tag=moved.tag)
        self.producer.arm_after_commit([moved], unit)
        return moved

    def touch(
        self,
        task: int | str | DelayTask | None = None,
        delay: float | timedelta | None = None,
        *,
        tag: str | None = None,
        key: str | None = None,
        session: Any = None,
    ) -> bool:
        """Pushes a timeout away: the task is due `delay` seconds from now, unless it is later already.

        One row update and no message, made for heartbeats. False if the task does not wait any more.
        """
        due, name = self.producer.due_of(delay, None), _name(task, tag, key)
        touches = self.store.touches
        with self._guarded(session) as unit:
            if isinstance(name, int):
                return touches.touch(name, due, _executor(unit))
            return touches.touch_key(*name, due, _executor(unit))

    @overload
    def touch_many(
        self, tasks: Iterable[int | str | DelayTask], delay: float | timedelta, *, session: Any = None
    ) -> list[int]: ...

    @overload
    def touch_many(
        self, *, tag: str, keys: Iterable[str], delay: float | timedelta, session: Any = None
    ) -> list[str]: ...

    def touch_many(
        self,
        tasks: Iterable[int | str | DelayTask] | None = None,
        delay: float | timedelta | None = None,
        *,
        tag: str | None = None,
        keys: Iterable[str] | None = None,
        session: Any = None,
    ) -> list[int] | list[str]:
        """Pushes many timeouts away, and returns those that do not wait any more: ids, or keys if keys were given.

        As `touch`, a few thousand tasks in a statement. What is returned ran, or runs, or never was, which is no
        error: schedule it anew.
        """
        due, store = self.producer.due_of(delay, None), self.store.touches
        if (tasks is None) == (keys is None) or (tag is None) != (keys is None):
            raise InvalidScheduleError("give touch_many the tasks, or tag= and keys=")
        names: list[Any] = [_id(task) for task in _list(tasks)] if keys is None else [*map(check_key, _list(keys))]
        with self._guarded(session) as unit:
            on = _executor(unit)
            ids = {id: id for id in names} if keys is None else store.ids_of_keys(check_tag(tag), names, on)
            waiting = store.touch_many(ids.values(), due, on)
        return [name for name in dict.fromkeys(names) if ids.get(name) not in waiting]

    def retry(
        self,
        task: int | str | DelayTask | None = None,
        delay: float | timedelta = 0,
        *,
        version: int | None = None,
        session: Any = None,
    ) -> DelayTask:
        """Runs a FAILED or CANCELLED task again, `delay` seconds from now; attempts are counted anew."""
        due = self.producer.due_of(delay, None)
        with self._named(task, None, None, session) as (id, unit):
            moved = self.store.tasks.retry(id, due, version, _executor(unit))
        self.events.emit("task.retried", id=id, tag=moved.tag)
        self.producer.arm_after_commit([moved], unit)
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
        with self._named(task, tag, key, session) as (id, unit):
            found = self.store.tasks.get(id, _executor(unit))
        if found is None:
            raise TaskNotFoundError(f"there is no task {id}", id)
        return found

    def attempts(self, task: int | str | DelayTask, *, session: Any = None) -> list[Attempt]:
        """The failed attempts of a task, the last 50 of them: when, how long, where, and why."""
        with self._named(task, None, None, session) as (id, unit):
            return self.store.tasks.attempts(id, _executor(unit))

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
        session: Any = None,
    ) -> Page:
        """Tasks by tag, status, key and due time (since ≤ expected_time < until), in the order of their due times.

        `page.cursor` gets the next page, and is None at the end.
        """
        if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= PAGE_MAX:
            raise InvalidQueryError(f"limit is an integer from 1 to {PAGE_MAX}, not {shown(limit)}")
        by = (
            None if tag is None else check_tag(tag),
            None if status is None else _status(status),
            None if key is None else check_key(key),
            None if since is None else check_instant(since),
            None if until is None else check_instant(until),
        )
        with self._guarded(session) as unit:
            return self.store.tasks.find(*by, cursor, limit, _executor(unit))

    # -- inside -----------------------------------------------------------------------------------

    def _unit(self, session: Any) -> Unit | None:
        return self.ambient_unit() if session is None else unit_of(session)

    @contextmanager
    def _guarded(self, session: Any) -> Iterator[Unit | None]:
        """The transaction that a call is part of."""
        unit = self._unit(session)
        with unit.guard() if unit is not None else nullcontext():
            yield unit

    @contextmanager
    def _named(self, task: Any, tag: str | None, key: str | None, session: Any) -> Iterator[tuple[int, Unit | None]]:
        """The id of the task that a call names, and the transaction that the call is part of."""
        name = _name(task, tag, key)
        with self._guarded(session) as unit:
            if isinstance(name, int):
                yield name, unit
                return
            id = self.store.tasks.id_of_key(*name, _executor(unit))
            if id is None:
                raise TaskNotFoundError(f"no live task of tag {shown(tag)} has the key {shown(key)}")
            yield id, unit


def _name(task: Any, tag: str | None, key: str | None) -> int | tuple[str, str]:
    """Of a task: its id, or its tag and key."""
    if (task is None) == (key is None) or (key is not None and tag is None):
        raise InvalidScheduleError("name the task by its id, or by tag= and key=")
    return (check_tag(tag), check_key(key)) if task is None else _id(task)


def _id(task: Any) -> int:
    return task.id if isinstance(task, DelayTask) else check_id(task)


def _list(items: Any) -> Iterable[Any]:
    if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
        raise InvalidScheduleError(f"touch_many takes a list of tasks or of keys, not {shown(items)}")
    return items


def _executor(unit: Unit | None) -> Any:
    return None if unit is None else unit.executor


def _new_task(item: Any) -> NewTask:
    if isinstance(item, NewTask):
        return item
    if isinstance(item, tuple) and len(item) == 3:
        tag, body, at = item
        return NewTask(tag, body, when=at) if isinstance(at, datetime) else NewTask(tag, body, at)
    raise InvalidScheduleError(f"schedule_many takes NewTask, or (tag, body, delay or instant), not {shown(item)}")


def _status(status: Status | str) -> Status:
    try:
        if isinstance(status, str):
            return Status[status.upper()]
        if isinstance(status, int) and not isinstance(status, bool):
            return Status(status)
    except (KeyError, ValueError):
        pass  # said below
    raise InvalidQueryError(f"status is one of {', '.join(s.name for s in Status)}, not {shown(status)}")
