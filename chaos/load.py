"""The load of a run: producers of tasks and of durable Celery tasks, and recurring schedules."""

from __future__ import annotations

import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from queue import Queue
from typing import Any, TypeVar

from chaos.calls import CELERY_TASK, RECURRING, Caller, body
from chaos.history import Notebook, Recurs
from chaos.system import ChaosSystem
from delaytasks import DelayTasks, NewTask
from delaytasks.model.clock import to_us
from delaytasks.model.errors import DelayTaskError
from delaytasks.runtime import runtime_of

T = TypeVar("T")
PRODUCERS = 3
#: The number of calls of each way in 100 calls. "committed" and "rolled back" use a transaction of
#: the producer.
WAYS = {"alone": 78, "committed": 15, "rolled back": 5, "many": 2}
CELERY_WAYS = {"countdown": 50, "eta": 20, "committed": 20, "rolled back": 10}
MANY = 10
#: The share of tasks that are cancelled, that are rescheduled, and of Celery tasks that are
#: revoked.
CANCELLED, RESCHEDULED, REVOKED = 0.03, 0.03, 0.2
#: How often a producer repeats a call whose answer was lost.
REPEATS = 5
#: The maximum load, in processor seconds per second. The two workers have four processes, and half
#: of them may be dead.
LOAD = 0.8
#: The threads that revoke. A call to the workers takes long while the broker is away.
REVOKERS = 4
#: The reads of a database that is starting again are repeated this often, each second.
TRIES = 60
#: A schedule whose tasks must not overlap is behind until the next sweep.
BEHIND_US = 5_000_000
#: The schedule that calls a Celery task.
OF_CELERY = "a Celery task, each 2 s"


