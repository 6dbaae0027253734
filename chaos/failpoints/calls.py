"""The calls of a producer in one episode.

It records each call before it is made, and then its answer.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sqlalchemy.orm import Session

from chaos.celery_messages import MOST_RUNS, NAME
from chaos.failpoints.catalogue import Mix
from chaos.history import Answer, Call, CallRecord
from chaos.project import notebook, now_us
from delaytasks import DelayedTask, DelayTasks
from delaytasks.db import producer
from delaytasks.model.clock import to_us
from delaytasks.model.task import NewTask
from delaytasks.recurring import recurring
from delaytasks.runtime import runtime_of

RETRY_SCHEDULE_RUNS = 3
RECURRING_TAG = "fail.recurring"
#: The interval of recurring schedules, so that each has one occurrence in a run.
RECURS_S = 86_400
#: The horizon of the workers: tasks that are due later are armed by a sweep.
HORIZON_S = 5.0
#: The size of one bulk call, the size of its batches, and the number of bulk calls.
MANY, BATCH_ROWS, MANY_CALLS = 5, 2, 2


class FailpointCalls:
    def __init__(self, delays: DelayTasks, notes: Path, seed: int) -> None:
        self._delays = delays
        self._notes = notebook(str(notes))
        self._folder = str(notes)
        self._chance = random.Random(seed)

    def make(self, mix: Mix) -> None:
        if mix == "overdue backlog":
            when = runtime_of(self._delays).clock.now() + timedelta(seconds=0.3)
            # Nothing is claimed ahead of rows that take more than 0.1 s.
            for _ in range(36):
                self._schedule("fail.note", None, self._chance.uniform(0.02, 0.05), at=when)
            return
        for number in range(self._chance.randint(4, 8)):
            time.sleep(self._chance.uniform(0, 0.05))
            self._calls[mix](number, self._chance.choice([0, self._chance.uniform(0, 0.8)]))

    @cached_property
    def _calls(self) -> dict[Mix, Callable[[int, float], object]]:
        """The next call of each mix, which receives its number and a delay."""
        uniform, schedule = self._chance.uniform, self._schedule

        def soon() -> int:
            return schedule("fail.note", uniform(1, 2))

        return {
            "mixed": lambda _, delay: self._any(delay),
            "keyed": lambda _, delay: schedule("fail.note", delay, key=f"{now_us()}"),
            "in a session": lambda _, delay: self._schedule_in_session(delay),
            "moved": lambda *_: self._move(soon()),
            "many": lambda number, _: self._schedule_many(number, is_in_session=False),
            "many in a session": lambda number, _: self._schedule_many(number, is_in_session=True),
            "cancelled": lambda *_: self._cancel(soon()),
            "retried": lambda _, delay: self._retry(soon(), delay),
            "touched": lambda *_: self._delays.touch(soon(), uniform(0.5, 2.5)),
            "not armed": lambda *_: self._insert(),
            "far": lambda *_: schedule("fail.note", uniform(HORIZON_S - 0.3, HORIZON_S + 0.3)),
            "long": lambda number, delay: (
                self._any(delay) if number else schedule("fail.note", delay, uniform(1, 1.5))
            ),
            "fatal": lambda number, delay: (
                self._any(delay) if number else schedule("fail.fatal", delay)
            ),
            "simultaneous": lambda _, delay: schedule("fail.side", delay, uniform(0.05, 0.3)),
            "queued": lambda *_: self._schedule_waiting(),
            "limited": lambda _, delay: schedule("fail.limited", delay / 4, 0.05),
            "effect": lambda _, delay: schedule("fail.effect", delay),
            "recurring": lambda *_: self._recur(),
            "Celery tasks": lambda _, delay: self._call_celery_task(delay),
            "revoked Celery tasks": lambda *_: self._revoke(self._call_celery_task(uniform(1, 2))),
        }

    def _schedule_waiting(self) -> None:
        """Schedule tasks that are due together, so that some wait in the main process."""
        due = runtime_of(self._delays).clock.now() + timedelta(seconds=0.3)
        for _ in range(4):
            self._schedule("fail.note", None, self._chance.uniform(0.03, 0.06), at=due)

    def _any(self, delay: float) -> None:
        tag = self._chance.choice(["fail.note", "fail.note", "fail.shaky"])
        self._schedule(tag, delay, self._chance.choice([0, 0, 0.03, 0.1]))

    def _schedule(self, tag: str, delay: float | None, seconds: float = 0.0, **options: Any) -> int:
        id = self._delays.new_id()
        body = {"folder": self._folder, "s": seconds, "fails": self._chance.randint(0, 3)}
        runs = RETRY_SCHEDULE_RUNS if tag == "fail.shaky" else 1
        schedule = self._delays.schedule_delay
        self._call(id, "schedule", runs, lambda: schedule(tag, body, delay, id=id, **options))
        return id

    def _insert(self) -> None:
        """Insert a row without arming it, as another program does."""
        id, body = self._delays.new_id(), json.dumps({"folder": self._folder, "s": 0, "fails": 0})
        now = runtime_of(self._delays).clock.now()
        task = DelayedTask(id, "fail.note", body, now, create_time=now)

        def ask() -> DelayedTask:
            runtime_of(self._delays).store.tasks.new.insert(task)
            return task

        self._call(id, "schedule", 1, ask)

    def _schedule_in_session(self, delay: float) -> None:
        id, body = self._delays.new_id(), {"folder": self._folder, "s": 0, "fails": 0}

        def ask() -> Any:
            with Session(runtime_of(self._delays).store.database.tx) as session, session.begin():
                return self._delays.schedule_delay("fail.note", body, delay, id=id, session=session)

        self._call(id, "schedule", 1, ask)

    def _schedule_many(self, number: int, is_in_session: bool) -> None:
        """Schedule in several batches, in the first calls of an episode only.

        The ids are made during the call, and must be recorded even if the call fails.
        """
        if number >= MANY_CALLS:
            return
        asked_us, written = now_us(), list[DelayedTask]()
        body = {"folder": self._folder, "s": 0, "fails": 0}

        def record(tasks: Sequence[DelayedTask], answer: Answer) -> None:
            for task in tasks:
                due_us = to_us(task.expected_time) if answer == "ok" else None
                self._notes.note(
                    CallRecord(task.id, "schedule", answer, asked_us, now_us(), due_us)
                )

        def build(asked: Iterable[NewTask], *options: Any) -> list[DelayedTask]:
            made = build_tasks(asked, *options)
            record(made, "unknown")
            return made

        maker = runtime_of(self._delays).producer
        build_tasks = maker.build
        many = [
            ("fail.note", body, self._chance.choice([0, self._chance.uniform(0, 0.8)]))
            for _ in range(MANY)
        ]
        with patch.object(producer, "BULK", BATCH_ROWS), patch.object(maker, "build", build):
            if is_in_session:
                with (
                    Session(runtime_of(self._delays).store.database.tx) as session,
                    session.begin(),
                ):
                    self._delays.schedule_many(many, session=session, on_batch=written.extend)
                record(written, "ok")
            else:
                self._delays.schedule_many(many, on_batch=lambda tasks: record(tasks, "ok"))

    def _recur(self) -> None:
        """Store a schedule with a single occurrence in the next hour, of which a sweep makes the
        task."""
        time.sleep(self._chance.uniform(0, 0.6))  # so that several sweeps make the tasks
        start = runtime_of(self._delays).clock.now() + timedelta(seconds=self._chance.uniform(1, 2))
        name, body = f"s{now_us()}", {"folder": self._folder, "s": 0, "fails": 0}
        with patch.object(recurring.Change, "with_first_tasks", lambda _, schedule: schedule):
            self._delays.recurring.set(name, RECURRING_TAG, body, every=RECURS_S, start=start)

    def _call_celery_task(self, delay: float) -> int:
        """Call a Celery task, whose id is a number."""
        id, asked_us = self._delays.new_id(), now_us()

        def note(answer: Answer) -> None:
            self._notes.note(
                CallRecord(
                    id, "schedule", answer, asked_us, now_us(), asked_us, MOST_RUNS, is_celery=True
                )
            )

        note("unknown")
        runtime_of(self._delays).celery.send_task(
            NAME, task_id=str(id), countdown=delay + 0.01, durable_eta=True
        )
        note("ok")
        return id

    def _revoke(self, id: int) -> None:
        asked_us = now_us()
        self._notes.note(CallRecord(id, "revoke", "unknown", asked_us, asked_us))
        runtime_of(self._delays).celery.control.revoke(str(id))
        self._notes.note(CallRecord(id, "revoke", "ok", asked_us, now_us()))

    def _cancel(self, id: int) -> None:
        self._call(id, "cancel", 1, lambda: self._cancel_it(id))

    def _cancel_it(self, id: int) -> None:
        if (error := self._delays.cancel(id).error) is not None:
            raise error

    def _retry(self, id: int, delay: float) -> None:
        self._cancel(id)
        self._call(id, "rerun", 1, partial(self._delays.rerun, id, delay))

    def _move(self, id: int) -> None:
        if self._chance.random() < 0.2:
            self._cancel(id)
        else:
            delay = self._chance.uniform(0, 0.5)
            self._call(id, "reschedule", 1, partial(self._delays.reschedule, id, delay))

    def _call(self, id: int, call: Call, runs: int, ask: Callable[[], Any]) -> None:
        asked_us = now_us()
        self._notes.note(CallRecord(id, call, "unknown", asked_us, asked_us, None, runs))
        reply = ask()
        due_us = None if call == "cancel" else to_us(reply.expected_time)
        self._notes.note(CallRecord(id, call, "ok", asked_us, now_us(), due_us, runs))
