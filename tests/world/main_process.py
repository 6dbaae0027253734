"""`MainProcess`, the main process of a worker, whose pool runs a chunk when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from delaytasks import DelayedTask
from delaytasks.core.interfaces import Entry
from delaytasks.execution.runner import Report
from delaytasks.worker import chunk_request
from delaytasks.worker.chunk_request import ChunkRequest
from delaytasks.worker.processes import Processes
from delaytasks.worker.worker_runtime import WorkerRuntime
from tests.world.world import World


class Pool:
    """A pool whose requests end when a test calls `end`."""

    info: dict[str, Any] = {}

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.requests: list[tuple[ChunkRequest, Callable[[Any], None], Callable[[Any], None]]] = []
        self.is_broken = False

    def apply_async(self, function: Any, args: Any, callback: Any, error_callback: Any) -> object:
        if self.is_broken:
            raise OSError("no more pipes")
        self.requests.append((args[0], callback, error_callback))
        return object()

    def end(self, report: Any) -> ChunkRequest:
        request, callback, _ = self.requests.pop(0)
        callback(report)
        return request


class CeleryWorker:
    """The parts of Celery's worker that the runtime uses."""

    hostname = "w@test"
    hub = consumer = None

    def __init__(self, pool: Any) -> None:
        self.pool = pool


class SteppedCeleryWorker(CeleryWorker):
    """Makes the calls of the event loop immediately."""

    @staticmethod
    def call_soon(call: Callable[[], object]) -> None:
        call()


def run_chunk(world: World, *tasks: DelayedTask) -> Report:
    """Run a chunk in a process of the pool, which has the policies that its main process names:
    none."""
    chunk = ChunkRequest(tuple(map(Entry.of, tasks)), policies=None)
    with mock.patch.object(chunk_request, "current_app", world.runtime.celery):
        return chunk_request.run_chunk(chunk)


class MainProcess:
    """The main process of a worker.

    Parameters
    ----------
    world
        The world that the worker belongs to.
    processes
        The number of the pool's processes.
    is_stepped
        Whether the thread that calls also sends the chunks, so that a test needs no loop.
    """

    def __init__(self, world: World, processes: int = 2, is_stepped: bool = True) -> None:
        self.world = world
        self.pool = Pool(processes)
        self.processes = Processes(lambda: world.runtime)
        self.processes.queues = ["default"]
        worker = (SteppedCeleryWorker if is_stepped else CeleryWorker)(self.pool)
        self.runtime = WorkerRuntime(world.runtime, self.processes, worker)
        self.dispatcher = self.runtime.dispatcher
        self.clock: Any = self.runtime.clock

    def close(self) -> None:
        """Stop the loops. In a worker they run until the process ends."""
        for loop in self.runtime.watchdog.loops:
            loop.stop()

    def entries(self, count: int, priority: int = 0, start: int = 1) -> list[Entry]:
        """Return entries that are due now."""
        now = self.clock.now_us()
        return [Entry(start + n, 0, now, "default", priority) for n in range(count)]

    def take(self, count: int, priority: int = 0, start: int = 1) -> None:
        """Take entries that are due now."""
        self.dispatcher.take(self.entries(count, priority, start))

    def drain(self, queue: str = "default", *priorities: int) -> None:
        """Start to drain a queue."""
        self.dispatcher.start_drain(queue, priorities or [0])

    def end(self, rows: int = 10, row_s: float = 0.001, **report: Any) -> ChunkRequest:
        """End the oldest chunk, of which that many rows ran in that time each."""
        return self.pool.end(Report(rows, rows, rows * row_s, **report))

    @property
    def requests(self) -> list[ChunkRequest]:
        """The chunks in the pool."""
        return [request for request, _, _ in self.pool.requests]

    def sizes(self) -> list[int]:
        return [len(request.entries) for request in self.requests]

    def drained(self) -> list[str | None]:
        return [request.drained_queue for request in self.requests]

    def continue_s(self) -> list[float]:
        return [request.continue_s for request in self.requests]
