"""The way of a task, part 1: schedule. Check, write the row, and arm it after its commit when it is near."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from delaytasks.core.clock import Clock, to_us
from delaytasks.core.errors import DuplicateTaskError, InvalidScheduleError
from delaytasks.core.events import Events
from delaytasks.core.ids import check_id
from delaytasks.core.inputs import (
    check_delay,
    check_instant,
    check_key,
    check_priority,
    check_queue,
    check_tag,
    encode_body,
)
from delaytasks.core.ports import Entry, OnConflict, TaskStore, Timer, Unit
from delaytasks.core.settings import Settings
from delaytasks.core.task import DelayTask, NewTask
from delaytasks.engine.registry import Registry

#: Producers arm a little beyond the horizon, so that a row committed while a sweep reads falls to one of the two.
SLACK_US = 1_000_000
BULK = 5000
ID_TRIES = 5


class Producer:
    def __init__(
        self,
        settings: Settings,
        store: TaskStore,
        clock: Clock,
        make_id: Callable[[], int],
        timer: Timer,
        registry: Registry,
        events: Events,
    ) -> None:
        self._settings = settings
        self._store = store
        self._clock = clock
        self._make_id = make_id
        self._timer = timer
        self._registry = registry
        self._events = events

    # -- one --------------------------------------------------------------------------------------

    def schedule(self, new: NewTask, on_conflict: OnConflict, unit: Unit | None) -> DelayTask:
        if on_conflict not in ("reject", "keep", "replace"):
            raise InvalidScheduleError(f"on_conflict is 'reject', 'keep' or 'replace', not {on_conflict!r}")
        task = self.build(new)
        with unit.guard() if unit is not None else nullcontext():
            task, is_new = self._write(task, on_conflict, has_own_id=new.id is not None, unit=unit)
        if is_new:
            self._events.emit("task.scheduled", id=task.id, tag=task.tag)
            self.arm_after_commit([task], unit)
        return task

    def build(self, new: NewTask) -> DelayTask:
        """The task that `new` asks for, checked; nothing is written."""
        settings = self._settings
        tag = check_tag(new.tag)
        if settings.strict_tags:
            self._registry.demand(tag)
        if (new.delay is None) == (new.when is None):
            raise InvalidScheduleError("give a delay or an instant (when), one of the two")
        now = self._clock.now()
        if new.when is None:
            delay = check_delay(new.delay, settings.max_delay_s)
            due = now + delay
        else:
            due = check_instant(new.when)
            delay = check_delay(max(due - now, timedelta()), settings.max_delay_s)
        queue = new.queue if new.queue is not None else self._registry.queue_of(tag)
        return DelayTask(
            id=self._make_id() if new.id is None else check_id(new.id),
            tag=tag,
            body_json=encode_body(new.body, settings.max_body_bytes),
            expected_time=due,
            queue=settings.default_queue if queue is None else check_queue(queue),
            priority=check_priority(new.priority),
            key=None if new.key is None else check_key(new.key),
            delay_s=math.ceil(delay.total_seconds()),
            create_time=now,
        )

    def _write(
        self, task: DelayTask, on_conflict: OnConflict, has_own_id: bool, unit: Unit | None
    ) -> tuple[DelayTask, bool]:
        on = None if unit is None else unit.executor
        for _ in range(ID_TRIES):
            try:
                if task.key is not None:
                    return self._store.insert_keyed(task, on_conflict, on)
                if self._store.insert(task, on):
                    return task, True
            except DuplicateTaskError as error:
                if error.id != task.id:
                    raise
            existing = self._store.get(task.id, on)
            if existing is not None and (has_own_id or _is_same(existing, task)):
                # The caller schedules again after an unknown outcome, or our own retry found the first try's row.
                return existing, not has_own_id
            if has_own_id:
                raise DuplicateTaskError(f"there was a task with id {task.id}, and now it is gone", task.id)
            task = replace(task, id=self._make_id())
        raise DuplicateTaskError(f"{ID_TRIES} ids in a row were taken; is another program writing ids?", task.id)

    # -- many -------------------------------------------------------------------------------------

    def schedule_many(
        self,
        items: Iterable[NewTask],
        on_conflict: OnConflict,
        unit: Unit | None,
        on_batch: Callable[[Sequence[DelayTask]], None] | None,
    ) -> int:
        """Rows in bulk, a few thousand at a time, so that memory stays flat. Returns their number."""
        total = 0
        source = iter(items)
        while batch := list(itertools.islice(source, BULK)):
            with unit.guard() if unit is not None else nullcontext():
                written = self._write_batch(batch, on_conflict, unit)
            self._events.emit("task.scheduled", count=len(written))
            self.arm_after_commit(written, unit)
            total += len(written)
            if on_batch is not None:
                on_batch(written)
        return total

    def _write_batch(self, batch: Sequence[NewTask], on_conflict: OnConflict, unit: Unit | None) -> list[DelayTask]:
        on = None if unit is None else unit.executor
        tasks = [self.build(new) for new in batch]
        # Keys and ids of the caller's may exist, each with its own answer; all others go in one statement.
        single = [t for t, new in zip(tasks, batch, strict=True) if new.key is not None or new.id is not None]
        plain = [t for t, new in zip(tasks, batch, strict=True) if new.key is None and new.id is None]
        for _ in range(ID_TRIES):
            if not plain or self._store.insert_many(plain, on):
                break
            plain = [replace(task, id=self._make_id()) for task in plain]
        else:
            raise DuplicateTaskError(f"{ID_TRIES} times ids were taken; is another program writing ids?")
        written = (self._write(t, on_conflict, has_own_id=t.key is None, unit=unit) for t in single)
        return plain + [task for task, is_new in written if is_new]

    # -- arm --------------------------------------------------------------------------------------

    def arm_after_commit(self, tasks: Sequence[DelayTask], unit: Unit | None) -> None:
        if unit is None:
            self.arm(tasks)
        else:
            unit.after_commit(tasks, self.arm)

    def arm(self, tasks: Sequence[DelayTask]) -> None:
        """Hands near tasks to the timer. Its failure is nobody's: the sweep finds the row."""
        horizon = self._settings.horizon_s
        until = math.inf if horizon is None else self._clock.now_us() + horizon * 1e6 + SLACK_US
        near = [entry for entry in (Entry.of(task, to_us) for task in tasks) if entry.due_us <= until]
        if near:
            self._timer.arm(near)

    def due_of(self, delay: Any, when: datetime | None) -> datetime:
        """The instant that a delay or an instant means."""
        if (delay is None) == (when is None):
            raise InvalidScheduleError("give a delay or an instant (when), one of the two")
        if when is not None:
            return check_instant(when)
        return self._clock.now() + check_delay(delay, self._settings.max_delay_s)


def _is_same(existing: DelayTask, task: DelayTask) -> bool:
    return (existing.tag, existing.body_json, existing.create_time) == (task.tag, task.body_json, task.create_time)
