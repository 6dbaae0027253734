"""A database on which seeds are played, and the parts that all hosts of a play share."""

from __future__ import annotations

import itertools
import logging
import random
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from celery import Celery
from sqlalchemy import delete

# A host loads these modules when it needs them, and then they must have the simulated clock.
import delaytasks.durable_eta.messages
import delaytasks.limits.tracked_waitlists
import delaytasks.recurring.recurring
import delaytasks.worker.worker_runtime  # noqa: F401
from chaos.calls import RECURRING, Caller
from chaos.checker import Checker, Finding, Verdict
from chaos.history import RETRIES, History, Recurs, RunRecord
from chaos.recorder import Recorder
from chaos.simulation import world as simulated
from chaos.simulation.broker import BrokerPublisher, CeleryLink, SimulatedBroker
from chaos.simulation.clock import START_US, Times, installed
from chaos.simulation.hazards import Hazards, StepProxy
from chaos.simulation.redislink import Link, Server
from chaos.simulation.world import Host, SimulatedWorld
from delaytasks import DelayedTask, DelayTasks
from delaytasks.broker.arming import EtaTimer
from delaytasks.broker.redis_timer import RedisLocation, RedisTimer
from delaytasks.db.claims import Claims
from delaytasks.db.engines import create_sqlite_file
from delaytasks.db.store import Store
from delaytasks.events import Events
from delaytasks.model.policies import NO_POLICIES
from delaytasks.recurring.creation import RecurringTable
from delaytasks.runtime import Runtime

SETTINGS: dict[str, Any] = {
    "lease": 6,
    "sweep": 2,
    "_self_sweep_s": 4,
    "_grace_s": 0.5,
    "horizon": 10,
    "max_lost_leases": 4,
    "durable_eta": True,
    "_redis_slots": 2,
    # Simulated workers have no table of statistics.
    "statistics": False,
}
#: The policies of a play without pauses and limits.
POLICIES = SimpleNamespace(
    stamp=0, known=NO_POLICIES, refresh=lambda: NO_POLICIES, current=lambda: NO_POLICIES
)
#: The packages whose threads are actors.
WITH_THREADS = tuple(f"delaytasks.{name}" for name in ("loops", "run", "worker", "broker"))
#: A folder in memory, if the system has one.
_MEMORY = Path("/dev/shm")


class SimulatedDelays(DelayTasks):
    """Has the runtime of the host whose actor runs."""

    stage: Stage

    @property
    def _runtime(self) -> Runtime:
        play = self.stage.last
        runtime: Runtime = (play.world.host or play.outside).runtime
        return runtime


class Stage:
    def __init__(self, store: Store, times: Times, delays: SimulatedDelays) -> None:
        self.store, self.times, self.delays = store, times, delays
        self.recorder = Recorder(store)
        self.recorder.start()
        self._claims: dict[str, Claims] = {}
        delays.stage = self
        delays.processor("note")(self.work)
        delays.processor(RECURRING)(self.work)
        delays.processor("shaky", retries=RETRIES)(self.work)

    def work(self, body: dict[str, Any], task: DelayedTask) -> None:
        self.last.work(body, task)

    def play(self, seed: int, play_script: Callable[[Play], None]) -> Verdict:
        with self.store.database.begin() as connection:
            for table in self.store.schema.metadata.sorted_tables:
                connection.execute(delete(table))
        self.recorder.forget()
        self.times.now_us = START_US
        random.seed(seed)  # for code that draws random numbers itself
        play = self.last = Play(self, seed)
        try:
            play_script(play)
        finally:
            play.world.close()
        for change in self.recorder.changes():
            play.history.note(change)
        play.history.join(play.schedules)
        checker = Checker(play.history, SETTINGS["max_lost_leases"], self.times.now_us)
        verdict = checker.verdict()
        verdict.findings += play.findings
        return verdict

    def claims(self, name: str) -> Claims:
        """Return the claim queries of a worker. They are cached, since they are slow to build."""
        if name not in self._claims:
            self._claims[name] = self.store.claims(name, None)
        return self._claims[name]


