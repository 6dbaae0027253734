"""The calls of simulated producers and their answers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from chaos.history import Answer, Call, CallRecord
from chaos.simulation.celery_messages import CeleryCalls
from chaos.simulation.stage import RETRY_SCHEDULE, Play
from chaos.simulation.world import Dead
from delaytasks import DelayedTask
from delaytasks.db.producer import Producer, QueueRouting
from delaytasks.events import Events
from delaytasks.model.clock import from_us, to_us
from delaytasks.model.errors import DelayTaskError, OutcomeUnknownError
from delaytasks.model.task import NewTask

#: How long a processor takes: mostly a short time, sometimes longer than a lease.
TAKES_S = (0, 0, 0, 0.02, 0.02, 0.3, 0.3, 1, 8)
#: The same for the rows of a backlog, mostly short.
BACKLOG_TAKES_S = (0.01, 0.01, 0.02, 0.02, 0.02, 0.3)
Ask = Callable[[], Any]


class SimulatedCalls:
    """The calls of one producer and their answers."""

    def __init__(self, play: Play) -> None:
        self._play, self._chance = play, play.chance
        clock = play.clock()
        runtime: Any = SimpleNamespace(
            settings=play.settings,
            store=SimpleNamespace(database=play.stage.store.database, tasks=play.tasks),
            clock=clock,
            new_id=play.new_id,
            producer_timer=play.timer(clock, Events()),
            direct_timer=None,
            registry=play.registry,
            queues=QueueRouting(play.settings, play.registry),
            events=Events(),
        )
        self._producer = Producer(runtime)

    def make(self, tasks: int) -> None:
        chance, producer = self._chance, self._producer
        for _ in range(tasks):
            self._play.world.pause(chance.uniform(0, 2))
            id, runs = self._schedule()
            roll = chance.random()
            if roll < 0.1:
                self._call(id, "cancel", runs, lambda id=id: self._cancel(id))  # type: ignore[misc]
            elif roll < 0.25:
                due = producer.due_of(chance.uniform(0, 8))
                self._call(id, "reschedule", runs, lambda id=id, due=due: self._reschedule(id, due))  # type: ignore[misc]
            elif roll < 0.35:
                try:
                    self._play.tasks.touch(id, producer.due_of(chance.uniform(0, 8)))
                except DelayTaskError:
                    pass

    def call_celery_tasks(self) -> None:
        CeleryCalls(self._play, self._producer).make()

    def insert_backlog(self, rows: int, chance: random.Random) -> None:
        """Insert due rows without arming them, as another program does."""
        for _ in range(rows):
            body = {"s": chance.choice(BACKLOG_TAKES_S), "fails": 0, "kills": 0}
            now = from_us(self._play.times.database_us)
            task = DelayedTask(self._play.new_id(), "note", json.dumps(body), now, create_time=now)

            def ask(task: DelayedTask = task) -> DelayedTask:
                self._play.stage.store.tasks.new.insert(task)
                return task

            self._call(task.id, "schedule", 1, ask)

    def probe(self, delay: float) -> int:
        id = self._play.new_id()
        new = NewTask("note", {"s": 0, "fails": 0, "kills": 0}, delay, id=id)
        self._call(id, "schedule", 1, lambda: self._producer.schedule(new, "reject", None))
        return id

    def _schedule(self) -> tuple[int, int]:
        chance = self._chance
        delay = chance.choice([0, chance.uniform(0, 2), chance.uniform(0, 12)])
        body: dict[str, Any] = {"s": chance.choice(TAKES_S), "fails": 0, "kills": 0}
        tag, runs = "note", 1
        drawn = chance.random()
        if drawn < 0.3:
            tag, runs = "shaky", len(RETRY_SCHEDULE.retry_delays_s) + 1
            body["fails"] = chance.randint(0, 3)
        elif drawn < 0.4:
            body["kills"] = chance.choice([1, 2, 9])
        id = self._play.new_id()
        new = NewTask(tag, body, delay, id=id)
        for _ in range(2):
            if (
                self._call(
                    id, "schedule", runs, lambda: self._producer.schedule(new, "reject", None)
                )
                != "unknown"
            ):
                break
        return id, runs

    def _cancel(self, id: int) -> bool:
        return bool(self._play.tasks.cancel(id))

    def _reschedule(self, id: int, due: Any) -> Any:
        moved = self._play.tasks.reschedule(id, due)
        self._producer.arm_after_commit([moved], None)
        return moved

    def _call(self, id: int, call: Call, runs: int, ask: Ask) -> Answer:
        asked_us = self._play.times.now_us
        answer: Answer = "ok"
        due_us = None
        try:
            reply = ask()
            if reply is False:
                answer = "failed"
            elif call != "cancel":
                due_us = to_us(reply.expected_time)
        except (OutcomeUnknownError, Dead) as error:
            answer = "unknown"
            if isinstance(error, Dead):
                raise
        except DelayTaskError:
            answer = "failed"
        finally:
            self._play.history.call_records.append(
                CallRecord(id, call, answer, asked_us, self._play.times.now_us, due_us, runs)
            )
        return answer
