"""Schedules tasks: check the input, write the row, and arm the timer if the row is due soon."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from delaytasks.core.clock import Clock, from_us
from delaytasks.core.errors import (
    DuplicateTaskError,
    OutcomeUnknownError,
    StoreUnavailableError,
)
from delaytasks.core.events import Events
from delaytasks.core.filters import batches
from delaytasks.core.inputs import (
    Spread,
    check_delay,
    check_due,
    check_instant,
    check_period,
    check_shift,
)
from delaytasks.core.interfaces import CallerConnection, Entry, TaskStore, Timer, Transaction
from delaytasks.core.settings import Settings
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask, NewTask, OnConflict
from delaytasks.processors.registry import Registry
from delaytasks.scheduling.queue_routing import QueueRouting
from delaytasks.scheduling.task_builder import (
    RowBatch,
    TaskBuilder,
    check_on_conflict,
    popped,
)

#: Producers arm a little beyond the horizon. A row that is committed while a sweep reads is then
#: armed by the producer or found by the sweep.
SLACK_US = 1_000_000
#: A row in a caller's transaction is kept for arming if it is due within the horizon and this time.
#: If the commit comes even later, the sweep finds the row.
TRANSACTION_US = 3_600_000_000
#: A row that is armed just before its commit is due no earlier than this. Otherwise a worker could
#: look for the row before the commit.
COMMIT_US = 50_000
#: Rows in one batch of `schedule_many`.
BULK = 5000
ID_TRIES = 5
#: Notifies workers of entries when a transaction is committed.
Notify = Callable[[Sequence[Entry], CallerConnection], None]
#: Is called with the tasks of each batch that was written.
OnBatch = Callable[[Sequence[DelayTask]], None]


class Producer:
    def __init__(
        self,
        settings: Settings,
        store: TaskStore,
        clock: Clock,
        make_id: Callable[[], int],
        timer: Timer,
        registry: Registry,
        queues: QueueRouting,
        events: Events,
        notify: Notify | None = None,
    ) -> None:
        self._settings = settings
        self._store = store
        self._clock = clock
        self._make_id = make_id
        self._timer = timer
        self._events = events
        self._notify = notify
        self._builder = TaskBuilder(settings, make_id, registry, queues)

    # -- one --------------------------------------------------------------------------------------

    def schedule(
        self, new: NewTask, on_conflict: OnConflict, transaction: Transaction | None
    ) -> DelayTask:
        (task,), has_own_id = self.build([new], on_conflict), new.id is not None
        with transaction.guard(task.id) if transaction is not None else nullcontext() as on:
            is_new = task.key is None and self._store.insert(task, on)
            if not is_new:
                is_id_taken = task.key is None
                task, is_new = self._write(task, on_conflict, has_own_id, on, is_id_taken)
        if is_new:
            self._events.emit("task.scheduled", **task.event_fields)
        if is_new or (has_own_id and task.status is Status.NOT_COMPLETE):
            # An earlier call with this id may have written the row and not have armed it.
            self.arm_after_commit([task], transaction)
        return task

    def build(self, asked: Iterable[NewTask], on_conflict: OnConflict) -> list[DelayTask]:
        """Return the checked tasks; write nothing."""
        return self._builder.many(asked, on_conflict, self._clock.certain_now())

    def _write(
        self,
        task: DelayTask,
        on_conflict: OnConflict,
        has_own_id: bool,
        on: CallerConnection | None,
        is_id_taken: bool = False,
    ) -> tuple[DelayTask, bool]:
        """Return the task that is stored afterwards, and whether it is new."""
        for _ in range(ID_TRIES):
            try:
                if task.key is not None:
                    stored, is_new = self._store.insert_keyed(task, on_conflict, on)
                    return stored, is_new or (stored.id == task.id and not has_own_id)
                if not is_id_taken and self._store.insert(task, on):
                    return task, True
            except DuplicateTaskError as error:
                if error.id != task.id:
                    raise
            is_id_taken = False
            existing = self._existing(task.id, on)
            if existing is not None and (has_own_id or _is_same(existing, task)):
                # The caller repeats a call whose outcome is unknown, or the storage repeated a
                # statement whose answer was lost.
                return existing, not has_own_id
            if has_own_id:
                raise DuplicateTaskError(
                    f"there was a task with id {task.id}, and now it is gone", task.id
                )
            task = replace(task, id=self._make_id())
        raise DuplicateTaskError(
            f"{ID_TRIES} ids in a row were taken; is another program writing ids?", task.id
        )

    # -- many -------------------------------------------------------------------------------------

    def schedule_many(
        self,
        items: Iterable[NewTask],
        on_conflict: OnConflict,
        transaction: Transaction | None,
        on_batch: OnBatch | None,
    ) -> int:
        """Write the tasks in batches of `BULK` and return their number."""
        check_on_conflict(on_conflict)
        total = 0
        for batch in batches(items, BULK):
            rows = self.make_batch(popped(batch), on_conflict)
            total += self.schedule_batch(rows, on_conflict, transaction, on_batch)
        return total

    def make_batch(self, asked: Iterable[NewTask], on_conflict: OnConflict) -> RowBatch:
        """Return the checked tasks; write nothing."""
        return self._builder.batch(asked, on_conflict, self._clock.certain_now())

    def schedule_batch(
        self,
        rows: RowBatch,
        on_conflict: OnConflict,
        transaction: Transaction | None,
        on_batch: OnBatch | None,
    ) -> int:
        """Write the tasks of a batch in one transaction, and arm those that are due soon."""
        write, id = functools.partial(self._write_batch, rows, on_conflict), rows.first.id
        with transaction.guard(id) if transaction is not None else nullcontext() as on:
            written = self._store.together(write, id) if on is None and rows.named else write(on)
        for tag, count in Counter(task.tag for task in written).items():
            self._events.emit("task.scheduled", count=count, tag=tag)
        self.arm_after_commit(written, transaction)
        if on_batch is not None:
            on_batch(written)
        return len(written)

    def _write_batch(
        self, rows: RowBatch, on_conflict: OnConflict, on: CallerConnection | None
    ) -> list[DelayTask]:
        """Write the tasks of a batch and return those that are new."""
        plain, stored = rows.plain, 0
        for _ in range(ID_TRIES):
            if stored == len(plain) or self._store.insert_many(plain[stored:], on):
                break
            # The storage may have repeated a statement whose answer was lost. Where each statement
            # is a transaction, the rows before the failed statement are stored. Rows are written
            # in order.
            stored = bisect_left(plain, True, stored, key=lambda task: not self._is_there(task, on))
            # The new ids go into the batch itself, which counts if the transaction is repeated.
            plain[stored:] = [replace(task, id=self._make_id()) for task in plain[stored:]]
        else:
            if stored < len(plain):
                raise DuplicateTaskError(
                    f"{ID_TRIES} times ids were taken; is another program writing ids?"
                )
        named = [self._write(task, on_conflict, has_own_id, on) for task, has_own_id in rows.named]
        return [*plain, *(task for task, is_new in named if is_new)]

    def _is_there(self, task: DelayTask, on: CallerConnection | None) -> bool:
        existing = self._existing(task.id, on)
        return existing is not None and _is_same(existing, task)

    def _existing(self, id: int, on: CallerConnection | None) -> DelayTask | None:
        """Return the row with an id of ours; an earlier try may have written it."""
        try:
            return self._store.get(id, on)
        except StoreUnavailableError as error:
            raise OutcomeUnknownError(
                f"{error}, and the id {id} is taken: look at task {id}", id
            ) from error

    # -- arm --------------------------------------------------------------------------------------

    def arm_after_commit(self, tasks: Sequence[DelayTask], transaction: Transaction | None) -> None:
        if transaction is None:
            self.arm(tasks)
        elif self._notify is not None and not transaction.stands_alone:
            with transaction.guard() as on:
                self._notify([Entry.of(task) for task in tasks], on)
        elif kept := _to_arm(tasks, self._near_until_us(TRANSACTION_US)):
            transaction.after_commit(kept, self.arm)

    def arm(self, tasks: Sequence[DelayTask], is_committed: bool = True) -> None:
        """Arm the timer for tasks that are due soon. If that fails, the sweep finds the rows."""
        until_us = self._near_until_us()
        entries = [Entry.of(task) for task in _to_arm(tasks, until_us)]
        self._arm(entries, until_us, is_committed)

    def arm_entries(self, entries: Sequence[Entry]) -> None:
        self._arm(entries, self._near_until_us())

    def _arm(
        self, entries: Sequence[Entry], until_us: int | None, is_committed: bool = True
    ) -> None:
        near = [entry for entry in entries if until_us is None or entry.due_us <= until_us]
        if not is_committed:
            soonest_us = self._clock.now_us() + COMMIT_US
            near = [entry._replace(due_us=max(entry.due_us, soonest_us)) for entry in near]
        elif moved := [entry for entry in entries if entry.version > 0]:
            # Only after the commit: before it, the armed entries may still be right.
            self.disarm_entries(moved)
        if near:
            self._timer.arm(near)

    def _near_until_us(self, slack_us: int = SLACK_US) -> int | None:
        """Return the latest due time that a producer arms; None if it arms all tasks."""
        horizon_s = self._settings.horizon_s
        return None if horizon_s is None else self._clock.now_us() + int(horizon_s * 1e6) + slack_us

    def disarm_entries(self, entries: Sequence[Entry]) -> None:
        """Remove the entries of the versions before these from the timer."""
        self._timer.disarm([entry._replace(version=entry.version - 1) for entry in entries])

    def disarm_after_commit(self, task: DelayTask, transaction: Transaction | None) -> None:
        """Remove the entry of a task that no longer waits from the timer."""

        def disarm(tasks: Sequence[DelayTask], is_committed: bool = True) -> None:
            if is_committed:
                self.disarm_entries([Entry.of(task) for task in tasks])

        if transaction is None:
            disarm([task])
        else:
            transaction.after_commit([task], disarm)

    def due_of(self, delay: Any, at: datetime | None = None) -> datetime:
        """Return the due time that a delay or an instant means."""
        check_due(delay, at)
        if at is not None:
            return max(check_instant(at), self._clock.certain_now())
        return self._clock.certain_now() + check_delay(delay, self._settings.max_delay_s)

    def shift_of(self, by: Any) -> timedelta:
        """Return the checked shift of due times; a negative shift means earlier."""
        return check_shift(by, self._settings.max_delay_s)

    def spread_of(self, over: Any) -> Spread:
        """Return the checked period over which due times are distributed."""
        return Spread(check_period(over, self._settings.max_delay_s))


def _to_arm(tasks: Sequence[DelayTask], until_us: int | None) -> Sequence[DelayTask]:
    """Return the tasks that are due until then or have moved, and so need arming or disarming."""
    if until_us is None:
        return tasks
    until = from_us(until_us)
    return [task for task in tasks if task.expected_time <= until or task.version > 0]


def _is_same(existing: DelayTask, task: DelayTask) -> bool:
    return (existing.tag, existing.body_json, existing.create_time) == (
        task.tag,
        task.body_json,
        task.create_time,
    )
