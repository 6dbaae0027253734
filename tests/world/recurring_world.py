"""Recurring schedules on a database, with sweeps at times that the test sets."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import update

from delaytasks import DelayedTask, DelayTasks, Status
from delaytasks.db.store import Store
from delaytasks.model.body import Cipher
from delaytasks.recurring import creation, recurring
from delaytasks.recurring.definition import RecurringSchedule
from delaytasks.runtime import runtime_of
from tests.conftest import settings_for
from tests.world.recording import ManualClock
from tests.world.world import World


def follow(delays: DelayTasks) -> None:
    """Let the table follow what the code declares, as a sweep of a worker does."""
    recurring.follow(runtime_of(delays))


class RecurringWorld(World):
    """A process that defines schedules, and a sweeper, with a clock of their own."""

    def __init__(self, url: str, **settings: Any) -> None:
        keys = settings.get("encryption_keys")
        made = settings_for(url, table_prefix="s_", **settings)
        super().__init__(Store(url, made, Cipher(keys) if keys else None), **settings)
        self.recurring = self.delays.recurring
        self.start = self.store.tasks.now().replace(microsecond=0)
        self.clock = self.runtime.clock = ManualClock(self.start)

    def close(self) -> None:
        super().close()
        self.store.close()

    def recur(
        self, every: Any = 20, name: str = "r", tag: str = "report", start: float = 20, **more: Any
    ) -> RecurringSchedule:
        """Define a schedule with its first occurrence `start` seconds after the test's start.

        At the start, it is defined an hour earlier, so that only sweeps make its tasks.
        """
        early_s = 3600 if self.clock.now() == self.start else 0
        self.clock.advance(-early_s)
        made = self.recurring.set(name, tag, every=every, start=self.at(start), **more)
        self.clock.advance(early_s)
        return made

    def sweep_at(self, at_s: float) -> None:
        """Make the tasks that a sweep makes at this time after the start of the test."""
        self.clock.advance((self.at(at_s) - self.clock.now()).total_seconds())
        creation.create(self.runtime)

    def change_schedules(self, **values: Any) -> None:
        """Change columns of all schedules directly, as another program does."""
        self.set_columns("recurring", **values)

    def tasks(self, tag: str = "report") -> list[DelayedTask]:
        return list(self.delays.find(tag=tag, limit=1000).tasks)

    def due_s(self, tag: str = "report") -> list[float]:
        """Return the due times of all tasks in seconds after the start of the test."""
        return [(task.expected_time - self.start).total_seconds() for task in self.tasks(tag)]

    def finish(self, tasks: Sequence[DelayedTask]) -> None:
        """Settle tasks as a worker does, which also frees their keys."""
        t, k = self.store.schema.tasks, self.store.schema.keys
        with self.store.database.begin() as connection:
            ids = [task.id for task in tasks]
            connection.execute(update(t).where(t.c.id.in_(ids)).values(status=int(Status.DONE)))
            connection.execute(k.delete().where(k.c.task_id.in_(ids)))

    def at(self, seconds: float) -> datetime:
        return self.start + timedelta(seconds=seconds)
