"""The compared systems with a common interface: start workers, schedule, measure lateness."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import bare, brokers, ours, processes, redis_server, table
from benchmarks.notes import Notes
from benchmarks.processes import BenchmarkProcess
from benchmarks.settings import BARE_QUEUE
from benchmarks.waiting import BenchError, TooSlowError, instant, wait_until, wall
from delaytasks.runtime import runtime_of

START_S = 60.0
#: The tasks that new workers run before a measurement, to load code and open connections.
WARM_UP = 300


class Side(ABC):
    """One of the systems. While it is `serving`, it has workers of two prefork processes each.

    The outcome of tasks is read from their notes, unless a subclass has a better source.
    """

    name: str
    app: Any
    app_path: str

    def __init__(self, folder: Path = Path(), notes: Notes | None = None) -> None:
        self.folder = folder
        self._notes = notes
        self.workers: list[BenchmarkProcess] = []
        self._others: list[BenchmarkProcess] = []
        self._killed: list[BenchmarkProcess] = []

    @property
    def notes(self) -> Notes:
        assert self._notes is not None, "a producer cannot read notes"
        return self._notes

    @contextmanager
    def serving(self, count: int = 1, pool: Sequence[str] = processes.POOL) -> Iterator[None]:
        """Start workers, and wait until they are warm and idle."""
        with self.started(count, pool) as names:
            self._wait_for_start(names)
            self.clear()
            yield

    @contextmanager
    def started(self, count: int = 1, pool: Sequence[str] = processes.POOL) -> Iterator[list[str]]:
        """Start workers with whatever work is waiting."""
        try:
            names = [f"{self.name}{number}" for number in range(count)]
            self.workers = [self._start_worker(name, pool) for name in names]
            self._others = self._start_others()
            yield [f"{name}@{socket.gethostname()}" for name in names]
            for process in self.workers + self._others:
                if not process.is_alive and process not in self._killed:
                    raise BenchError(f"{process.name} ended by itself")
        except TooSlowError:
            raise
        except BenchError as error:
            words = [f"{p.name}, {p.log}:\n{p.last_words()}" for p in self.workers + self._others]
            raise BenchError("\n".join([str(error), *words])) from error
        finally:
            for process in self.workers + self._others:
                process.stop()
            self.workers, self._others, self._killed = [], [], []

    def restart(self, process: BenchmarkProcess) -> BenchmarkProcess:
        """Send TERM, and start a successor as soon as the process has ended."""
        process.stop()
        started = self._start_worker(process.name, processes.POOL)
        self.workers[self.workers.index(process)] = started
        name = f"{process.name}@{socket.gethostname()}"
        wait_until(
            lambda: self.app.control.ping(destination=[name], timeout=0.5),
            START_S,
            f"{name} to answer",
        )
        return started

    def kill(self, process: BenchmarkProcess) -> None:
        self._killed.append(process)
        process.kill()

    def cpu_s(self) -> float | None:
        """Return the CPU time of the workers and of the beat."""
        found = [process.usage() for process in self.workers + self._others]
        return sum(one.cpu_s for one in found if one is not None) if all(found) else None

    def rss_mb(self) -> float | None:
        found = [process.usage() for process in self.workers]
        return (
            sum(one.rss_bytes for one in found if one is not None) / 2**20 if all(found) else None
        )

    def wait_for(self, count: int, deadline_s: float, every_s: float = 0.05) -> None:
        what = f"{count:,} tasks of {self.name}"
        try:
            wait_until(lambda: self.is_done(count), deadline_s, what, every_s)
        except BenchError as error:
            raise BenchError(f"{error}: {len(self.notes):,} ran") from None

    @abstractmethod
    def connect(self) -> None:
        """Open the connections that scheduling needs."""

    @abstractmethod
    def schedule(self, due: float) -> None:
        """Schedule one task in one call."""

    @abstractmethod
    def schedule_many(self, dues: Sequence[float]) -> None:
        """Schedule many tasks in the fastest available way."""

    @abstractmethod
    def holds(self, count: int) -> bool:
        """Return whether `count` near tasks have arrived where they wait for their due time."""

    def is_done(self, count: int) -> bool:
        """Return whether `count` tasks have run, and no due task waits."""
        return len(self.notes) >= count

    def ended_at(self) -> float:
        """Return the time when the last task ended."""
        return max(note.ended for note in self.notes.read())

    def lateness_ms(self) -> list[float]:
        """Return how late each task began."""
        return [(note.began - note.due) * 1000 for note in self.notes.read()]

    def clear(self) -> None:
        """Delete all tasks."""
        self.notes.clear()

    def _start_worker(self, name: str, pool: Sequence[str]) -> BenchmarkProcess:
        return processes.worker(self.app_path, name, self.folder, self.notes.path, pool)

    def _start_others(self) -> list[BenchmarkProcess]:
        return []

    def _wait_for_start(self, names: list[str]) -> None:
        def answer() -> bool:
            for process in self.workers:
                if not process.is_alive:
                    raise BenchError(f"{process.name} did not start")
            return len(self.app.control.ping(destination=names, timeout=0.5)) == len(names)

        wait_until(answer, START_S, f"{', '.join(names)} to answer")
        self._warm_up(names)

    def _warm_up(self, names: list[str]) -> None:
        self.clear()
        now, count = wall(), WARM_UP * len(names)
        for _ in range(count):
            self.schedule(now)
        self.wait_for(count, START_S)


class Ours(Side):
    """delaytasks with a beat, as documented. Times are from the rows, by the database's clock."""

    name = "delaytasks"
    timer = "eta"
    app = ours.app
    delays = ours.delays
    app_path = "benchmarks.ours:app"

    def connect(self) -> None:
        runtime_of(self.delays).clock.now()

    def schedule(self, due: float) -> None:
        self.delays.schedule_delay(ours.TAG, {"due": due}, at=instant(due))

    def schedule_many(self, dues: Sequence[float]) -> None:
        self.delays.schedule_many((ours.TAG, {"due": due}, instant(due)) for due in dues)

    def holds(self, count: int) -> bool:
        return sum(self.held().values()) >= count

    def held(self) -> dict[str, int]:
        """Return the number of near tasks that each worker holds."""
        answers = self.app.control.inspect(timeout=1).stats() or {}
        return {name: answer["delaytasks"]["held"] for name, answer in answers.items()}

    def is_done(self, count: int) -> bool:
        return len(self.notes) >= count and not table.has_unfinished_due()

    def ended_at(self) -> float:
        return table.last_settled_at()

    def lateness_ms(self) -> list[float]:
        return table.lateness_ms()

    def clear(self) -> None:
        table.clear()
        self.notes.clear()

    def _start_others(self) -> list[BenchmarkProcess]:
        return [processes.beat(self.app_path, self.folder)]


