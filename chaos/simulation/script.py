"""The script of a play: producers, workers that are replaced when they end, a beat, and faults."""

from __future__ import annotations

import random
from collections.abc import Iterable

from sqlalchemy import func, select

from chaos.checker import Verdict
from chaos.history import ALL, Effect, Fault
from chaos.simulation.calls import SimulatedCalls
from chaos.simulation.celery_messages import register
from chaos.simulation.hazards import ASKS, IN_REDIS, Act, Trap, leases_of
from chaos.simulation.recurring import SimulatedSchedules
from chaos.simulation.stage import Play, stage
from chaos.simulation.worker import SimulatedWorker
from chaos.simulation.world import Host
from chaos.violation import Violation
from delaytasks.model.moves import LIVE

MOST_WORKERS, MOST_PRODUCERS, MOST_TASKS, MOST_FAULTS = 2, 2, 3, 3
#: All calls and faults of a play must be over in this time.
CALLS_END_S = 600.0
#: All tasks must be finished in this time after the last fault.
PATIENCE_S = 90.0
#: Possible clock errors of hosts: none or an hour.
SKEWS_US = (0, 0, 3_600_000_000, -3_600_000_000)
#: The share of plays that check the timer at the end, which doubles their duration.
LOOKED_AT = 0.25
#: The share of plays with a backlog, in which chunks are claimed ahead, and its size.
WITH_BACKLOG, BACKLOG_ROWS = 0.15, (12, 30)
#: How many times more often a fault strikes a step in Redis than another step.
REDIS_WEIGHT = 3
#: After this time without faults, no host is frozen, no message is on its way, and each Redis
#: poller has read all slots.
QUIET_S = 40.0
#: After that, the timer must start an armed task within this time; a sweep would be slower.
ON_TIME_S = 1.0
#: How long the timer takes at most to remove the entry of a task that has run.
SETTLED_S = 5.0