class Producer:
    """A thread that makes `tasks` tasks at a rate, or stops earlier if asked to.

    An error there, or a call that hangs, fails the run instead of reducing the load silently.
    """

    def __init__(self, system: ChaosSystem, seed: int, tasks: int, rate: float) -> None:
        self._system, self._tasks, self._rate = system, tasks, rate
        delays = system.deployment.producer(system.producers_url)
        self.chance = random.Random(f"{type(self).__name__} {seed}")
        self.caller = Caller(delays, Notebook(system.notes), self.chance, pause=system.pause)
        self.count = 0
        self.is_running = True
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait until all tasks are made, at most for `seconds`."""
        self._thread.join(seconds)

    def stop(self) -> None:
        """Stop after the current call."""
        self.is_running = False
        self.wait(60)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            frame = sys._current_frames()[self._thread.ident or 0]
            stack = "".join(traceback.format_stack(frame))
            raise AssertionError(f"a producer hangs in a call:\n{stack}")
        self.caller.close()

    def _run(self) -> None:
        began = time.monotonic()
        try:
            while self.count < self._tasks and self.is_running:
                if self._system.is_over.is_set():  # an interrupted run removes the files
                    return
                self.count += self.make()
                ahead_s = began + self.count / self._rate - time.monotonic()
                self._system.pause(max(ahead_s, 0))
        except BaseException as error:
            self._error = error

    def make(self) -> int:
        """Make one call, and return the number of its tasks."""
        chance, caller = self.chance, self.caller
        [way] = chance.choices(list(WAYS), list(WAYS.values()))
        new = [self._new() for _ in range(MANY if way == "many" else 1)]
        if caller.schedule(new, way, REPEATS) == "ok" and (id := new[0].id) is not None:
            # The answer to the second call may be lost, and the call is not repeated.
            drawn = chance.random()
            if drawn < CANCELLED:
                caller.cancel(id)
            elif drawn < CANCELLED + RESCHEDULED:
                caller.reschedule(id, chance.uniform(0, 5))
        return len(new)

    def burst(self, tasks: int) -> None:
        """Schedule slow tasks that are due immediately, enough work for several processes."""
        for _ in range(tasks):
            id = self.caller.delays.new_id()
            self.caller.schedule([NewTask("note", body(0.1), 1.0, id=id)])

    def _new(self) -> NewTask:
        chance = self.chance
        delay = chance.choice([0, chance.uniform(0, 2), chance.uniform(0, 15)])
        often = min(0.2, LOAD / PRODUCERS / self._rate / 0.3)  # so that the workers can keep up
        [seconds] = chance.choices([0, 0.01, 0.2], [1 - 2 * often, often, often])
        is_shaky = chance.random() < 0.2
        task_body = body(seconds, chance.randint(0, 3) if is_shaky else 0)
        id = self.caller.delays.new_id()
        return NewTask("shaky" if is_shaky else "note", task_body, delay, id=id)


class CeleryProducer(Producer):
    """Makes durable Celery tasks, and revokes some of them after a while."""

    def __init__(self, system: ChaosSystem, seed: int, tasks: int, rate: float) -> None:
        #: The calls to revoke now. A revoke waits while the broker is away, without a limit if the
        #: run was terminated, so the process does not wait for these threads at its end.
        self._to_revoke = Queue[int]()
        self._later = list[int]()
        super().__init__(system, seed, tasks, rate)
        for _ in range(REVOKERS):
            threading.Thread(target=self._revoke_each, daemon=True).start()

    def make(self) -> int:
        chance = self.chance
        [way] = chance.choices(list(CELERY_WAYS), list(CELERY_WAYS.values()))
        delay = chance.choice([0.1, chance.uniform(0.1, 3), chance.uniform(1, 15)])
        number, answer = self.caller.call_celery_task(delay, way)
        if answer == "ok":
            self._later.append(number)
        if self._later and chance.random() < REVOKED:
            self._to_revoke.put(self._later.pop(chance.randrange(len(self._later))))
        return 1

    def _revoke_each(self) -> None:
        while True:
            number = self._to_revoke.get()
            if not self.is_running:
                return
            self.caller.revoke(number)


def published_by_a_worker() -> None: ...


def schedules() -> list[Recurs]:
    """Return the schedules of a run, which have yet to be defined."""
    s = 1_000_000
    return [
        *(Recurs(f"each {n} s", n * s) for n in (1, 2, 5)),
        Recurs("the latest of each 2 s", 2 * s, missed="latest"),
        Recurs("one at a time, each 2 s", 2 * s, missed="latest", overlap="skip", takes_s=0.3),
        Recurs(OF_CELERY, 2 * s),
    ]


class RecurringLoad:
    """Recurring schedules. Each occurrence counts as a call that was acknowledged.

    They recur from the beginning of the run until its last fault is over.
    """

    def __init__(
        self, delays: DelayTasks, schedules: Sequence[Recurs], pause: Callable[[float], object]
    ) -> None:
        self._delays, self._pause = delays, pause
        self.schedules = schedules
        for each in schedules:
            self._start(each)

    def stop(self) -> None:
        """Make no more tasks, and cancel the tasks that wait for later occurrences."""
        for each in self.schedules:
            until_us = self._handled_until_us(each.name)
            each.last_us = until_us - (until_us - each.first_us) % each.interval_us
            self._retried(partial(self._delays.recurring.pause, each.name))

    def _start(self, each: Recurs) -> None:
        task: Any = RECURRING
        task_body: Any = body(each.takes_s)
        if each.name == OF_CELERY:
            app = runtime_of(self._delays).celery
            task, task_body = app.task(name=CELERY_TASK)(published_by_a_worker), None
        schedule = self._delays.recurring.set(
            each.name,
            task,
            task_body,
            every=each.interval_us / 1e6,
            missed=each.missed,
            overlap=each.overlap,
        )
        assert schedule.start_at is not None
        each.first_us = to_us(schedule.start_at) + each.interval_us

    def _handled_until_us(self, name: str) -> int:
        """Return the time until which sweeps have handled the occurrences, if it is recent.

        Otherwise return the present: the checker misses the occurrences of a schedule that stays
        behind.
        """
        for _ in range(TRIES):
            now_us = to_us(self._retried(runtime_of(self._delays).store.tasks.now))
            next_at = self._retried(partial(self._delays.recurring.get, name)).next_at
            if next_at is None:
                break
            if to_us(next_at) >= now_us - BEHIND_US:
                return min(now_us, to_us(next_at) - 1)
            self._pause(1)
        return now_us

    def _retried(self, call: Callable[[], T]) -> T:
        for _ in range(TRIES):
            try:
                return call()
            except DelayTaskError:
                self._pause(1)
        return call()