class OursInRedis(Ours):
    """delaytasks with the redis timer."""

    name = "delaytasks_redis"
    timer = "redis"
    app = ours.redis_app
    delays = ours.redis_delays
    app_path = "benchmarks.ours:redis_app"

    def holds(self, count: int) -> bool:
        return redis_server.near_entries() >= count


class DurableEta(Ours):
    """Celery tasks whose messages wait as rows. Times are from the notes of the tasks."""

    name = "delaytasks_eta"

    def schedule(self, due: float) -> None:
        ours.note_celery_task.apply_async((due,), eta=instant(due))

    def schedule_many(self, dues: Sequence[float]) -> None:
        with table.session() as session, session.begin(), self.delays.transaction(session):
            for due in dues:
                self.schedule(due)

    def dispatched_at(self) -> float:
        """Return the time when the broker had confirmed the last message."""
        return table.last_settled_at()

    def ended_at(self) -> float:
        return Side.ended_at(self)

    def lateness_ms(self) -> list[float]:
        return Side.lateness_ms(self)


class OursDirect(Ours):
    """delaytasks without a broker: `delaytasks run --forever` and no beat."""

    name = "delaytasks_direct"
    timer = "direct"
    app = ours.direct_app
    delays = ours.direct_delays
    app_path = "benchmarks.ours:direct_app"

    def _start_worker(self, name: str, pool: Sequence[str]) -> BenchmarkProcess:
        return processes.drainer(self.app_path, name, self.folder, self.notes.path)

    def _start_others(self) -> list[BenchmarkProcess]:
        return []

    def _wait_for_start(self, names: list[str]) -> None:
        self._warm_up(names)


class Bare(Side):
    """Celery's own eta. Times are from the notes of the tasks."""

    name = "celery"
    app = bare.app
    app_path = "benchmarks.bare:app"

    def connect(self) -> None:
        with bare.app.pool.acquire() as connection:
            connection.ensure_connection(max_retries=1)

    def schedule(self, due: float) -> None:
        bare.note_task.apply_async((due,), eta=instant(due))

    def schedule_many(self, dues: Sequence[float]) -> None:
        for due in dues:
            self.schedule(due)

    def holds(self, count: int) -> bool:
        return brokers.waiting(BARE_QUEUE) == 0