class Script:
    """The script of one play.

    All actors except producers and workers run on a host without faults.
    """

    def __init__(self, play: Play) -> None:
        self._play, self._world, self._chance = play, play.world, play.chance
        self._outside = Host("outside", has_faults=False)
        self._open = 0
        self._is_over = False
        self._workers: list[SimulatedWorker] = []
        self._workers_made = 0
        self._schedules = SimulatedSchedules(play)
        play.at_end = self._schedules.read

    def run(self) -> None:
        start = self._world.start
        workers = self._chance.randint(1, MOST_WORKERS)
        self._workers = [self._new_worker(f"w{number}") for number in range(workers)]
        for number in range(self._chance.randint(1, MOST_PRODUCERS)):
            host = Host(f"producer {number}")
            host.skew_us = self._chance.choice(SKEWS_US)
            self._produce_on(host)
        self._produce_celery_tasks()
        # With a sequence of its own, so that the other draws of a seed do not depend on it.
        chance = random.Random(f"backlog {self._play.seed}")
        if chance.random() < WITH_BACKLOG:
            SimulatedCalls(self._play).insert_backlog(chance.randint(*BACKLOG_ROWS), chance)
        self._schedules.begin()
        self._play.broker.on_put = start(self._outside, self._deliver).wake
        for work in (self._beat, self._supervise, self._break, self._watch):
            start(self._outside, work)
        self._world.run(lambda: self._is_over)

    # -- workers and beat -------------------------------------------------------------------------

    def _new_worker(self, name: str) -> SimulatedWorker:
        self._workers_made += 1
        return SimulatedWorker(self._play, name, self._chance.choice(SKEWS_US))

    def _alive(self) -> list[SimulatedWorker]:
        return [worker for worker in self._workers if not worker.is_dead and not worker.is_stopping]

    def _deliver(self) -> None:
        """Deliver each message to a random worker."""
        broker, times = self._play.broker, self._play.times
        while True:
            workers = self._alive()
            for message in broker.take(times.now_us) if workers else ():
                self._chance.choice(workers).deliver(message)
            next_us = broker.next_us
            self._world.rest(
                None
                if next_us is None
                else max((next_us - times.now_us) / 1e6, 0 if workers else 0.5)
            )

    def _beat(self) -> None:
        while True:
            self._world.pause(self._play.settings.sweep_s)
            workers = self._alive()
            if workers and self._chance.random() < 0.9:
                worker = self._chance.choice(workers)
                worker.soon(lambda worker=worker: worker.runtime.sweep_loop.request(None))  # type: ignore[misc]

    def _supervise(self) -> None:
        workers = self._workers
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
        """End the play when all tasks are finished, or when the time is over."""
        t, database = self._play.stage.store.schema.tasks, self._play.stage.store.database
        live = select(func.count()).where(t.c.status.in_([int(status) for status in LIVE]))
        calls_end_us = self._play.times.now_us + CALLS_END_S * 1e6
        while self._open:
            assert self._play.times.now_us < calls_end_us, f"seed {self._play.seed} does not end"
            self._world.pause(0.5)
        self._play.hazards.trap = None
        self._schedules.end()
        quiet_us = self._play.times.now_us + QUIET_S * 1e6
        self._play.broker.is_reliable = True
        if self._play.redis is not None:
            self._play.redis.is_reliable = True
        until_us = self._play.times.now_us + PATIENCE_S * 1e6
        while self._play.times.now_us < until_us and database.autocommitted(
            lambda c: c.execute(live).scalar_one()
        ):
            self._world.pause(1)
        if self._chance.random() < LOOKED_AT:
            # A task of a schedule may just have run, and its entry is removed after that.
            self._world.pause(max((quiet_us - self._play.times.now_us) / 1e6, SETTLED_S))
            self._look_at_timer()
        self._is_over = True

    def _look_at_timer(self) -> None:
        """Check that Redis has no leftover entries and that the timer is punctual again."""
        play, violations = self._play, self._play.violations
        for left in () if play.redis is None else play.redis.left(play.times.now_us):
            violations.append((0, Violation("I8", "left in Redis", left)))
        id, due_us = SimulatedCalls(play).probe(1), play.times.now_us + 1_000_000
        self._world.pause(1 + ON_TIME_S)
        if not any(
            ran.id == id and ran.began_us < due_us + ON_TIME_S * 1e6
            for ran in play.history.run_records
        ):
            violations.append(
                (id, Violation("I8", "late", "it was not on time although all faults were over"))
            )
        self._world.pause(5)

    # -- producers --------------------------------------------------------------------------------

    def _produce_on(self, host: Host) -> None:
        self._open += 1

        def work() -> None:
            try:
                SimulatedCalls(self._play).make(self._chance.randint(1, MOST_TASKS))
            finally:
                self._open -= 1

        self._world.start(host, work)

    def _produce_celery_tasks(self) -> None:
        """Call Celery tasks on a host without faults, so that each revoke has an answer."""
        register(self._play)
        self._open += 1

        def work() -> None:
            SimulatedCalls(self._play).call_celery_tasks()
            self._open -= 1

        self._world.start(self._outside, work)

    # -- faults -----------------------------------------------------------------------------------

    def _break(self) -> None:
        self._open += 1
        for _ in range(self._chance.randint(0, MOST_FAULTS)):
            self._world.pause(self._chance.uniform(0, 3))
            ways = (
                [self._set_trap] * 6
                + [self._freeze] * 3
                + [
                    self._kill,
                    self._stop,
                    self._set_clock,
                    self._break_broker,
                    self._break_database,
                ]
                + [self._break_redis] * (0 if self._play.redis is None else 3)
            )
            self._chance.choice(ways)()
        self._open -= 1

    def _note(
        self,
        kind: str,
        target: str,
        seconds: float = 0,
        effect: Effect = "none",
        key_owners: tuple[str, ...] = (),
    ) -> None:
        now_us = self._play.times.database_us
        fault = Fault(kind, target, now_us, now_us + int(seconds * 1e6), effect, key_owners)
        self._play.history.faults.append(fault)

    def _set_trap(self) -> None:
        hazards, chance = self._play.hazards, self._chance
        # Steps in Redis count several times, since only they can leave entries behind.
        steps = sorted(hazards.known) + REDIS_WEIGHT * sorted(hazards.known & IN_REDIS)
        step = chance.choice(steps or ["claim"])
        acts: list[Act] = ["kill", "kill", "freeze"]
        if step in ASKS | IN_REDIS:
            acts.append("fail")
        hazards.trap = Trap(step, chance.choice(["before", "after"]), chance.choice(acts))
        for _ in range(20):
            self._world.pause(0.5)
            if hazards.trap is None:
                return
        hazards.trap = None

    def _some_worker(self) -> SimulatedWorker:
        return self._chance.choice(self._workers)

    def _kill(self) -> None:
        worker = self._some_worker()
        self._note("kill", worker.name, 0, "dead", leases_of(worker))
        worker.kill()

    def _freeze(self) -> None:
        """Freeze a worker, preferably a busy one, mostly for longer than a lease."""
        for _ in range(100):
            busy = [
                w for w in self._alive() if any(child.request is not None for child in w.children)
            ]
            if busy:
                break
            self._world.pause(0.03)
        worker = self._chance.choice(busy or self._workers)
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
            worker.soon(worker.runtime.sweep_loop.arm_again)

    def _break_redis(self) -> None:
        """Empty Redis, or stop it and restart it with or without its data."""
        redis, seconds = self._play.redis, self._chance.uniform(0, 5)
        assert redis is not None
        if self._chance.random() < 0.4:
            self._note("emptied", "redis")
            redis.flush()
            return
        self._note("away", "redis", seconds)
        redis.stop(is_empty=self._chance.random() < 0.5)
        self._world.pause(seconds)
        redis.is_up = True

    def _break_database(self) -> None:
        seconds = self._chance.uniform(0, 8)
        self._note("database away", "database", seconds, "away", ALL)
        self._play.hazards.away_until_us = self._play.times.now_us + int(seconds * 1e6)


def play_script(play: Play) -> None:
    Script(play).run()


def play_seeds(seeds: Iterable[int]) -> list[tuple[int, Verdict]]:
    with stage() as here:
        return [(seed, here.play(seed, play_script)) for seed in seeds]
