"""`MainProcess`, the main process of a worker, whose pool runs a chunk when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

from billiard.einfo import ExceptionInfo
from billiard.exceptions import WorkerLostError

# A worker loads this module when it meets a limit. A manual clock reaches only loaded modules.
import delaytasks.limits.tracked_waitlists  # noqa: F401
from delaytasks import DelayedTask, DelayTasks
from delaytasks.broker.direct import TablePoller
from delaytasks.model.task import Entry
from delaytasks.run.runner import Report
from delaytasks.runtime import runtime_of
from delaytasks.worker import pool as worker_pool
from delaytasks.worker.consumer import add_queues
from delaytasks.worker.pool import ChunkRequest
from delaytasks.worker.processes import Processes, logical_queues
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

    def end(self, report: Any, number: int = 0) -> ChunkRequest:
        request, callback, _ = self.requests.pop(number)
        callback(report)
        return request


class CeleryWorker:
    """The parts of Celery's worker that the runtime uses."""

    hub: Any = None
    consumer = None

    def __init__(self, pool: Any, hostname: str) -> None:
        self.pool, self.hostname = pool, hostname


class SteppedCeleryWorker(CeleryWorker):
    """Makes the calls of the event loop immediately."""

    hub = SimpleNamespace(call_soon=lambda call: call())


def run_chunk(world: World, *tasks: DelayedTask, queue: str | None = None) -> Report:
    """Run a chunk in a process of the pool: these tasks, or the due tasks of a queue. The process
    has the policies that its main process names: none."""
    entries = tuple(map(Entry.of, tasks))
    chunk = ChunkRequest(entries, queue, (0,), 10, policies=None, serve_s=1)
    with mock.patch.object(worker_pool, "current_app", world.runtime.celery):
        return worker_pool.run_chunk(chunk)


def served_queues(delays: DelayTasks, *chosen: str) -> tuple[list[str], set[str]]:
    """Return our queues of a worker that runs with `-Q chosen`, and all queues that it consumes."""
    runtime = runtime_of(delays)
    if chosen:
        runtime.celery.amqp.queues.select(chosen)
    consumed = add_queues(runtime)
    return logical_queues(consumed, delays.settings.namespace), set(consumed)


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
    name
        The name of the worker.
    """

    def __init__(
        self, world: World, processes: int = 2, is_stepped: bool = True, name: str = "w@test"
    ) -> None:
        self.world = world
        self.pool = Pool(processes)
        self.processes = Processes(lambda: world.runtime)
        self.processes.queues = ["default"]
        worker = (SteppedCeleryWorker if is_stepped else CeleryWorker)(self.pool, name)
        self.runtime = WorkerRuntime(world.runtime, self.processes, worker)
        self.dispatcher = self.runtime.dispatcher
        self.clock: Any = self.runtime.clock

    def close(self) -> None:
        """Stop the loops. In a worker they run until the process ends."""
        for loop in self.runtime.loops:
            loop.stop()

    def entries(self, count: int, priority: int = 0, start: int = 1) -> list[Entry]:
        """Return entries that are due now."""
        now = self.clock.now_us()
        return [Entry(start + n, 0, now, "default", priority) for n in range(count)]

    def take(self, entries: int | Sequence[Entry], start: int = 1) -> None:
        """Take entries, or a number of new ones, that are due now."""
        if isinstance(entries, int):
            entries = self.entries(entries, start=start)
        self.dispatcher.take(entries)

    def pump(self) -> None:
        """Fill the free processes, and leave late entries to the table."""
        self.dispatcher.pump()

    def look(self) -> None:
        """Let the loop of the dispatcher take a turn, which pumps if it is time."""
        self.dispatcher.loop._turn()

    def stop(self) -> None:
        """Send back what the worker keeps, as at its stop."""
        self.runtime.stop()

    def ask_for_help(self) -> None:
        """Ask other workers to drain the queues whose entries were left to the table."""
        self.runtime.ask_for_help()

    def request_sweep(self, partition: int) -> None:
        """Request a sweep, as a message of beat does."""
        self.runtime.sweep_loop.request(partition)

    def arm_again(self) -> None:
        """Let the next sweep arm all near rows again, as after a loss of the broker."""
        self.runtime.sweep_loop.arm_again()

    def sweep_turn(self) -> None:
        """Let the thread that sweeps take one turn."""
        self.runtime.sweep_loop._turn()

    def poll(self, is_woken: bool = False, hears_notices: bool = False) -> float:
        """Let the thread that reads the table take one turn, and return how long it rests."""
        poller = self.runtime.poller
        assert isinstance(poller, TablePoller)
        poller.listener.is_listening = hears_notices
        if is_woken:
            poller._check_at = 0.0
        return poller._turn()

    def drain(self, queue: str = "default", *priorities: int) -> None:
        """Start to drain a queue."""
        self.dispatcher.start_drain(queue, priorities or [0])

    def end(self, rows: int = 10, row_s: float = 0.001, **report: Any) -> ChunkRequest:
        """End the oldest chunk, of which that many rows ran in that time each."""
        seconds = rows * row_s
        return self.pool.end(Report(rows, rows, seconds, **{"sample": (rows, seconds), **report}))

    def sweep(self) -> None:
        """Report the worker, and sweep all partitions, each stage by itself."""
        self.report()
        self.runtime.sweep_loop.request(None)
        self.runtime.sweep_loop._turn()

    def report(self) -> None:
        """Let the thread of the leases report the worker, if it has not signed off."""
        self.runtime.leases_loop._reported_at = float("-inf")
        self.runtime.leases_loop._report()

    def read_policies(self) -> None:
        """Let the thread that reads the policies take one turn."""
        self.runtime.policies_loop._turn()

    def write_counts(self, *reports: Report) -> None:
        """Write what these chunks have counted, and what could not be written before."""
        if self.runtime.statistics is None:
            return
        for report in reports:
            self.runtime.statistics.add(report.statistics)
        self.runtime.statistics.write()

    @property
    def requests(self) -> list[ChunkRequest]:
        """The chunks in the pool."""
        return [request for request, _, _ in self.pool.requests]

    @property
    def held(self) -> int:
        """The number of entries that wait until they are due."""
        return len(self.runtime.wheel)

    def sizes(self) -> list[int]:
        return [len(request.entries) for request in self.requests]

    def drained(self) -> list[str | None]:
        return [request.drained_queue for request in self.requests]

    def continue_s(self) -> list[float]:
        return [request.continue_s for request in self.requests]

    @property
    def waiting(self) -> int:
        """The number of entries that are due and wait for a process."""
        return self.dispatcher.waiting

    @property
    def others_wait(self) -> bool:
        """Whether the processes are told that tasks wait for a process."""
        return self.processes.memory.others_wait

    def capacity(self, coming: int = 0) -> int:
        """Return how many more entries can run in time."""
        return self.dispatcher.capacity(coming)

    def detached(self) -> Mapping[int, Collection[int]]:
        """Return by process the rows that outlive their chunks."""
        return self.dispatcher.running()[1]

    def lose_process(self) -> None:
        """Let the process of the newest chunk die."""
        _, _, lost = self.pool.requests.pop()
        try:
            raise WorkerLostError("exited prematurely")
        except WorkerLostError:
            lost(ExceptionInfo())
