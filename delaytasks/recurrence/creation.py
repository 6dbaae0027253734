"""The stage of the sweep that writes the tasks of recurring schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from delaytasks.core.clock import Clock
from delaytasks.core.events import Events
from delaytasks.core.interfaces import Entry, Timer
from delaytasks.core.settings import Settings
from delaytasks.core.task import DelayTask
from delaytasks.recurrence.occurrences import Plan, due_of, plan
from delaytasks.recurrence.queries import Advance, RecurringTable
from delaytasks.recurrence.schedule import RecurringSchedule, check_readable, task_options

#: Schedules in one transaction, and the tasks after which it takes no further schedule.
BATCH_SCHEDULES, BATCH_TASKS = 2000, 5000
#: When a schedule is due, the tasks of this additional time are made too. A visit for many tasks
#: costs little more than a visit for one.
AHEAD = timedelta(seconds=30)
#: Tasks are armed a little beyond the horizon, as far as the sweep before may have read.
SLACK_S = 1.0


class Visit(NamedTuple):
    """The work of a sweep for one schedule."""

    schedule: RecurringSchedule
    plan: Plan
    #: The occurrences that get a task, and these tasks.
    tasks: Sequence[tuple[datetime, DelayTask]]

    @property
    def advance(self) -> Advance | None:
        """The new values of the schedule; None if nothing has changed."""
        last_at, last = self.tasks[-1] if self.tasks else (None, None)
        if last is None and self.plan.next_at == self.schedule.next_at:
            return None
        return Advance(self.schedule, self.plan.next_at, last_at, None if last is None else last.id)


class Creation:
    """Makes the tasks of the schedules of one database.

    One transaction writes the tasks of a batch of schedules and advances the schedules. Another
    sweeper therefore finds either both or neither. The transaction locks the schedules and changes
    them only at the version that it has read. The key of a task contains the name and the
    occurrence, so that an occurrence cannot have two live tasks even if an operator sets `next_at`
    back.
    """

    def __init__(
        self,
        settings: Settings,
        table: RecurringTable,
        new_id: Callable[[], int],
        clock: Clock,
        timer: Timer,
        events: Events,
    ) -> None:
        self._table = table
        self._new_id = new_id
        self._clock = clock
        self._timer = timer
        self._events = events
        self._ahead = timedelta(seconds=settings.recurring_lead_s) + AHEAD
        self._horizon_s = math.inf if settings.horizon_s is None else settings.horizon_s

    def create(self, on_step: Callable[[], None]) -> None:
        """Make the tasks that are due soon. `on_step` is called after each batch."""
        last: RecurringSchedule | None = None
        while True:
            write = partial(self._write_batch, self._clock.certain_now(), last)
            visits, last = self._table.transaction(write)
            on_step()
            self._report(visits)
            self._arm([task for visit in visits for _, task in visit.tasks])
            if last is None:
                return

    def _write_batch(
        self, now: datetime, after: RecurringSchedule | None, on: Any
    ) -> tuple[Sequence[Visit], RecurringSchedule | None]:
        """Return the visits, and the last schedule that was read; None after the last batch."""
        found = self._table.due(on, now + self._ahead, after, BATCH_SCHEDULES)
        last = found[-1] if len(found) == BATCH_SCHEDULES else None
        alone = [each for each in found if each.overlap == "skip"]
        live = self._table.live(on, [each.last_task_id for each in alone if each.last_task_id])
        visits: list[Visit] = []
        tasks = 0
        for each in found:
            visit = self._visit(each, now, each.last_task_id in live)
            if visit is not None:
                visits.append(visit)
                tasks += len(visit.tasks)
            if tasks >= BATCH_TASKS and each is not found[-1]:
                last = each  # after an outage, each schedule may have many missed occurrences
                break
        visits = self._with_keys(on, visits)
        self._table.write(on, [task for visit in visits for _, task in visit.tasks])
        self._table.advance(on, [advance for visit in visits if (advance := visit.advance)])
        return visits, last

    def _visit(
        self, schedule: RecurringSchedule, now: datetime, is_last_live: bool
    ) -> Visit | None:
        """Plan the work for a schedule. A schedule that cannot be read stops no other one."""
        try:
            check_readable(schedule)
            planned = plan(schedule, now, now + self._ahead, is_last_live)
        except Exception as error:
            self._events.emit("recurring.failed", schedule=schedule.name, error=error)
            return None
        tasks = [
            (at, task_of(schedule, at, due_of(schedule, at), self._new_id(), now))
            for at in planned.times
        ]
        return Visit(schedule, planned, tasks)

    def _with_keys(self, on: Any, visits: list[Visit]) -> list[Visit]:
        """Take the keys of the tasks, and leave out the occurrences that have a live task."""
        tasks = [task for visit in visits for _, task in visit.tasks]
        free = self._table.take_keys(on, tasks)
        if len(free) == len(tasks):
            return visits
        return [
            visit._replace(tasks=[each for each in visit.tasks if each[1].id in free])
            for visit in visits
        ]

    def _report(self, visits: Sequence[Visit]) -> None:
        created = sum(len(visit.tasks) for visit in visits)
        if created:
            self._events.emit("recurring.created", count=created)
        for schedule, planned, _ in visits:
            if planned.has_missed:
                self._events.emit(
                    "recurring.missed",
                    schedule=schedule.name,
                    since=str(schedule.next_at),
                    policy=schedule.missed,
                )
            if planned.has_overlapped:
                self._events.emit(
                    "recurring.overlapped", schedule=schedule.name, at=str(schedule.next_at)
                )

    def _arm(self, tasks: Sequence[DelayTask]) -> None:
        """Arm the tasks that the sweep may have passed. The next sweeps arm all later ones."""
        until_us = self._clock.now_us() + (self._horizon_s + SLACK_S) * 1e6
        near = [entry for entry in map(Entry.of, tasks) if entry.due_us <= until_us]
        if near:
            self._timer.arm(near)


def task_of(
    schedule: RecurringSchedule, at: datetime, due: datetime, id: int, now: datetime
) -> DelayTask:
    """Return a new task of an occurrence, due then or, with jitter, later."""
    headers_json, meta_json = task_options(schedule)
    return DelayTask(
        id=id,
        tag=schedule.tag,
        body_json=schedule.body_json,
        expected_time=due,
        queue=schedule.queue,
        priority=schedule.priority,
        key=schedule.key_of(at),
        delay_s=max(math.ceil((due - now).total_seconds()), 0),
        headers_json=headers_json,
        meta_json=meta_json,
        concurrency_key=schedule.concurrency_key,
        create_time=now,
    )
