"""The way of a task, part 1: schedule. Check, write the row, and arm it after its commit when it is near."""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from delaytasks.core.clock import Clock, from_us, to_us
from delaytasks.core.errors import (
    DuplicateTaskError,
    InvalidDelayError,
    OutcomeUnknownError,
    StoreUnavailableError,
)
from delaytasks.core.events import Events
from delaytasks.core.inputs import check_delay, check_due, check_instant
from delaytasks.core.interfaces import Entry, Executor, OnConflict, TaskStore, Timer, Transaction
from delaytasks.core.settings import Settings
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask, NewTask
from delaytasks.processors.registry import Registry
from delaytasks.scheduling.queue_routing import QueueRouting
from delaytasks.scheduling.task_builder import TaskBuilder, check_on_conflict

#: Producers arm a little beyond the horizon, so that a row committed while a sweep reads falls to one of the two.
SLACK_US = 1_000_000
#: Nothing due later than so after the horizon is kept for its transaction's commit: if that is later, a sweep finds it.
TRANSACTION_US = 3_600_000_000
#: What is armed just before its commit is due no earlier than so: a worker that looks before the commit finds nothing.
COMMIT_US = 50_000
BULK = 5000
#: Tells workers of a shard's entries at the commit of a transaction.
Tell = Callable[[Sequence[Entry], int, Executor], None]
ID_TRIES = 5


