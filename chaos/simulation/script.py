"""What is played: producers, workers that are replaced when they end, a beat, and what breaks them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sqlalchemy import func, select

from chaos.checker import Verdict
from chaos.history import ALL, Answer, Call, Effect, Fault, Told
from chaos.simulation.hazards import ASKS, Act, Trap, leases_of
from chaos.simulation.stage import LADDER, Play, stage
from chaos.simulation.worker import Worker
from chaos.simulation.world import Dead, Host
from delaytasks.core.clock import to_us
from delaytasks.core.errors import DelayTaskError, OutcomeUnknownError
from delaytasks.core.events import Events
from delaytasks.core.states import LIVE
from delaytasks.core.task import NewTask
from delaytasks.engine.producer import Producer
from delaytasks.engine.queues import Queues
from delaytasks.timers.eta import EtaTimer

MOST_WORKERS, MOST_PRODUCERS, MOST_TASKS, MOST_FAULTS = 2, 2, 3, 3
#: After the last fault all must be over by then.
PATIENCE_S = 90.0
#: Hosts whose clocks are wrong are so by an hour.
SKEWS_US = (0, 0, 3_600_000_000, -3_600_000_000)
#: How long a processor takes: mostly little, now and then longer than a lease.
TAKES_S = (0, 0, 0, 0.02, 0.02, 0.3, 0.3, 1, 8)
Ask = Callable[[], Any]


class Script:
    """Of one play. All but producers and workers are on a host that nothing happens to."""

    def __init__(self, play: Play) -> None:
        self._play, self._world, self._chance = play, play.world, play.chance
        self._outside = Host("outside")
        self._open = 0
        self._is_over = False
        self._workers_made = 0

    def run(self) -> None:
        start = self._world.start
        workers = self._chance.randint(1, MOST_WORKERS)
        self._play.workers += [self._new_worker(f"w{number}") for number in range(workers)]
        for number in range(self._chance.randint(1, MOST_PRODUCERS)):
            host = Host(f"producer {number}")
            host.skew_us = self._chance.choice(SKEWS_US)
            self._produce_on(host)
        self._play.broker.on_put = start(self._outside, self._deliver).wake
        for work in (self._beat, self._supervise, self._break, self._watch):
            start(self._outside, work)
        self._world.run(lambda: self._is_over)

    # -- what runs --------------------------------------------------------------------------------

    def _new_worker(self, name: str) -> Worker:
        self._workers_made += 1
        return Worker(self._play, name, self._chance.choice(SKEWS_US))

    def _alive(self) -> list[Worker]:
        return [worker for worker in self._play.workers if not worker.is_dead and not worker.is_stopping]

    def _deliver(self) -> None:
        """Messages, each to one of the workers."""
        broker, times = self._play.broker, self._play.times
        while True:
            workers = self._alive()
            for message in broker.take(times.now_us) if workers else ():
                self._chance.choice(workers).deliver(message)
            next_us = broker.next_us
            self._world.rest(None if next_us is None else max((next_us - times.now_us) / 1e6, 0 if workers else 0.5))

    def _beat(self) -> None:
        while True:
            self._world.pause(self._play.settings.sweep_s)
            workers = self._alive()
            if workers and self._chance.random() < 0.9:
                worker = self._chance.choice(workers)
                worker.soon(lambda worker=worker: worker.desk.sweep(None))  # type: ignore[misc]

    def _supervise(self) -> None:
        workers = self._play.workers
        while True:
            self._world.pause(self._chance.uniform(0.2, 2))
            for number, worker in enumerate(workers):
                if worker.is_stopped:
                    worker.kill()
                if not worker.is_dead:
                    worker.replace_dead()
                else:
                    name = worker.name if self._chance.random() < 0.5 else f"w{self._workers_made}"
                    workers[number] = self._new_worker(name)

    def _watch(self) -> None:
        """Ends the play when all is over, or should be."""
        t, database = self._play.stage.store.schema.tasks, self._play.stage.store.database
        live = select(func.count()).where(t.c.status.in_([int(status) for status in LIVE]))
        while self._open:
            self._world.pause(0.5)
        self._play.hazards.trap = None
        until_us = self._play.times.now_us + PATIENCE_S * 1e6
        while self._play.times.now_us < until_us and database.alone(lambda c: c.execute(live).scalar_one()):
            self._world.pause(1)
        self._is_over = True

    # -- producers --------------------------------------------------------------------------------

    def _produce_on(self, host: Host) -> None:
        self._open += 1

        def work() -> None:
            try:
                Calls(self._play).make(self._chance.randint(1, MOST_TASKS))
            finally:
                self._open -= 1

        self._world.start(host, work)

    # -- what breaks ------------------------------------------------------------------------------

    def _break(self) -> None:
        self._open += 1
        for _ in range(self._chance.randint(0, MOST_FAULTS)):
            self._world.pause(self._chance.uniform(0, 3))
            ways = (
                [self._set_trap] * 6
                + [self._freeze] * 3
                + [self._kill, self._stop, self._set_clock, self._break_broker]
            )
            self._chance.choice([*ways, self._break_database])()
        self._open -= 1

    def _note(
        self, kind: str, target: str, seconds: float = 0, effect: Effect = "none", holders: tuple[str, ...] = ()
    ) -> None:
        now_us = self._play.times.now_us
        fault = Fault(kind, target, now_us, now_us + int(seconds * 1e6), effect, holders)
        self._play.history.faults.append(fault)

    def _set_trap(self) -> None:
        hazards, chance = self._play.hazards, self._chance
        step = chance.choice(sorted(hazards.known) or ["claim"])
        acts: list[Act] = ["kill", "kill", "freeze"]
        if step in ASKS:
            acts.append("fail")
        hazards.trap = Trap(step, chance.choice(["before", "after"]), chance.choice(acts))
        for _ in range(20):
            self._world.pause(0.5)
            if hazards.trap is None:
                return
        hazards.trap = None

    def _some_worker(self) -> Worker:
        return self._chance.choice(self._play.workers)

    def _kill(self) -> None:
        worker = self._some_worker()
        self._note("kill", worker.name, 0, "dead", leases_of(worker))
        worker.kill()

    def _freeze(self) -> None:
        """While it runs something, if it does soon; mostly for longer than a lease."""
        for _ in range(100):
            busy = [w for w in self._alive() if any(child.job is not None for child in w.children)]
            if busy:
                break
            self._world.pause(0.03)
        worker = self._chance.choice(busy or self._play.workers)
        seconds = self._chance.uniform(1, 20)
        self._note("freeze", worker.name, seconds, "away", leases_of(worker))
        self._world.freeze(worker, seconds)

    def _stop(self) -> None:
        workers = self._alive()
        if workers:
            worker = self._chance.choice(workers)
            self._note("stop", worker.name, 0, "ending", leases_of(worker))
            self._world.start(worker, worker.stop)

    def _set_clock(self) -> None:
        worker = self._some_worker()
        worker.skew_us = self._chance.choice(SKEWS_US)
        self._note("clock", worker.name)

    def _break_broker(self) -> None:
        broker, seconds = self._play.broker, self._chance.uniform(0, 5)
        self._note("broker away and empty", "broker", seconds)
        broker.is_up = False
        broker.flush()
        self._world.pause(seconds)
        broker.is_up = True
        for worker in self._alive():
            worker.soon(worker.desk.forget_armed)

    def _break_database(self) -> None:
        seconds = self._chance.uniform(0, 8)
        self._note("database away", "database", seconds, "away", ALL)
        self._play.hazards.away_until_us = self._play.times.now_us + int(seconds * 1e6)


class Calls:
    """What one producer asks for, and what it is told."""

    def __init__(self, play: Play) -> None:
        self._play, self._chance = play, play.chance
        clock = play.clock()
        timer = EtaTimer(play.publisher, clock)
        queues = Queues(play.settings, play.registry)
        self._producer = Producer(play.settings, play.tasks, clock, play.new_id, timer, play.registry, queues, Events())

    def make(self, tasks: int) -> None:
        chance, producer = self._chance, self._producer
        for _ in range(tasks):
            self._play.world.pause(chance.uniform(0, 2))
            id, runs = self._schedule()
            roll = chance.random()
            if roll < 0.1:
                self._told(id, "cancel", runs, lambda id=id: self._cancel(id))  # type: ignore[misc]
            elif roll < 0.25:
                due = producer.due_of(chance.uniform(0, 8))
                self._told(id, "reschedule", runs, lambda id=id, due=due: self._reschedule(id, due))  # type: ignore[misc]
            elif roll < 0.35:
                try:
                    self._play.touches.touch(id, producer.due_of(chance.uniform(0, 8)))
                except DelayTaskError:
                    pass

    def _schedule(self) -> tuple[int, int]:
        chance = self._chance
        delay = chance.choice([0, chance.uniform(0, 2), chance.uniform(0, 12)])
        body: dict[str, Any] = {"s": chance.choice(TAKES_S), "fails": 0, "kills": 0}
        tag, runs = "note", 1
        drawn = chance.random()
        if drawn < 0.3:
            tag, runs = "shaky", len(LADDER.rungs_s) + 1
            body["fails"] = chance.randint(0, 3)
        elif drawn < 0.4:
            body["kills"] = chance.choice([1, 2, 9])
        id = self._play.new_id()
        new = NewTask(tag, body, delay, id=id)
        for _ in range(2):
            if self._told(id, "schedule", runs, lambda: self._producer.schedule(new, "reject", None)) != "unknown":
                break
        return id, runs

    def _cancel(self, id: int) -> bool:
        cancelled = self._play.tasks.cancel(id)
        if cancelled is not None:
            self._producer.disarm_after_commit(cancelled, None)
        return cancelled is not None

    def _reschedule(self, id: int, due: Any) -> Any:
        moved = self._play.tasks.reschedule(id, due)
        self._producer.arm_after_commit([moved], None)
        return moved

    def _told(self, id: int, call: Call, runs: int, ask: Ask) -> Answer:
        asked_us = self._play.times.now_us
        answer: Answer = "ok"
        due_us = None
        try:
            said = ask()
            if said is False:
                answer = "failed"
            elif call != "cancel":
                due_us = to_us(said.expected_time)
        except (OutcomeUnknownError, Dead) as error:
            answer = "unknown"
            if isinstance(error, Dead):
                raise
        except DelayTaskError:
            answer = "failed"
        finally:
            self._play.history.told.append(Told(id, call, answer, asked_us, self._play.times.now_us, due_us, runs))
        return answer


def script(play: Play) -> None:
    Script(play).run()


def played(seeds: Iterable[int]) -> list[tuple[int, Verdict]]:
    with stage() as here:
        return [(seed, here.play(seed, script)) for seed in seeds]
