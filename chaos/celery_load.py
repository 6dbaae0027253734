"""The durable Celery tasks of a run: calls in all ways, some of which are revoked."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from datetime import timedelta
from queue import Queue
from typing import Any

from celery.result import AsyncResult
from kombu.exceptions import OperationalError
from sqlalchemy import create_engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from chaos.celery_messages import MOST_RUNS, NAME
from chaos.history import Answer, CallRecord, Notebook
from chaos.load_thread import LoadThread
from chaos.producers import ABOUT_US, RolledBackError
from chaos.project import now_us
from chaos.system import SystemUnderTest
from delaytasks.model.clock import from_us
from delaytasks.model.errors import DelayTaskError, OutcomeUnknownError
from delaytasks.runtime import runtime_of

#: The number of calls of each way in 100 calls.
WAYS = {"countdown": 50, "eta": 20, "committed": 20, "rolled back": 10}
#: How many calls in 100 are revoked after a while.
REVOKED = 20
#: The threads that revoke.
REVOKERS = 4


class CeleryLoad:
    """Calls a Celery task `tasks` times, or stops earlier if asked to."""

    def __init__(self, system: SystemUnderTest, seed: int, tasks: int, rate: float) -> None:
        self._system, self._tasks, self._rate = system, tasks, rate
        self._chance = random.Random(f"Celery tasks {seed}")
        self._delays = system.deployment.producer(system.producers_url)
        runtime = runtime_of(self._delays)
        self._app = runtime.celery
        connection = self._app.connection_for_write()
        self._broker_errors = (
            OperationalError,
            *connection.connection_errors,
            *connection.channel_errors,
        )
        self._engine = create_engine(runtime.store.database.url, pool_pre_ping=True)
        self._notes = Notebook(system.notes)
        #: The calls to revoke now. A revoke waits while the broker is away, without a limit if the
        #: run was terminated, so the process does not wait for these threads at its end.
        self._to_revoke: Queue[int] = Queue()
        #: The calls that will be revoked.
        self._later: list[int] = []
        self._is_running = True
        for _ in range(REVOKERS):
            threading.Thread(target=self._revoke_each, daemon=True).start()
        self._thread = LoadThread(f"Celery load {seed}", self._run)

    def stop(self) -> None:
        self._is_running = False
        self._thread.stop(60)
        self._delays.close()
        self._engine.dispose()

    def _run(self) -> None:
        for _ in range(self._tasks):
            if not self._is_running or self._system.is_over.is_set():
                return
            self._call()
            if self._later and self._chance.random() < REVOKED / 100:
                number = self._later.pop(self._chance.randrange(len(self._later)))
                self._to_revoke.put(number)
            self._system.pause(self._chance.uniform(0, 2 / self._rate))

    def _call(self) -> None:
        [way] = self._chance.choices(list(WAYS), list(WAYS.values()))
        number = self._delays.new_id()
        delay = self._chance.choice(
            [0.1, self._chance.uniform(0.1, 3), self._chance.uniform(1, 15)]
        )
        asked_us = now_us()
        due_us = asked_us + int(delay * 1e6) - ABOUT_US

        def ask() -> None:
            if way == "eta":
                eta = from_us(asked_us) + timedelta(seconds=delay)
                self._app.send_task(NAME, task_id=str(number), eta=eta)
            elif way == "countdown":
                self._app.send_task(NAME, task_id=str(number), countdown=delay)
            else:
                self._in_own_transaction(number, delay, way == "committed")

        answer = self._answer(ask)
        self._notes.note(
            CallRecord(
                number, "schedule", answer, asked_us, now_us(), due_us, MOST_RUNS, is_celery=True
            )
        )
        if answer == "ok":
            self._later.append(number)

    def _revoke_each(self) -> None:
        while True:
            number = self._to_revoke.get()
            if not self._is_running:
                return
            self._revoke(number)

    def _revoke(self, number: int) -> None:
        asked_us = now_us()
        # The run may end before the answer.
        self._notes.note(CallRecord(number, "revoke", "unknown", asked_us, asked_us))
        answer = self._answer(AsyncResult(str(number), app=self._app).revoke)
        # If only the message to the workers failed, the row is cancelled nevertheless.
        answer = "unknown" if answer == "failed" else answer
        self._notes.note(CallRecord(number, "revoke", answer, asked_us, now_us()))

    def _in_own_transaction(self, number: int, delay: float, is_committed: bool) -> None:
        session = Session(self._engine)
        try:
            signature: Any = self._app.signature(NAME)
            self._delays.apply_async(
                signature, countdown=delay, task_id=str(number), session=session
            )
            if not is_committed:
                raise RolledBackError
            try:
                session.commit()
            except SQLAlchemyError as error:
                raise OutcomeUnknownError(str(error), number) from error
        finally:
            try:
                session.close()
            except SQLAlchemyError:
                pass  # the connection broke, so the answer stays unknown

    def _answer(self, ask: Callable[[], object]) -> Answer:
        try:
            ask()
        except OutcomeUnknownError:
            return "unknown"
        except (DelayTaskError, RolledBackError, SQLAlchemyError):
            return "failed"
        except self._broker_errors:
            return "unknown"  # a revoke whose broker is away
        return "ok"