class RowBatch(NamedTuple):
    """What is written together."""

    #: All in one go.
    plain: list[DelayTask]
    #: Their keys may be held, or their ids there, so each has its own answer; and whether the id is the caller's.
    named: list[tuple[DelayTask, bool]]

    @property
    def first(self) -> DelayTask:
        return self.plain[0] if self.plain else self.named[0][0]


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
        shard: int = 0,
        tell: Tell | None = None,
    ) -> None:
        self._settings = settings
        self._store = store
        self._clock = clock
        self._make_id = make_id
        self._timer = timer
        self._events = events
        self._shard = shard
        self._tell = tell
        self._builder = TaskBuilder(settings, make_id, registry, queues, shard)

    # -- one --------------------------------------------------------------------------------------

    def schedule(
        self, new: NewTask, on_conflict: OnConflict, transaction: Transaction | None
    ) -> DelayTask:
        (task,), has_own_id = self.build([new], on_conflict), new.id is not None
        with transaction.guard(task.id) if transaction is not None else nullcontext() as on:
            task, is_new = self._write(task, on_conflict, has_own_id, on)
        if is_new:
            self._events.emit("task.scheduled", id=task.id, tag=task.tag)
        if is_new or (has_own_id and task.status is Status.NOT_COMPLETE):
            # The first call with this id may have got as far as the row.
            self.arm_after_commit([task], transaction)
        return task

    def build(self, asked: Iterable[NewTask], on_conflict: OnConflict) -> list[DelayTask]:
        """The tasks that are asked for, checked; nothing is written."""
        return self._builder.many(asked, on_conflict, self._clock.certain_now())

    def _write(
        self, task: DelayTask, on_conflict: OnConflict, has_own_id: bool, on: Executor | None
    ) -> tuple[DelayTask, bool]:
        """The task that is there afterwards, and whether it is new."""
        for _ in range(ID_TRIES):
            try:
                if task.key is not None:
                    there, is_new = self._store.insert_keyed(task, on_conflict, on)
                    return there, is_new or (there.id == task.id and not has_own_id)
                if self._store.insert(task, on):
                    return task, True
            except DuplicateTaskError as error:
                if error.id != task.id:
                    raise
            existing = self._taken(task.id, on)
            if existing is not None and (has_own_id or _is_same(existing, task)):
                # The caller schedules again after an unknown outcome, or the store's retry found its first try's row.
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
        on_batch: Callable[[Sequence[DelayTask]], None] | None,
    ) -> int:
        """Rows in bulk, a few thousand at a time, so that memory stays flat. Returns their number."""
        check_on_conflict(on_conflict)
        total = 0
        source = iter(items)
        while batch := list(itertools.islice(source, BULK)):
            total += self.schedule_batch(
                self.make_batch(_drained(batch), on_conflict), on_conflict, transaction, on_batch
            )
        return total

    def make_batch(self, asked: Iterable[NewTask], on_conflict: OnConflict) -> RowBatch:
        """The tasks that are asked for, checked; nothing is written."""
        now, named = self._clock.certain_now(), list[NewTask]()

        def others() -> Iterator[NewTask]:
            for new in asked:
                if new.key is None and new.id is None:
                    yield new
                else:
                    named.append(new)

        plain = self._builder.many(others(), on_conflict, now)
        tasks = self._builder.many(named, on_conflict, now)
        return RowBatch(
            plain, [(task, new.id is not None) for task, new in zip(tasks, named, strict=True)]
        )

    def schedule_batch(
        self,
        row_batch: RowBatch,
        on_conflict: OnConflict,
        transaction: Transaction | None,
        on_batch: Callable[[Sequence[DelayTask]], None] | None,
    ) -> int:
        """Writes its tasks together, and arms those that are near."""
        write, id = functools.partial(self._write_batch, row_batch, on_conflict), row_batch.first.id
        with transaction.guard(id) if transaction is not None else nullcontext() as on:
            written = (
                self._store.together(write, id) if on is None and row_batch.named else write(on)
            )
        self._events.emit("task.scheduled", count=len(written))
        self.arm_after_commit(written, transaction)
        if on_batch is not None:
            on_batch(written)
        return len(written)

    def _write_batch(
        self, row_batch: RowBatch, on_conflict: OnConflict, on: Executor | None
    ) -> list[DelayTask]:
        """The new ones of its tasks."""
        plain, there = row_batch.plain, 0
        for _ in range(ID_TRIES):
            if there == len(plain) or self._store.insert_many(plain[there:], on):
                break
            # The store's retry may have found its first try's rows; and where each statement stands alone, those before
            # the one that failed are there. Rows go in order.
            there = bisect_left(plain, True, there, key=lambda task: not self._is_there(task, on))
            # In the row_batch itself: if its transaction is tried again, they are these.
            plain[there:] = [replace(task, id=self._make_id()) for task in plain[there:]]
        else:
            if there < len(plain):
                raise DuplicateTaskError(
                    f"{ID_TRIES} times ids were taken; is another program writing ids?"
                )
        named = [
            self._write(task, on_conflict, has_own_id, on) for task, has_own_id in row_batch.named
        ]
        return [*plain, *(task for task, is_new in named if is_new)]

    def _is_there(self, task: DelayTask, on: Executor | None) -> bool:
        existing = self._taken(task.id, on)
        return existing is not None and _is_same(existing, task)

    def _taken(self, id: int, on: Executor | None) -> DelayTask | None:
        """The row that has an id of ours: it may be a try of the store's, whose answer was lost."""
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
        elif self._tell is not None and not transaction.stands_alone:
            with transaction.guard() as on:
                self._tell([Entry.of(task, to_us) for task in tasks], self._shard, on)
        elif kept := _to_arm(tasks, self._near_until_us(TRANSACTION_US)):
            transaction.after_commit(kept, self.arm)

    def arm(self, tasks: Sequence[DelayTask], is_committed: bool = True) -> None:
        """Hands near tasks to the timer. Its failure is nobody's: the sweep finds the row."""
        until_us = self._near_until_us()
        self._arm(
            [Entry.of(task, to_us) for task in _to_arm(tasks, until_us)], until_us, is_committed
        )

    def arm_entries(self, entries: Sequence[Entry]) -> None:
        self._arm(entries, self._near_until_us())

    def _arm(
        self, entries: Sequence[Entry], until_us: int | None, is_committed: bool = True
    ) -> None:
        near = [entry for entry in entries if until_us is None or entry.due_us <= until_us]
        if not is_committed:
            soonest_us = self._clock.now_us() + COMMIT_US
            near = [entry._replace(due_us=max(entry.due_us, soonest_us)) for entry in near]
        elif any(
            entry.version > 0 for entry in entries
        ):  # else what is armed may be right, after all
            self.disarm_entries([entry for entry in entries if entry.version > 0])
        if near:
            self._timer.arm(near)

    def _near_until_us(self, slack_us: int = SLACK_US) -> int | None:
        """What is due later is the sweep's business; None if nothing is."""
        horizon_s = self._settings.horizon_s
        return None if horizon_s is None else self._clock.now_us() + int(horizon_s * 1e6) + slack_us

    def disarm_entries(self, entries: Sequence[Entry]) -> None:
        """These moved on: what was armed for them before comes out of the timer."""
        self._timer.disarm([entry._replace(version=entry.version - 1) for entry in entries])

    def disarm_after_commit(self, task: DelayTask, transaction: Transaction | None) -> None:
        """The task moved on and waits no more: what was armed for it comes out of the timer."""

        def disarm(tasks: Sequence[DelayTask], is_committed: bool = True) -> None:
            if is_committed:
                self.disarm_entries([Entry.of(task, to_us) for task in tasks])

        if transaction is None:
            disarm([task])
        else:
            transaction.after_commit([task], disarm)

    def due_of(self, delay: Any, when: datetime | None = None) -> datetime:
        """The instant that a delay or an instant means."""
        check_due(delay, when)
        if when is not None:
            return max(check_instant(when), self._clock.certain_now())
        return self._clock.certain_now() + check_delay(delay, self._settings.max_delay_s)

    def shift_of(self, by: Any) -> timedelta:
        """So much later, or earlier."""
        is_earlier = (
            by < timedelta()
            if isinstance(by, timedelta)
            else isinstance(by, (int, float)) and by < 0
        )
        shift = check_delay(-by if is_earlier else by, self._settings.max_delay_s, "a shift")
        if not shift:
            raise InvalidDelayError("a shift is not 0")
        return -shift if is_earlier else shift


def _to_arm(tasks: Sequence[DelayTask], until_us: int | None) -> Sequence[DelayTask]:
    """Without those that are due later, unless they moved and are to be disarmed."""
    if until_us is None:
        return tasks
    until = from_us(until_us)
    return [task for task in tasks if task.expected_time <= until or task.version > 0]


def _drained(items: list[NewTask]) -> Iterator[NewTask]:
    """Lets go of each: the fewer objects live at a time, the less often Python looks through all that there are."""
    items.reverse()
    while items:
        yield items.pop()


def _is_same(existing: DelayTask, task: DelayTask) -> bool:
    return (existing.tag, existing.body_json, existing.create_time) == (
        task.tag,
        task.body_json,
        task.create_time,
    )
