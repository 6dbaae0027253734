"""Play random sequences of events in one process, with a simulated clock.

Producers, a broker, and the real worker runtime, runner and sweep run on SQLite in memory. A seed
determines the order of all steps, and so the history.
"""

from __future__ import annotations

import multiprocessing
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable

from sqlalchemy import func, select

from chaos.calls import body
from chaos.checker import Finding, Verdict
from chaos.history import ALL, Effect, Fault, Recurs
from chaos.load import RecurringLoad
from chaos.report import console, show
from chaos.simulation.hazards import ASKS, IN_REDIS, Act, Trap, leases_of
from chaos.simulation.stage import SETTINGS, Play, stage
from chaos.simulation.worker import SimulatedWorker
from chaos.simulation.world import Host
from delaytasks import NewTask
from delaytasks.model.errors import DelayTaskError
from delaytasks.model.moves import LIVE

MOST_WORKERS, MOST_PRODUCERS, MOST_TASKS, MOST_FAULTS = 2, 2, 3, 3
#: How long a processor takes: mostly a short time, sometimes longer than a lease.
TAKES_S = (0, 0, 0, 0.02, 0.02, 0.3, 0.3, 1, 8)
#: The share of plays with a backlog, in which chunks are claimed ahead, its size, and how long its
#: rows take.
WITH_BACKLOG, BACKLOG_ROWS = 0.15, (12, 30)
BACKLOG_TAKES_S = (0.01, 0.01, 0.02, 0.02, 0.02, 0.3)
#: The share of plays with durable Celery tasks, how many these have at most, and the share of these
#: that are revoked.
WITH_CELERY, MOST_CELERY_TASKS, REVOKED = 0.15, 4, 0.4
#: The share of plays with a recurring schedule, and its intervals.
WITH_RECURRING, INTERVALS_S = 0.15, (4, 7, 20)
#: All calls and faults of a play must be over in this time.
CALLS_END_S = 600.0
#: All tasks must be finished in this time after the last fault.
PATIENCE_S = 90.0
#: Possible clock errors of hosts: none or an hour.
SKEWS_US = (0, 0, 3_600_000_000, -3_600_000_000)
#: The share of plays that check the timer at the end, which doubles their duration.
LOOKED_AT = 0.25
#: How many times more often a fault strikes a step in Redis than another step.
REDIS_WEIGHT = 3
#: After this time without faults, no host is frozen, no message is on its way, and each Redis
#: poller has read all slots.
QUIET_S = 40.0
#: After that, the timer must start an armed task within this time; a sweep would be slower.
ON_TIME_S = 1.0
#: How long the timer takes at most to remove the entry of a task that has run.
SETTLED_S = 5.0
#: The number of seeds that a process plays before it reports.
BATCH_ROWS = 100


