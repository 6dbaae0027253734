"""A deployment of a run's own: servers, two workers, two beats, and producers that write down what they are told."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from chaos.history import Answer, Call, Notebook, Told
from chaos.project import LADDER, now_us
from chaos.recorder import Recorder
from delaytasks.core.clock import to_us
from delaytasks.core.errors import DelayTaskError, OutcomeUnknownError
from delaytasks.core.states import LIVE
from tests.postgres_server import PostgresServer
from tests.redis_server import RedisServer
from tests.running import Deployment, Process
from tests.services import free_port

#: Leases and sweeps are short, so that a run takes minutes.
SETTINGS: dict[str, Any] = {
    "lease_s": 4, "sweep_s": 1, "self_sweep_s": 2, "grace_s": 0.5, "horizon_s": 10, "timer": "eta",
}  # fmt: skip
PRODUCERS = 3
#: Of a hundred calls, how many are followed by a second one about the same task.
SECOND_CALLS = {"cancel": 3, "reschedule": 3}


class Field:
    def __init__(self, folder: Path, database: str, timer: str) -> None:
        self.notes = folder / "notes"
        self.postgres = None
        if database == "postgresql":
            data = folder / "postgresql"
            data.mkdir()
            self.postgres = PostgresServer(data, free_port())
        self.redis = RedisServer(folder)
        database_url = self.postgres.url if self.postgres else f"sqlite:///{folder / 'chaos.sqlite3'}"
        conf = {"imports": ["chaos.project"]}
        self.deployment = Deployment(folder, database_url, self.redis.url, conf, **{**SETTINGS, "timer": timer})
        self.recorder = Recorder(self.deployment.store)
        self.recorder.start()
        self.workers = [self.new_worker(), self.new_worker()]
        self.beats = [self.deployment.beat(), self.deployment.beat()]

    def new_worker(self) -> Process:
        return self.deployment.worker()

    def close(self) -> None:
        try:
            self.recorder.stop()
            self.deployment.close()
        finally:
            for server in (self.redis, self.postgres):
                if server is not None:
                    server.stop()

    def waiting(self) -> int:
        t = self.deployment.store.schema.tasks
        live = select(func.count()).where(t.c.status.in_([int(status) for status in LIVE]))
        return int(self.deployment.store.database.alone(lambda c: c.execute(live).scalar_one()))


class Producer:
    """Schedules until it is told to stop, at a rate, and writes down each answer."""

    def __init__(self, field: Field, seed: int, rate: float) -> None:
        self._field, self._chance, self._rate = field, random.Random(seed), rate
        self._delays = field.deployment.producer()
        self._notes = Notebook(field.notes)
        self.count = 0
        self.is_running = True
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.is_running = False
        self.thread.join(30)
        self._delays.close()

    def _run(self) -> None:
        began = time.monotonic()
        while self.is_running:
            self._schedule()
            ahead_s = began + self.count / self._rate - time.monotonic()
            if ahead_s > 0:
                time.sleep(ahead_s)

    def _schedule(self) -> None:
        chance, delays = self._chance, self._delays
        delay = chance.choice([0, chance.uniform(0, 2), chance.uniform(0, 15)])
        body = {
            "folder": str(self._field.notes),
            "s": chance.choice([0, 0, 0, 0.01, 0.2]),
            "fails": chance.randrange(3),
        }
        tag, runs = chance.choice([("chaos.note", 1)] * 4 + [("chaos.shaky", len(LADDER.rungs_s) + 1)])
        asked_us = now_us()
        id = delays.new_id()
        due = self._told(id, "schedule", asked_us, runs, lambda: delays.schedule_delay(tag, body, delay, id=id))
        self.count += 1
        if due is None:
            return
        asked_us, roll = now_us(), chance.randrange(100)
        if roll < SECOND_CALLS["cancel"]:
            self._told(id, "cancel", asked_us, runs, lambda: delays.cancel(id))
        elif roll < sum(SECOND_CALLS.values()):
            self._told(id, "reschedule", asked_us, runs, lambda: delays.reschedule(id, chance.uniform(0, 5)))

    def _told(self, id: int, call: Call, asked_us: int, runs: int, ask: Any) -> int | None:
        answer: Answer = "ok"
        due_us = None
        try:
            said = ask()
            if said is False:  # it is cancelled already
                answer = "failed"
            due_us = to_us(said.expected_time) if call != "cancel" else None
        except OutcomeUnknownError:
            answer = "unknown"
        except DelayTaskError:
            answer = "failed"
        self._notes.note(Told(id, call, answer, asked_us, now_us(), due_us, runs))
        return due_us if answer == "ok" else None
