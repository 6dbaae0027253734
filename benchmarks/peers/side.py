"""A system during its measurement: empty servers, a producer and workers."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from celery import Celery

from benchmarks.machine import family, usage
from benchmarks.notes import Note, Notes
from benchmarks.peers import environment
from benchmarks.peers.catalogue import System
from benchmarks.peers.processes import PeerProcess
from benchmarks.peers.servers import Servers
from benchmarks.waiting import BenchError, wait_until, wall

START_S = 60.0
NONE: Mapping[str, str] = MappingProxyType({})
#: Tasks that new workers run before a measurement.
WARM_UP = 300
#: Any polling system begins a task within this time.
BEGIN_S = 5.0
#: The maximum delay of a producer's answer after its time limit: a call in progress has to end
#: first.
SLACK_S = 120.0


class Scheduled(NamedTuple):
    """The number of tasks that a producer has scheduled, and the duration."""

    tasks: int
    took_s: float

    @property
    def per_s(self) -> float:
        return self.tasks / self.took_s


class Peer:
    def __init__(self, system: System, servers: Servers, folder: Path) -> None:
        self.system = system
        self._servers = servers
        self._folder = folder
        self._notes = Notes(folder / "notes")
        self._workers: list[list[PeerProcess]] = []
        self._extra_processes: list[PeerProcess] = []
        self._producer: PeerProcess | None = None
        self._asked = 0
        self._variables: dict[str, str] = {}

    def lacks(self, say: Callable[[str], None]) -> str:
        """Install the system if necessary. Return why it cannot be measured, or an empty string."""
        reason = self._servers.missing(self.system.servers)
        try:
            if not reason:
                environment.install(self.system, say)
        except environment.NotInstalledError as error:
            reason = str(error)
        if reason:
            say(f"{self.system.title} is skipped: {reason}")
        return reason

    @property
    def environment(self) -> dict[str, str]:
        """The variables with the URLs of its servers."""
        return self._servers.environment(self.system.broker)

    @contextmanager
    def producing(self, variables: Mapping[str, str] = NONE) -> Iterator[None]:
        """Provide empty servers, the system's tables and a producer with these variables."""
        self._servers.clear()
        self._notes.clear()
        try:
            self._start_producer(**variables)
            yield
        except BenchError as error:
            raise BenchError(f"{error}\n{self._last_words()}") from error
        finally:
            for part in self._parts():
                part.stop()
            self._workers, self._extra_processes, self._producer = [], [], None

    @contextmanager
    def serving(
        self, workers: int = 1, takes_s: float = 0, variables: Mapping[str, str] = NONE
    ) -> Iterator[None]:
        """Start workers that have run some tasks. `takes_s` is the duration of each task, and
        `variables` are further variables of their environment.
        """
        with self.producing():
            self._variables = {
                "BENCH_NOTES": self._notes.path,
                "BENCH_TAKES_S": str(takes_s),
                **variables,
            }
            if self.system.is_one_process:
                assert self._producer is not None
                self._producer.stop()
                self._start_producer(**self._variables)
                self.ask("serve", START_S)
            else:
                self._workers = [self._start_worker(number) for number in range(workers)]
                self._extra_processes = [
                    self._start(command, "beat", **self._variables)
                    for command in self.system.extra_commands
                ]
            self._await_consumers()
            self._warm_up(_warm_up_count(takes_s))
            yield
            for part in self._parts():
                if not part.is_alive:
                    raise BenchError(f"a process of {self.system.title} ended by itself")

    def schedule(self, count: int, first: float, last: float, limit_s: float) -> Scheduled:
        return Scheduled(
            **self.ask("schedule", limit_s, count=count, first=first, last=last, limit_s=limit_s)
        )

    def schedule_many(self, count: int, first: float, last: float, limit_s: float) -> Scheduled:
        return Scheduled(
            **self.ask(
                "schedule_many", limit_s, count=count, first=first, last=last, limit_s=limit_s
            )
        )

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
        return Scheduled(**self.ask("steady", limit_s, **order))

    def wait_for(self, count: int, deadline_s: float) -> bool:
        """Return whether `count` tasks run before the deadline."""
        ends = time.monotonic() + deadline_s
        while len(self._notes) < count or len(self.ran()) < count:
            if time.monotonic() > ends:
                return False
            time.sleep(0.05)
        return True

    def ran(self) -> list[Note]:
        return [note for note in self._notes.read() if note.due > 0]

    def forget(self) -> None:
        self._notes.clear()

    def ended_at(self, deadline_s: float = 5.0) -> float:
        """Return when the last task was settled, or else when it ended."""
        noted = max(note.ended for note in self.ran())
        found = self.ask("ended_at", deadline_s)["at"]
        return noted if found is None else max(noted, found)

    def kill_a_worker(self) -> str:
        """Kill all processes of the worker that begins the next task, as a power failure does.

        Return a description of the worker.
        """
        before = len(self._begun())
        wait_until(
            lambda: len(self._begun()) > before,
            BEGIN_S,
            f"{self.system.title} to begin a task",
            0.01,
        )
        begun = self._begun()
        if self.system.is_one_process:
            assert self._producer is not None
            self._producer.kill()
            self._start_producer(**self._variables)
            self.ask("serve", START_S)
            return "its only process, restarted immediately"
        busy = [
            worker for worker in self._workers for part in worker if begun[-1] in family(part.pid)
        ]
        victim = (busy or self._workers)[0]
        self._workers.remove(victim)
        for part in victim:
            part.kill()
        return "one of two workers"

    def _begun(self) -> list[int]:
        """Return the processes that began tasks, in order, if tasks take time."""
        return [-int(note.due) for note in self._notes.read() if note.due < 0]

    def worker_cpu_s(self) -> float | None:
        """Return the CPU time of the workers and of additional processes."""
        found = [usage(part.pid) for part in [*self._working(), *self._extra_processes]]
        return sum(one.cpu_s for one in found if one is not None) if all(found) else None

    def worker_bytes(self) -> int | None:
        found = [usage(part.pid) for part in self._working()]
        return sum(one.rss_bytes for one in found if one is not None) if all(found) else None

    def server_cpu_s(self) -> float | None:
        return self._servers.cpu_s(self.system.servers)

    def server_bytes(self) -> int | None:
        found = [self._servers.held_bytes(name) for name in self.system.servers]
        return sum(one for one in found if one is not None) if None not in found else None

    def ask(self, verb: str, within_s: float, **order: Any) -> dict[str, Any]:
        producer, self._asked = self._producer, self._asked + 1
        assert producer is not None
        opening = f"answer {self._asked} "
        producer.tell(json.dumps({"number": self._asked, "verb": verb, **order}))
        found: dict[str, Any] = json.loads(self._hear(producer, opening, within_s + SLACK_S))
        return found

    def _hear(self, part: PeerProcess, opening: str, deadline_s: float) -> str:
        heard: list[str] = []

        def has_said() -> bool:
            lines = part.log.read_text(errors="replace").splitlines()
            heard[:] = [line for line in lines if line.startswith(opening)]
            if not heard and not part.is_alive:
                raise BenchError(f"the producer of {self.system.title} ended")
            return bool(heard)

        wait_until(
            has_said, deadline_s, f"the producer of {self.system.title} to say {opening!r}", 0.02
        )
        return heard[0].removeprefix(opening)

    def _start_producer(self, **variables: str) -> None:
        self._producer = self._start(self.system.producer, "producer", **variables)
        self._hear(self._producer, "ready", START_S)

    def _start_worker(self, number: int) -> list[PeerProcess]:
        name = f"{self.system.name}{number}"
        return [self._start(command, name, **self._variables) for command in self.system.worker]

    def _start(self, command: Sequence[str], name: str, **variables: str) -> PeerProcess:
        places = {"name": name, "folder": self._folder, "redis": self._servers.redis_url}
        filled = [part.format(**places) for part in command]
        every = {**self.environment, **environment.variables(self.system), **variables}
        return PeerProcess(self.system, filled, self._folder, **every)

    def _await_consumers(self) -> None:
        """Wait until each worker of Celery answers to a ping.

        With a distant broker its start takes more than ten seconds. Its pool already runs overdue
        rows of the table, while its main process waits for the broker.
        """
        has_broker = self.system.broker in self.system.servers
        if not has_broker or any(command[0] != "celery" for command in self.system.worker):
            return
        app = Celery(broker=self.environment["BENCH_BROKER_URL"], set_as_current=False)
        with app.connection_for_write() as connection:
            wait_until(
                lambda: (
                    len(app.control.ping(timeout=0.5, connection=connection)) >= len(self._workers)
                ),
                START_S,
                f"the workers of {self.system.title} to answer",
            )

    def _warm_up(self, count: int) -> None:
        now = wall()
        self.schedule(count, now, now, START_S)
        if not self.wait_for(count, START_S):
            raise BenchError(
                f"{self.system.title} ran {len(self._notes)} of its first {count} tasks in "
                f"{START_S:.0f} s"
            )
        self.forget()

    def _working(self) -> list[PeerProcess]:
        if self.system.is_one_process:
            return [self._producer] if self._producer is not None else []
        return [part for worker in self._workers for part in worker]

    def _parts(self) -> list[PeerProcess]:
        producer = [] if self._producer is None else [self._producer]
        return [
            *(part for worker in self._workers for part in worker),
            *self._extra_processes,
            *producer,
        ]

    def _last_words(self) -> str:
        return "\n".join(f"{part.log}:\n{part.last_words(8)}" for part in self._parts())


def _warm_up_count(takes_s: float) -> int:
    """Return how many tasks warm a worker up: those of a second, but at least 10."""
    return WARM_UP if not takes_s else max(10, min(WARM_UP, round(1 / takes_s)))