class Script:
    """The script of one play.

    All actors except producers and workers run on a host without faults.
    """

    def __init__(self, play: Play) -> None:
        self._play, self._world, self._chance = play, play.world, play.chance
        self._open = 0
        self._is_over = False
        self._workers: list[SimulatedWorker] = []
        self._workers_made = 0

    def run(self) -> None:
        workers = self._chance.randint(1, MOST_WORKERS)
        self._workers = [self._new_worker(f"w{number}") for number in range(workers)]
        for number in range(self._chance.randint(1, MOST_PRODUCERS)):
            host = Host(f"producer {number}")
            host.skew_us, host.runtime = self._chance.choice(SKEWS_US), self._play.runtime()
            self._begin(self._produce, host)
        if self._chance.random() < WITH_BACKLOG:
            self._insert_backlog()
        if self._chance.random() < WITH_CELERY:
            self._begin(self._call_celery_tasks, self._play.outside)
        self._begin(self._break, self._play.outside)
        self._play.broker.on_put = self._world.start(self._play.outside, self._deliver).wake
        for work in (self._beat, self._supervise, self._watch):
            self._world.start(self._play.outside, work)
        self._world.run(lambda: self._is_over)

    def _begin(self, work: Callable[[], None], host: Host) -> None:
        """Start what must be over before the end of the play."""

        def run() -> None:
            try:
                work()
            finally:
                self._open -= 1

        self._open += 1
        self._world.start(host, run)

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
            workers, rest_s = self._alive(), None
            for message in broker.take(times.now_us) if workers else ():
                self._chance.choice(workers).deliver(message)
            if (next_us := broker.next_us) is not None:
                rest_s = max((next_us - times.now_us) / 1e6, 0 if workers else 0.5)
            self._world.rest(rest_s)

    def _beat(self) -> None:
        while True:
            self._world.pause(SETTINGS["sweep"])
            workers = self._alive()
            if workers and self._chance.random() < 0.9:
                worker = self._chance.choice(workers)
                worker.soon(lambda worker=worker: worker.main.sweep_loop.request(None))  # type: ignore[misc]

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
        play, world = self._play, self._world
        recurring = RecurringLoad(play.stage.delays, self._schedules(), world.pause)
        t, database = play.stage.store.schema.tasks, play.stage.store.database
        live = select(func.count()).where(t.c.status.in_([int(status) for status in LIVE]))
        calls_end_us = play.times.now_us + CALLS_END_S * 1e6
        while self._open:
            assert play.times.now_us < calls_end_us, f"seed {play.seed} does not end"
            world.pause(0.5)
        play.hazards.trap = None
        recurring.stop()
        quiet_us = play.times.now_us + QUIET_S * 1e6
        play.broker.is_reliable = True
        if play.redis is not None:
            play.redis.is_reliable = True
        until_us = play.times.now_us + PATIENCE_S * 1e6
        while play.times.now_us < until_us and database.autocommitted(
            lambda c: c.execute(live).scalar_one()
        ):
            world.pause(1)
        if self._chance.random() < LOOKED_AT:
            # A task of a schedule may just have run, and its entry is removed after that.
            world.pause(max((quiet_us - play.times.now_us) / 1e6, SETTLED_S))
            self._look_at_timer()
        self._is_over = True

    def _look_at_timer(self) -> None:
        """Check that Redis has no leftover entries and that the timer is punctual again."""
        play = self._play
        for left in () if play.redis is None else play.redis.left(play.times.now_us):
            play.findings.append(Finding("I8", "left in Redis", left))
        id, due_us = play.new_id(), play.times.now_us + 1_000_000
        play.caller().schedule([NewTask("note", body(), 1, id=id)])
        self._world.pause(1 + ON_TIME_S)
        runs = play.history.tasks[id].runs.values()
        if not any(run.began_us < due_us + ON_TIME_S * 1e6 for run in runs):
            text = f"task {id} was not on time although all faults were over"
            play.findings.append(Finding("I8", "late", text))
        self._world.pause(5)

    # -- the load ---------------------------------------------------------------------------------

    def _produce(self) -> None:
        play, chance, caller = self._play, self._chance, self._play.caller()
        for _ in range(chance.randint(1, MOST_TASKS)):
            self._world.pause(chance.uniform(0, 2))
            id = play.new_id()
            delay = chance.choice([0, chance.uniform(0, 2), chance.uniform(0, 12)])
            tag, task_body, drawn = "note", body(chance.choice(TAKES_S)), chance.random()
            if drawn < 0.3:
                tag, task_body["fails"] = "shaky", chance.randint(0, 3)
            elif drawn < 0.4:
                task_body["kills"] = chance.choice([1, 2, 9])
            caller.schedule([NewTask(tag, task_body, delay, id=id)], repeats=1)
            drawn = chance.random()
            if drawn < 0.1:
                caller.cancel(id)
            elif drawn < 0.25:
                caller.reschedule(id, chance.uniform(0, 8))
            elif drawn < 0.35:
                try:
                    play.stage.delays.touch(id, chance.uniform(0, 8))
                except DelayTaskError:
                    pass

    def _insert_backlog(self) -> None:
        caller = self._play.caller()
        for _ in range(self._chance.randint(*BACKLOG_ROWS)):
            caller.insert(body(self._chance.choice(BACKLOG_TAKES_S)))

    def _call_celery_tasks(self) -> None:
        """Call Celery tasks on a host without faults, so that each revoke has an answer."""
        chance, caller = self._chance, self._play.caller()
        for _ in range(chance.randint(1, MOST_CELERY_TASKS)):
            self._world.pause(chance.uniform(0, 2))
            delay = chance.uniform(0.01, 8)
            number, _ = caller.call_celery_task(delay)
            if chance.random() < REVOKED:  # mostly when the row is about to be due
                self._world.pause(delay * chance.choice([0.3, 1, 1]))
                caller.revoke(number)

    def _schedules(self) -> list[Recurs]:
        chance, schedules = self._chance, self._play.schedules
        if chance.random() < WITH_RECURRING:
            made = Recurs("schedule", chance.choice(INTERVALS_S) * 1_000_000)
            made.missed = chance.choice(["all", "latest"])
            made.overlap = chance.choice(["allow", "skip"])
            made.takes_s = chance.choice([0, 0.3, 8])
            schedules.append(made)
        return schedules

    # -- faults -----------------------------------------------------------------------------------

    def _break(self) -> None:
        for _ in range(self._chance.randint(0, MOST_FAULTS)):
            self._world.pause(self._chance.uniform(0, 3))
            others = [self._kill, self._stop, self._set_clock, self._break_broker]
            ways = [self._set_trap] * 6 + [self._freeze] * 3 + [*others, self._break_database]
            ways += [self._break_redis] * (0 if self._play.redis is None else 3)
            self._chance.choice(ways)()

    def _note(
        self,
        kind: str,
        target: str,
        seconds: float = 0,
        effect: Effect = "none",
        key_owners: tuple[str, ...] = (),
    ) -> None:
        now_us = self._play.times.database_us
        times = now_us, now_us + int(seconds * 1e6)
        self._play.history.note(Fault(kind, target, *times, effect, key_owners))

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
        if workers := self._alive():
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
            worker.soon(worker.main.sweep_loop.arm_again)

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


# -- the command ----------------------------------------------------------------------------------


def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--seeds", type=int, default=2000, help="how many")
    add("--first", type=int, default=0)
    add("--seed", type=int, help="play only this seed")
    add("--processes", type=int, default=multiprocessing.cpu_count())


def main(options: Namespace) -> int:
    first, seeds = (options.first, options.seeds) if options.seed is None else (options.seed, 1)
    batches = [
        range(at, min(at + BATCH_ROWS, first + seeds))
        for at in range(first, first + seeds, BATCH_ROWS)
    ]
    began, verdict, output = time.monotonic(), Verdict(), console()
    with multiprocessing.get_context("spawn").Pool(min(options.processes, len(batches))) as pool:
        for some in pool.imap_unordered(play_seeds, batches):
            for seed, each in some:
                verdict.add(each)
                if each.findings:
                    output.print(f"seed {seed}: {each}\n")
    seconds = time.monotonic() - began
    output.print(f"{seeds:,} seeds in {seconds:.0f} s ({seeds / seconds * 60:,.0f} a minute)")
    return show(verdict, output, has_table=False)
