"""Runtimes of workers without Celery's worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from celery import Celery

from delaytasks import DelayTasks
from delaytasks.runtime import runtime_of
from delaytasks.worker.celery_tasks import processes_of
from delaytasks.worker.worker_runtime import WorkerRuntime


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
