"""Durable Celery tasks in a play: the real processor publishes their rows to a simulated broker."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from chaos.celery_messages import MOST_RUNS
from chaos.history import Answer, CallRecord, DeliveryRecord, Fault, PublishRecord
from chaos.simulation.stage import Play
from delaytasks.broker.link import OutageError, Outgoing, Results
from delaytasks.db.producer import Producer
from delaytasks.durable_eta.messages import CeleryTasks, StoredMessage, new_task
from delaytasks.events import Events
from delaytasks.model.clock import to_us
from delaytasks.model.errors import DelayTaskError, OutcomeUnknownError, TaskStateError
from delaytasks.model.inputs import ANY_CELERY_TASK

#: The share of plays with durable Celery tasks, how many these have at most, and how many of these
#: in 100 are revoked.
SHARE, MOST_TASKS, REVOKED = 0.15, 4, 40
#: The share of messages whose confirmation is lost, in addition to those during an outage.
UNCONFIRMED = 0.1
UNKNOWN: Answer = "unknown"


class SimulatedLink:
    """Replaces `BrokerLink`. The broker delivers each message that it gets."""

    def __init__(self, play: Play) -> None:
        self._play = play

    def publish(self, messages: Sequence[Outgoing]) -> Results:
        play, results = self._play, list[Exception | None]()
        for message in messages:
            play.hazards.pass_by("publish", "before")
            play.world.step()
            if not play.broker.is_up:
                results.append(OutageError("the broker is away"))
                continue
            id, now_us = int(message.options["headers"]["id"]), play.times.now_us
            play.history.publications.append(PublishRecord(id, now_us))
            play.history.deliveries.append(DeliveryRecord(id, now_us))
            play.hazards.pass_by("publish", "after")
            is_lost = play.chance.random() < UNCONFIRMED
            if is_lost:
                lost_us = play.times.database_us
                play.history.faults.append(Fault("lost confirmation", "broker", lost_us, lost_us))
            results.append(OutageError("the answer is lost") if is_lost else None)
        return results


def register(play: Play) -> None:
    """Let the workers of a play publish the messages of rows, as those of a Celery app do."""
    runtime: Any = SimpleNamespace(
        celery=None,
        settings=play.settings,
        transactions=None,
        clock=None,
        events=Events(),
        confirming_links=SimulatedLink(play),
    )
    tasks = CeleryTasks(runtime)
    play.registry.processor(ANY_CELERY_TASK, batch=10)(tasks.publish)


class CeleryCalls:
    """The calls of durable Celery tasks, of which each has the id of its row."""

    def __init__(self, play: Play, producer: Producer) -> None:
        self._play, self._producer = play, producer
        # With a sequence of its own, so that the other draws of a seed do not depend on it.
        self._chance = random.Random(f"Celery tasks {play.seed}")

    def make(self) -> None:
        if self._chance.random() >= SHARE:
            return
        for _ in range(self._chance.randint(1, MOST_TASKS)):
            self._play.world.pause(self._chance.uniform(0, 2))
            delay = self._chance.uniform(0, 8)
            id = self._call(delay)
            if self._chance.randrange(100) < REVOKED:  # mostly when the row is about to be due
                self._play.world.pause(delay * self._chance.choice([0.3, 1, 1]))
                self._revoke(id)

    def _call(self, delay: float) -> int:
        id = self._play.new_id()
        message = StoredMessage(
            "[]", "application/json", "utf-8", {"task": "see", "id": str(id)}, {}, "", "celery"
        )
        new = new_task("see", str(id), message, delay)._replace(id=id)
        asked_us, answer, due_us = self._play.times.now_us, UNKNOWN, None
        try:
            due_us = to_us(self._producer.schedule(new, "take", None).expected_time)
            answer = "ok"
        except OutcomeUnknownError:
            pass
        except DelayTaskError:
            answer = "failed"
        finally:
            now_us = self._play.times.now_us
            self._play.history.call_records.append(
                CallRecord(
                    id, "schedule", answer, asked_us, now_us, due_us, MOST_RUNS, is_celery=True
                )
            )
        return id

    def _revoke(self, id: int) -> None:
        """Cancel the row as `CeleryTasks.revoke` does, if it waits or runs."""
        asked_us, answer = self._play.times.now_us, UNKNOWN
        try:
            for row in self._play.stage.store.tasks.celery_rows([str(id)]):
                self._play.world.step()
                try:
                    self._play.tasks.cancel(row.id, running=True)
                except TaskStateError:
                    pass  # it has ended meanwhile
            answer = "ok"
        except DelayTaskError:
            pass
        finally:
            now_us = self._play.times.now_us
            self._play.history.call_records.append(
                CallRecord(id, "revoke", answer, asked_us, now_us)
            )
