"""The producers of a run: they schedule at a rate, in all ways, and record the answers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from sqlalchemy import create_engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from chaos.history import Answer, Call, CallRecord, Notebook
from chaos.load_thread import LoadThread
from chaos.project import RETRY_SCHEDULE, now_us
from chaos.system import SystemUnderTest
from delaytasks import DelayedTask, NewTask
from delaytasks.model.clock import to_us
from delaytasks.model.errors import DelayTaskError, OutcomeUnknownError
from delaytasks.runtime import runtime_of

PRODUCERS = 3
#: The number of calls of each way in 100 calls. "alone" uses a transaction of the store, the next
#: two use a transaction of the producer.
WAYS = {"alone": 78, "committed": 15, "rolled back": 5, "many": 2}
MANY = 10
#: The number of calls in 100 that are followed by a second call for the same task.
SECOND_CALLS = {"cancel": 3, "reschedule": 3}
#: How often a producer repeats a call whose answer was lost.
AGAIN = 5
#: The maximum load, in processor seconds per second. The two workers have four processes, and half
#: of them may be dead.
LOAD = 0.8


#: The tolerance for tasks whose answer was lost: clocks are measured less precisely over slow
#: connections.
ABOUT_US = 1_000_000


class Wanted(NamedTuple):
    id: int
    tag: str
    body: dict[str, Any]
    delay: float
    #: The number of runs that the retry schedule allows.
    runs: int


class RolledBackError(Exception):
    """Raised by the producer to roll its own transaction back."""


class ChaosProducer:
    """Schedule `tasks` tasks, or stop earlier if asked to."""

    def __init__(self, system: SystemUnderTest, seed: int, tasks: int, rate: float) -> None:
        self._system, self._chance, self._tasks, self._rate = (
            system,
            random.Random(seed),
            tasks,
            rate,
        )
        self._delays = system.deployment.producer(system.producers_url)
        # An application has its own engine. A connection is not kept for longer than a transaction.
        self._engine = create_engine(
            runtime_of(self._delays).store.database.url, pool_pre_ping=True
        )
        self._notes = Notebook(system.notes)
        self.count = 0
        self.is_running = True
        self.thread = LoadThread(f"producer {seed}", self._run)

    def stop(self) -> None:
        self.is_running = False
        self.thread.stop(30)
        self._delays.close()
        self._engine.dispose()

    def _run(self) -> None:
        began = time.monotonic()
        is_over = self._system.is_over  # an interrupted run removes the files
        while self.is_running and not is_over.is_set() and self.count < self._tasks:
            self._one()
            ahead_s = began + self.count / self._rate - time.monotonic()
            if ahead_s > 0:
                self._system.pause(ahead_s)

    def _one(self) -> None:
        [way] = self._chance.choices(list(WAYS), list(WAYS.values()))
        wanted = [self._wanted() for _ in range(MANY if way == "many" else 1)]
        self.count += len(wanted)
        asks = {"committed": self._committed, "rolled back": self._rolled_back, "many": self._many}
        answer = self._call(wanted, asks.get(way, self._alone))
        for _ in range(AGAIN):
            if answer != "unknown" or not self.is_running:
                break
            self._system.pause(0.5)
            # A refusal of the repeated call does not show whether the first one succeeded.
            again = self._call(wanted, self._many if way == "many" else self._alone)
            answer = "ok" if again == "ok" else "unknown"
        if answer == "ok":
            self._second(wanted[0])

    def burst(self, tasks: int) -> None:
        """Schedule slow tasks that are due immediately, enough work for several processes."""
        for _ in range(tasks):
            body = {"folder": str(self._system.notes), "s": 0.1, "fails": 0}
            self._call([Wanted(self._delays.new_id(), "chaos.note", body, 1.0, 1)], self._alone)

    def _wanted(self) -> Wanted:
        chance = self._chance
        delay = chance.choice([0, chance.uniform(0, 2), chance.uniform(0, 15)])
        often = min(0.2, LOAD / PRODUCERS / self._rate / 0.3)  # so that the workers can keep up
        body = {
            "folder": str(self._system.notes),
            "s": chance.choices([0, 0.01, 0.2], [1 - 2 * often, often, often])[0],
            "fails": chance.randrange(3),
        }
        tag, runs = chance.choice(
            [("chaos.note", 1)] * 4 + [("chaos.shaky", len(RETRY_SCHEDULE.retry_delays_s) + 1)]
        )
        return Wanted(self._delays.new_id(), tag, body, delay, runs)

    # -- ways to schedule -------------------------------------------------------------------------

    def _alone(self, wanted: list[Wanted]) -> list[DelayedTask]:
        return [self._delays.schedule_delay(w.tag, w.body, w.delay, id=w.id) for w in wanted]

    def _many(self, wanted: list[Wanted]) -> list[DelayedTask]:
        self._delays.schedule_many([NewTask(w.tag, w.body, w.delay, id=w.id) for w in wanted])
        return []

    def _committed(self, wanted: list[Wanted]) -> list[DelayedTask]:
        return self._in_own_transaction(wanted, is_committed=True)

    def _rolled_back(self, wanted: list[Wanted]) -> list[DelayedTask]:
        return self._in_own_transaction(wanted, is_committed=False)

    def _in_own_transaction(self, wanted: list[Wanted], is_committed: bool) -> list[DelayedTask]:
        """Schedule in the producer's own transaction, as an application does that writes its own
        rows.
        """
        [w] = wanted
        session = Session(self._engine)
        try:
            task = self._delays.schedule_delay(w.tag, w.body, w.delay, id=w.id, session=session)
            if not is_committed:
                raise RolledBackError
            try:
                session.commit()
            except SQLAlchemyError as error:
                raise OutcomeUnknownError(str(error), w.id) from error
            return [task]
        finally:
            try:
                session.close()
            except SQLAlchemyError:
                pass  # the connection broke, so the answer stays unknown

    # -- calls and answers ------------------------------------------------------------------------

    def _second(self, wanted: Wanted) -> None:
        """Cancel or reschedule the task. The answer may be lost, and the call is not repeated."""
        roll, id, delays = self._chance.randrange(100), wanted.id, self._delays
        if roll < SECOND_CALLS["cancel"]:
            self._ask("cancel", [wanted], lambda: [] if delays.cancel(id) else None)
        elif roll < sum(SECOND_CALLS.values()):
            delay = self._chance.uniform(0, 5)
            self._ask(
                "reschedule", [wanted._replace(delay=delay)], lambda: [delays.reschedule(id, delay)]
            )

    def _call(
        self, wanted: list[Wanted], ask: Callable[[list[Wanted]], list[DelayedTask]]
    ) -> Answer:
        return self._ask("schedule", wanted, lambda: ask(wanted))

    def _ask(
        self, call: Call, wanted: list[Wanted], ask: Callable[[], Iterable[DelayedTask] | None]
    ) -> Answer:
        answer: Answer = "ok"
        dues: dict[int, int] = {}
        asked_us = now_us()
        try:
            reply = ask()
            if reply is None:  # it is cancelled already
                answer = "failed"
            # A call that is repeated after a lost answer returns the row as it is now. The task may
            # have run meanwhile and be due again.
            dues = {
                task.id: to_us(task.expected_time)
                for task in reply or ()
                if call != "schedule" or task.version == 0
            }
        except OutcomeUnknownError:
            answer = "unknown"
        except (DelayTaskError, RolledBackError, SQLAlchemyError):
            answer = "failed"
        for w in wanted:
            due_us = (
                None
                if call == "cancel"
                else dues.get(w.id, asked_us + int(w.delay * 1e6) - ABOUT_US)
            )
            self._notes.note(CallRecord(w.id, call, answer, asked_us, now_us(), due_us, w.runs))
        return answer
