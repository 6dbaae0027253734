"""A system during its measurement: empty servers, producers and workers."""

from __future__ import annotations

import json
import random
import shlex
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from celery import Celery

from benchmarks import ours
from benchmarks.notes import Note, Notes
from benchmarks.processes import BenchmarkProcess, Usage, family, usage
from benchmarks.rows import Rows
from benchmarks.servers import DATABASE, POSTGRESQL, Servers
from benchmarks.systems import System
from benchmarks.waiting import BenchError, wait_until, wall
from delaytasks import DelayTasks

START_S = 60.0
#: Any polling system begins a task within this time.
BEGIN_S = 5.0
#: The maximum delay of a producer's answer after its time limit: a call in progress has to end
#: first. And of the settlement after the end of the last processor.
SLACK_S, SETTLE_S = 120.0, 30.0
NONE: Mapping[str, str] = MappingProxyType({})
#: What a measurement found, by name, a comma and the unit.
Figures = dict[str, float]


class Scheduled(NamedTuple):
    """The number of tasks that the producers have scheduled, and the duration."""

    tasks: int
    took_s: float

    @property
    def per_s(self) -> float:
        return self.tasks / self.took_s


class Side:
    """One system. All measurements of one side come one after the other."""

    def __init__(self, system: System, servers: Servers, folder: Path) -> None:
        self.system = system
        self.name = system.name
        self.servers = servers
        self.folder = folder
        self.notes = Notes(folder / "notes")
        self.running: list[list[BenchmarkProcess]] = []
        self._beat: list[BenchmarkProcess] = []
        self._producers: list[BenchmarkProcess] = []
        self._asked = 0
        self._processes = 2
        self._delays: DelayTasks | None = None

    @property
    def is_ours(self) -> bool:
        return bool(self.system.timer)

    @property
    def delays(self) -> DelayTasks:
        """The DelayTasks of this process, which uses the same tables as the workers."""
        assert self._delays is not None
        return self._delays

    @property
    def rows(self) -> Rows:
        return Rows(self.delays)

    @property
    def environment(self) -> dict[str, str]:
        """The variables with the URLs of its servers."""
        return self.servers.environment(self.system.servers)

    # -- processes ---------------------------------------------------------------------------------

    @contextmanager
    def prepared(self, **settings: Any) -> Iterator[None]:
        """Provide empty servers with the tables of delaytasks, and no process."""
        self.servers.clear()
        self.notes.clear()
        try:
            if self.is_ours:
                self._delays = ours.make(self.system.timer, **settings)[1]
                self.rows.make()
            yield
        except BenchError as error:
            words = [f"{part.log}:\n{part.last_words(8)}" for part in self._parts()]
            raise BenchError("\n".join([str(error), *words])) from error
        finally:
            for part in self._parts():
                part.stop(5 if self.system.packages else 30)
            self.running, self._beat, self._producers = [], [], []
            if self._delays is not None:
                self._delays.close()

    @contextmanager
    def producing(self, producers: int = 1, variables: Mapping[str, str] = NONE) -> Iterator[None]:
        """Provide empty servers, the system's tables and producers with these variables."""
        with self.prepared():
            self._start_producers(producers, variables)
            yield

    @contextmanager
    def serving(
        self,
        workers: int = 1,
        producers: int = 1,
        takes_s: float = 0,
        variables: Mapping[str, str] = NONE,
        processes: int = 2,
    ) -> Iterator[None]:
        """Start producers, and workers that have run some tasks. `takes_s` is the duration of
        each task, and `variables` are further variables of the workers' environment.
        """
        with self.producing(producers):
            self.start_workers(workers, takes_s, variables, processes)
            # Tasks of a second, but at least 10, load code and open connections.
            warm_up = 300 if not takes_s else max(10, min(300, round(1 / takes_s)))
            now = wall()
            self.schedule(warm_up * workers, now, now, START_S)
            if not self.ran_all(warm_up * workers, START_S):
                raise BenchError(f"{self.system.title} ran {len(self.notes)} of {warm_up} tasks")
            self.forget()
            yield
            self.check_processes()

    def start_workers(
        self,
        workers: int = 1,
        takes_s: float = 0,
        variables: Mapping[str, str] = NONE,
        processes: int = 2,
    ) -> None:
        """Start the workers and the beat, and wait until those of Celery answer.

        With a distant broker that takes more than ten seconds. The pool already runs overdue rows
        of the table, while its main process waits for the broker.
        """
        variables = {
            "BENCH_NOTES": str(self.notes.path),
            "BENCH_TAKES_S": str(takes_s),
            **variables,
        }
        self._processes = processes
        names = [f"{self.name}{n}" for n in range(workers)]
        self.running = [
            [self._start(command, name, **variables) for command in self.system.worker]
            for name in names
        ]
        if self.system.beat:
            self._beat = [self._start(self.system.beat, "beat", **variables)]
        self._wait_for_pings(names)

    def kill_a_busy_one(self) -> None:
        """Kill all processes of the worker that begins the next task, as a power failure does."""
        before = len(self._begun())
        what = f"{self.system.title} to begin a task"
        wait_until(lambda: len(self._begun()) > before, BEGIN_S, what, 0.01)
        last = self._begun()[-1]
        busy = [
            place
            for place, parts in enumerate(self.running)
            if any(last in family(part.pid) for part in parts)
        ]
        for part in self.running.pop((busy or [0])[0]):
            part.kill()

    def check_processes(self) -> None:
        for part in self._parts():
            if not part.is_alive:
                raise BenchError(f"a process of {self.system.title} ended by itself")

    def _begun(self) -> list[int]:
        """Return the processes that began tasks, in order, if tasks take time."""
        return [-int(note.due) for note in self.notes.read() if note.due < 0]

    def _start_producers(self, count: int, variables: Mapping[str, str]) -> None:
        command = self.system.producer
        self._producers = [self._start(command, f"producer{n}", **variables) for n in range(count)]
        for producer in self._producers:
            producer.expect("ready", START_S)

    def _start(self, command: str, name: str, **variables: str) -> BenchmarkProcess:
        is_slow = "BENCH_ONE_AT_A_TIME" in variables
        places = {
            "name": name,
            "folder": self.folder,
            "tasks": 1 if is_slow else self.system.concurrency,
            "processes": self._processes,
        }
        every = {**self.environment, **self.system.variables, **variables}
        words = shlex.split(command.format(**places))
        return BenchmarkProcess(name, words, self.folder, self.system.launcher, **every)

    def _wait_for_pings(self, names: list[str]) -> None:
        if not self.system.worker[0].startswith("celery"):
            return
        hosts = [f"{name}@{socket.gethostname()}" for name in names]
        app = Celery(broker=self.environment["BENCH_BROKER_URL"], set_as_current=False)

        def answer() -> bool:
            self.check_processes()
            return len(app.control.ping(destination=hosts, timeout=0.5)) == len(hosts)

        wait_until(answer, START_S, f"{', '.join(names)} to answer")
        app.close()

    def _parts(self) -> list[BenchmarkProcess]:
        return [*(part for parts in self.running for part in parts), *self._beat, *self._producers]

    # -- tasks -------------------------------------------------------------------------------------

    def schedule(self, count: int, first: float, last: float, limit_s: float) -> Scheduled:
        """Schedule `count` tasks in single calls, due evenly between two times."""
        return self._schedule("schedule", count, first, last, limit_s)

    def schedule_many(self, count: int, first: float, last: float, limit_s: float) -> Scheduled:
        """Schedule `count` tasks in the fastest available way."""
        return self._schedule("schedule_many", count, first, last, limit_s)

    def steady(
        self, rate: int, count: int, batch: int, soonest: float, latest: float, limit_s: float
    ) -> Scheduled:
        """Schedule `count` tasks, each due after a random delay between `soonest` and `latest`.

        The delays are the same for all systems and in every round. A regular sequence would make
        tasks meet regularly, which decides how long they wait for each other.
        """
        chance = random.Random(1)
        delays = [round(chance.uniform(soonest, latest), 6) for _ in range(count)]
        order = {"rate": rate, "batch": batch, "delays": delays, "limit_s": limit_s}
        return Scheduled(**self._ask("steady", limit_s, **order))

    def ran(self) -> list[Note]:
        return [note for note in self.notes.read() if note.due > 0]

    def ran_all(self, count: int, deadline_s: float) -> bool:
        """Return whether `count` tasks have run, and are settled, before the deadline."""
        with suppress(BenchError):
            wait_until(
                lambda: len(self.notes) >= count and len(self.ran()) >= count, deadline_s, "tasks"
            )
            if self.is_ours:
                wait_until(lambda: not self.rows.has_unfinished_due(), SETTLE_S, "rows", 0.02)
            return True
        return False

    def wait_for(self, count: int, deadline_s: float) -> None:
        if not self.ran_all(count, deadline_s):
            ran = f"{len(self.ran()):,} of {count:,} tasks of {self.system.title}"
            raise BenchError(f"{ran} ran within {deadline_s:.0f} s")

    def ended_at(self) -> float:
        """Return when the last task was settled, or else when it ended."""
        noted = max(note.ended for note in self.ran())
        return max(noted, self.rows.last_settled_at()) if self.is_ours else noted

    def lateness_ms(self) -> list[float]:
        """Return how late each task began."""
        return [(note.began - note.due) * 1000 for note in self.ran()]

    def claimed_late_ms(self) -> list[float]:
        """Return how late each row of ours was claimed, and of others how late each task began."""
        is_row = self.system.producer.endswith(" ours")
        return self.rows.lateness_ms() if is_row else self.lateness_ms()

    def forget(self) -> None:
        """Delete all tasks, or forget at least that they ran."""
        self.notes.clear()
        if self.is_ours:
            self.rows.clear()

    def _schedule(
        self, verb: str, count: int, first: float, last: float, limit_s: float
    ) -> Scheduled:
        """Let each of the producers schedule a part of the tasks."""
        each = count // len(self._producers)
        order = {"count": each, "first": first, "last": last, "limit_s": limit_s}
        for producer in self._producers:
            self._tell(producer, verb, **order)
        found = [self._hear(producer, limit_s) for producer in self._producers]
        return Scheduled(sum(one["tasks"] for one in found), max(one["took_s"] for one in found))

    def _ask(self, verb: str, within_s: float, **order: Any) -> dict[str, Any]:
        self._tell(self._producers[0], verb, **order)
        return self._hear(self._producers[0], within_s)

    def _tell(self, producer: BenchmarkProcess, verb: str, **order: Any) -> None:
        self._asked += producer is self._producers[0]
        producer.tell(json.dumps({"number": self._asked, "verb": verb, **order}))

    def _hear(self, producer: BenchmarkProcess, within_s: float) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            producer.expect(f"answer {self._asked} ", within_s + SLACK_S)
        )
        return found

    # -- meters ------------------------------------------------------------------------------------

    def usage(self) -> Usage:
        """Return the memory of the workers, and the CPU time of workers and beat."""
        parts = [part for each in self.running for part in each]
        cpu = usage([part.pid for part in [*parts, *self._beat]])
        return Usage(cpu.cpu_s, usage([part.pid for part in parts]).rss_mb)

    def server_mb(self) -> float:
        return sum(map(self.servers.held_mb, self.system.servers))


class CpuMeter:
    """Measures CPU time from its creation on, without `own_ms` that each task computes."""

    def __init__(self, side: Side, own_ms: float = 0) -> None:
        self._side = side
        self._own_ms = own_ms
        self._began = self._spent_s()

    def per_task(self, tasks: int) -> Figures:
        ms = {
            f"{name} CPU per task, ms": (spent_s - self._began[name]) / tasks * 1000
            for name, spent_s in self._spent_s().items()
        }
        ms["worker CPU per task, ms"] -= self._own_ms
        return {**ms, "CPU per task, worker and servers, ms": sum(ms.values())}

    def _spent_s(self) -> dict[str, float]:
        side = self._side
        servers_s = {
            "database" if name in (DATABASE, POSTGRESQL) else "broker": side.servers.cpu_s(name)
            for name in side.system.servers
        }
        return {"worker": side.usage().cpu_s, **servers_s}
