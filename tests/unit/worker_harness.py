"""Runtimes of workers without Celery's worker, and dispatchers with a simulated pool and clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from delaytasks import DelayTasks
from delaytasks.core.events import Events
from delaytasks.core.interfaces import Entry
from delaytasks.core.policies import Stamp
from delaytasks.core.settings import load_settings
from delaytasks.runtime import runtime_of
from delaytasks.worker import chunk_queue, pool
from delaytasks.worker.celery_tasks import processes_of
from delaytasks.worker.chunk_queue import UnfinishedWork
from delaytasks.worker.chunk_request import ChunkRequest
from delaytasks.worker.dispatcher import CapacityRequest, Dispatcher
from delaytasks.worker.shared_memory import OthersWait
from delaytasks.worker.worker_runtime import WorkerRuntime
from tests.recording import ManualClock

# -- runtimes of workers without Celery's worker --------------------------------------------------


class WorkerDouble:
    """Simulate the parts of Celery's worker that the runtime uses."""

    hostname = "w@test"
    delays: Any = None
    hub = None
    consumer: Any = None

    class pool:
        limit = 1
        info: dict[str, Any] = {}

        @staticmethod
        def apply_async(*args: Any, **options: Any) -> object:
            return object()


def make_runtime(place: Path | str, **settings: Any) -> WorkerRuntime:
    """Return a runtime on the database of this URL, or on an SQLite file in this folder."""
    app = Celery("test", broker="memory://", set_as_current=False)
    delays = DelayTasks(
        app, place if isinstance(place, str) else f"sqlite:///{place / 'test.db'}", **settings
    )
    with runtime_of(delays).store.database.begin() as connection:
        runtime_of(delays).store.schema.metadata.create_all(connection)
    return worker_runtime_of(delays)


_made: list[DelayTasks] = []


def worker_runtime_of(delays: DelayTasks) -> WorkerRuntime:
    _made.append(delays)
    worker = WorkerDouble()
    worker.delays = delays
    return WorkerRuntime(runtime_of(delays), processes_of(runtime_of(delays).celery), worker)


def stop_loops(runtime: WorkerRuntime) -> None:
    """Stop the loops of a runtime. In a worker they run until the process ends."""
    for loop in runtime.watchdog.loops:
        loop.stop()


def close_all() -> None:
    """Close the `DelayTasks` of each runtime. Python 3.13 warns of connections that stay open."""
    while _made:
        _made.pop().close()


# -- A dispatcher with a simulated pool and clock -------------------------------------------------


class Pool:
    """A pool of two processes, whose requests end when a test calls `end`."""

    limit = 2

    def __init__(self) -> None:
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


class DispatcherHarness:
    def __init__(self, **settings: Any) -> None:
        self.clock = ManualClock(datetime(2030, 1, 1, tzinfo=timezone.utc))
        self.events = Events()
        self.pool = Pool()
        self.held: list[Entry] = []
        self.sent_back: list[UnfinishedWork] = []
        self.capacity_request = CapacityRequest()
        self.others_wait = OthersWait()
        self.dispatcher = Dispatcher(
            load_settings({}, {}, **settings),
            self.clock,
            self.events,
            self.pool,
            call_soon=lambda call: call(),
            near_entries=self,
            capacity_request=self.capacity_request,
            send_back=self.sent_back.append,
            policy_stamp=Stamp,
            sends_events=lambda: False,
            others_wait=self.others_wait,
        )

    def hold(self, entries: Sequence[Entry]) -> list[Entry]:
        self.held += entries
        return []

    def entries(self, count: int, priority: int = 0, start: int = 1) -> list[Entry]:
        now = self.clock.now_us()
        return [Entry(start + n, 0, now, "default", priority) for n in range(count)]

    def continue_s(self) -> list[float]:
        return [request.continue_s for request, _, _ in self.pool.requests]

    def sizes(self) -> list[int]:
        return [len(request.entries) for request, _, _ in self.pool.requests]


class Hands:
    """Replace the monotonic clock of the chunk queue by one that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = 1000.0
        for module in (pool, chunk_queue):
            monkeypatch.setattr(module, "monotonic", lambda: self.at)


# -- A monotonic clock that a test sets -----------------------------------------------------------


class ManualMonotonic:
    """Replaces `time.monotonic`."""

    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at
