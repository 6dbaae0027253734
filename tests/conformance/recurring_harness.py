"""Recurring schedules on a database, with sweeps at times that the test sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import update

from delaytasks import DelayedTask, DelayTasks, Status
from delaytasks.core.events import Events
from delaytasks.recurrence.creation import Creation, RecurringTable
from delaytasks.recurrence.recurring import Recurring
from delaytasks.runtime import runtime_of
from delaytasks.storage.store import Store
from tests.recording import ManualClock, delays_on, record
from tests.world.broker import RecordingTimer


class RecurringHarness:
    """A process that defines schedules, and a sweeper with a clock of its own."""

    def __init__(self, url: str, store: Store, **settings: Any) -> None:
        self.store = store
        self.delays: DelayTasks = delays_on(url, table_prefix="s_", **settings)
        self.recurring: Recurring = self.delays.recurring
        self.timer = record(self.delays)
        self.clock = ManualClock(store.tasks.now().replace(microsecond=0))
        self.events = Events()
        self.armed = RecordingTimer()
        self.start = self.clock.now()

    def creation(self) -> Creation:
        runtime = runtime_of(self.delays)
        table = RecurringTable(self.store.database, self.store.schema)
        return Creation(
            self.delays.settings, table, runtime.new_id, self.clock, self.armed, self.events
        )

    def sweep(self, at_s: float, on_step: Callable[[], None] = lambda: None) -> None:
        """Make the tasks that a sweep makes at this time after the start of the test."""
        self.clock.advance((self.start - self.clock.now()).total_seconds() + at_s)
        self.creation().create(on_step)

    def tasks(self, tag: str = "report") -> list[DelayedTask]:
        return list(self.delays.find(tag=tag, limit=1000).tasks)

    def due_s(self, tag: str = "report") -> list[float]:
        """Return the due times of all tasks in seconds after the start of the test."""
        return [(task.expected_time - self.start).total_seconds() for task in self.tasks(tag)]

    def statuses(self) -> list[str]:
        return [task.status.name for task in self.tasks()]

    def finish(self, tasks: Sequence[DelayedTask]) -> None:
        """Settle tasks as a worker does, which also frees their keys."""
        t, k = self.store.schema.tasks, self.store.schema.keys
        with self.store.database.begin() as connection:
            ids = [task.id for task in tasks]
            connection.execute(update(t).where(t.c.id.in_(ids)).values(status=int(Status.DONE)))
            connection.execute(k.delete().where(k.c.task_id.in_(ids)))

    def at(self, seconds: float) -> datetime:
        return self.start + timedelta(seconds=seconds)

    def close(self) -> None:
        self.delays.close()
