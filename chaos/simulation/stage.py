"""An in-memory database on which seeds are played, and the parts that all hosts of a play share."""

from __future__ import annotations

import itertools
import logging
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sqlalchemy import delete, select

from chaos.checker import Checker, Finding, Verdict
from chaos.history import History, RunRecord
from chaos.recorder import Recorder
from chaos.simulation.broker import BrokerPublisher, SimulatedBroker
from chaos.simulation.clock import START_US, Times, installed
from chaos.simulation.hazards import Hazards, StepProxy
from chaos.simulation.redislink import Link, Server
from chaos.simulation.world import Lock, SimulatedWorld
from chaos.violation import Violation
from delaytasks import DelayedTask, RetrySchedule
from delaytasks.broker.arming import EtaTimer
from delaytasks.broker.redis_timer import RedisLocation, RedisTimer
from delaytasks.db.claims import Claims
from delaytasks.db.engines import create_sqlite_file
from delaytasks.db.schema import columns
from delaytasks.db.statements import task_of
from delaytasks.db.store import Store
from delaytasks.events import Events
from delaytasks.model.clock import Clock
from delaytasks.registry import Registry
from delaytasks.run.calls import ProcessorCall
from delaytasks.settings import load_settings

SETTINGS: dict[str, Any] = {
    "lease": 6,
    "sweep": 2,
    "_self_sweep_s": 4,
    "_grace_s": 0.5,
    "horizon": 10,
    "max_lost_leases": 4,
    "_redis_slots": 2,
    # Simulated workers have no table of statistics.
    "statistics": False,
}
RETRY_SCHEDULE = RetrySchedule("1s 3s")
#: A folder in memory, if the system has one.
_MEMORY = Path("/dev/shm")


class SimulationStage:
    def __init__(self, store: Store, times: Times) -> None:
        self.store, self.times = store, times
        self.settings = load_settings({}, {}, **SETTINGS)
        self.recorder = Recorder(store)
        self.recorder.start()
        self._claims: dict[str, Claims] = {}

    def play(self, seed: int, play_script: Callable[[Play], None]) -> Verdict:
        with self.store.database.begin() as connection:
            for table in self.store.schema.metadata.sorted_tables:
                connection.execute(delete(table))
        self.recorder.forget()
        self.times.now_us = START_US
        random.seed(seed)  # for code that draws random numbers itself
        play = Play(self, seed)
        self.last = play
        try:
            play_script(play)
        finally:
            play.world.close()
        play.history.changes = list(self.recorder.changes())
        play.at_end()
        checker = Checker(play.history, self.settings.max_lost_leases, self.times.now_us)
        verdict = checker.verdict()
        for id, violation in play.violations:
            verdict.findings.append(Finding(violation, id, checker.story(id) if id else ""))
        return verdict

    def claims(self, name: str) -> Claims:
        """Return the claim queries of a worker. They are cached, since they are slow to build."""
        if name not in self._claims:
            self._claims[name] = self.store.claims(name, None)
        return self._claims[name]


class Play:
    """One seed."""

    def __init__(self, stage: SimulationStage, seed: int) -> None:
        self.seed = seed
        self.stage, self.settings, self.times = stage, stage.settings, stage.times
        self.world = Lock.world = SimulatedWorld(stage.times, seed)
        self.chance = self.world.chance
        self.history = History()
        self.hazards = Hazards(self.world, self.history.faults.append)
        self.broker = SimulatedBroker(self.chance)
        self.publisher: Any = self.with_steps(
            BrokerPublisher(self.broker, lambda: self.times.now_us)
        )
        #: The simulated Redis server, or None with the `eta` timer.
        self.redis = (
            Server(self.world, self.chance, self.hazards) if self.chance.random() < 0.5 else None
        )
        #: Called after the end, when the history has the changes of the rows.
        self.at_end: Callable[[], None] = lambda: None
        #: Violations that the checker cannot see, each with the task's id or 0.
        self.violations: list[tuple[int, Violation]] = []
        store = stage.store
        self.tasks = self.with_steps(store.tasks)
        self.tasks.new = self.with_steps(store.tasks.new)
        self.sweeps, self.leases, self.seen = (
            self.with_steps(store.sweeps),
            self.with_steps(store.leases),
            self.with_steps(store.workers),
        )
        self.audit = self.with_steps(store.bulk.audit)
        self.registry = Registry()
        self.registry.processor("note")(self._work)
        self.registry.processor("shaky", retries=RETRY_SCHEDULE)(self._work)
        self.new_id = itertools.count(1).__next__
        self.new_pid = itertools.count(10_000_000).__next__

    def with_steps(self, part: Any) -> Any:
        return StepProxy(part, self.world, self.hazards)

    def rows(self) -> list[DelayedTask]:
        """Return all rows of tasks."""
        store = self.stage.store
        query = select(*columns(store.schema))
        return [task_of(row, store.schema) for row in store.database.rows(query)]

    def claims(self, name: str) -> Any:
        return self.with_steps(self.stage.claims(name))

    def clock(self) -> Clock:
        """Return a clock for one host."""
        return Clock(self.stage.store.tasks.now)

    def timer(self, clock: Clock, events: Events) -> EtaTimer | RedisTimer:
        """Return a timer for one process."""
        eta = EtaTimer(self.publisher, clock)
        if self.redis is None:
            return eta
        timer = RedisTimer(RedisLocation(("",)), self.settings, eta, clock, events)
        timer.link = Link(self.redis, self.settings.publish_limit_s, events)
        return timer

    def execute(self, call: ProcessorCall) -> object:
        return call.end(call(call.read_argument()), None)

    def _work(self, body: dict[str, Any], task: DelayedTask) -> None:
        host = self.world.host
        assert host is not None
        self.world.pause(0)  # a killed host ends here
        begun = RunRecord(task.id, task.version, host.name, self.times.now_us)
        self.history.run_records.append(begun)
        self.hazards.pass_by("run", "before")
        self.world.pause(body["s"])
        if task.lapses < body["kills"]:
            self.hazards.strike(host, "kill", "in run")
        self.history.run_records[self.history.run_records.index(begun)] = replace(
            begun, ended_us=self.times.now_us
        )
        self.hazards.pass_by("run", "after")
        if task.runs <= body["fails"]:
            raise RuntimeError("as requested, with \x00 and \ud800 in it")


@contextmanager
def stage() -> Iterator[SimulationStage]:
    """Yield a stage, with the modules of delaytasks on its clock."""
    times, logger = Times(), logging.getLogger("delaytasks")
    level = logger.level
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        url = f"sqlite:///{folder}/simulation.sqlite3"
        store = Store(url, load_settings({}, {}, **SETTINGS))
        times.serve(store)
        create_sqlite_file(store.database.url)
        with store.database.begin() as connection:
            store.schema.metadata.create_all(connection)
        threads = SimpleNamespace(
            Condition=threading.Condition, Event=threading.Event, Lock=Lock, RLock=threading.RLock
        )
        modules = ("run.chunk", "worker.quick_loops")
        others: dict[str, dict[str, Any]] = {
            f"delaytasks.{name}": {"threading": threads} for name in modules
        }
        # The pids are simulated; the simulated pool reports deaths.
        others["delaytasks.worker.quick_loops"]["has_exited"] = lambda _pid: False
        with installed(times, others):
            logger.setLevel(logging.CRITICAL)
            try:
                yield SimulationStage(store, times)
            finally:
                logger.setLevel(level)
                store.close()