class Play:
    """One seed."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self.seed, self.stage, self.times = seed, stage, stage.times
        self.world = SimulatedWorld(stage.times, seed)
        self.chance = self.world.chance
        self.history = History()
        self.hazards = Hazards(self.world, self.history.note)
        self.broker = SimulatedBroker(self.chance)
        #: The simulated Redis server, or None with the `eta` timer.
        is_redis = self.chance.random() < 0.5
        self.redis = Server(self.world, self.chance, self.hazards) if is_redis else None
        #: The recurring schedules, and findings that the checker cannot see.
        self.schedules, self.findings = list[Recurs](), list[Finding]()
        self.new_id = itertools.count(1).__next__
        self.new_pid = itertools.count(10_000_000).__next__
        self._store = copy(stage.store)
        for name in ("tasks", "sweeps", "leases", "workers"):
            setattr(self._store, name, self.with_steps(getattr(stage.store, name)))
        self._store.tasks.new = self.with_steps(stage.store.tasks.new)
        #: The host of all actors except producers and workers.
        self.outside = Host("outside", has_faults=False)
        self.outside.runtime = self.runtime()

    def with_steps(self, part: Any) -> Any:
        return StepProxy(part, self.world, self.hazards)

    def claims(self, name: str) -> Any:
        return self.with_steps(self.stage.claims(name))

    def runtime(self) -> Any:
        """Return the objects of production for one process, with simulated ones in their places."""
        store = self.stage.store
        made: Any = Runtime(self.stage.delays)
        made.store, made.new_id, made.policy_cache = self._store, self.new_id, POLICIES
        made.events, made.ask_now = Events(), store.tasks.now
        publisher = BrokerPublisher(self.broker, lambda: self.times.now_us)
        made.publisher = self.with_steps(publisher)
        made.confirming_links = CeleryLink(self)
        made.recurring_table = self.with_steps(RecurringTable(store.database, store.schema))
        made.redis_timer, made.timer = None, EtaTimer(made.publisher, made.clock)
        if self.redis is not None:
            location, settings = RedisLocation(("",)), made.settings
            timer = RedisTimer(location, settings, made.timer, made.clock, made.events)
            timer.link = Link(self.redis, settings.publish_limit_s, made.events)
            made.redis_timer = made.timer = timer
        made.producer_timer = made.timer
        return made

    def caller(self) -> Caller:
        """Return the caller of the host whose actor runs."""
        pause, now_us = self.world.pause, lambda: self.times.now_us
        delays, notes = self.stage.delays, self.history
        return Caller(delays, notes, self.chance, now_us=now_us, pause=pause)

    def work(self, body: dict[str, Any], task: DelayedTask) -> None:
        host = self.world.host
        assert host is not None
        self.world.pause(0)  # a killed host ends here
        begun = RunRecord(task.id, task.version, host.name, self.times.now_us)
        self.history.note(begun)
        self.hazards.pass_by("run", "before")
        self.world.pause(body["s"])
        if task.lapses < body["kills"]:
            self.hazards.strike(host, "kill", "in run")
        self.history.note(replace(begun, ended_us=self.times.now_us))
        self.hazards.pass_by("run", "after")
        if task.runs <= body["fails"]:
            raise RuntimeError("as requested, with \x00 and \ud800 in it")


@contextmanager
def stage() -> Iterator[Stage]:
    """Yield a stage, with the modules of delaytasks on its clock."""
    times, logger = Times(), logging.getLogger("delaytasks")
    level = logger.level
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        app = Celery("simulation", broker="memory://", set_as_current=False)
        url = f"sqlite:///{folder}/simulation.sqlite3"
        delays = SimulatedDelays(app, url, **SETTINGS)
        store = Runtime(delays).store
        times.serve(store)
        create_sqlite_file(store.database.url)
        with store.database.begin() as connection:
            store.schema.metadata.create_all(connection)
        others = _with_simulated_threads()
        # The pids are simulated; the simulated pool reports deaths.
        others["delaytasks.worker.quick_loops"]["has_exited"] = lambda _pid: False
        with installed(times, others):
            logger.setLevel(logging.CRITICAL)
            try:
                yield Stage(store, times, delays)
            finally:
                logger.setLevel(level)
                store.close()


def _with_simulated_threads() -> dict[str, dict[str, Any]]:
    """Return what replaces threads, by module and global."""
    found = defaultdict[str, dict[str, Any]](dict)
    for name, module in list(sys.modules.items()):
        for key, known in vars(module).items() if name.startswith(WITH_THREADS) else ():
            if known is threading:
                found[name][key] = simulated.threads
            elif known is ThreadPoolExecutor:
                found[name][key] = simulated.ThreadPoolExecutor
    return found
