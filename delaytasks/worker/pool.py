"""Chunks, the function that runs them in a process of Celery's pool, and the pool.

The pool knows how many chunks it runs, which process has which chunk, and which chunks were lost.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from celery import current_app
from celery.concurrency import solo

from delaytasks.model.policies import Stamp
from delaytasks.model.task import Entry
from delaytasks.run.runner import FailureReason, Report, Runner
from delaytasks.worker.processes import processes_of


class ChunkRequest(NamedTuple):
    """A chunk: due entries, or a queue to drain, or a waitlist to serve."""

    entries: tuple[Entry, ...]
    #: The queue whose oldest overdue rows are claimed, and the priorities of these rows.
    drained_queue: str | None = None
    priorities: tuple[int, ...] = ()
    #: How many rows the chunk may claim.
    limit: int = 0
    sends_events: bool = False
    #: Distinguishes the chunks of a worker.
    number: int = 0
    #: The stamp of the policies, or None if the main process has read none yet.
    policies: Stamp | None = Stamp()
    #: The queue and the tag of a waitlist.
    waitlist: tuple[str, str] | None = None
    #: Other processes serve the waitlist: start what may start now, and return.
    is_probe: bool = False
    #: How long the process may continue with waitlists.
    serve_s: float = 0.0
    #: How long the process may continue with further chunks of a drain.
    continue_s: float = 0.0

    def work(self, runner: Runner) -> Callable[[], Report]:
        """Return the call that runs the chunk, which is no frame of its own in a traceback."""
        if self.waitlist is not None:
            return partial(runner.run_waitlist, *self.waitlist, self.limit, self.serve_s)
        if self.drained_queue is None:
            return partial(runner.run, self.entries, self.serve_s)
        limits = self.limit, self.serve_s, self.continue_s
        return partial(runner.run_due, self.drained_queue, self.priorities, *limits)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle entries as plain tuples, which takes the main process a seventh of the time."""
        return _unpickle, (tuple(map(tuple, self.entries)), *self[1:])


def _unpickle(entries: tuple[Any, ...], *others: Any) -> ChunkRequest:
    return ChunkRequest(tuple(map(Entry._make, entries)), *others)


def run_chunk(request: ChunkRequest) -> Report:
    """Run a chunk in a pool process, in a thread, or inline. The current app is the worker's.

    A failure is returned as text, since not every pool reports exceptions.
    """
    processes, runner = processes_of(current_app), None
    try:
        processes.began_chunk()
        # While the process continues with a drain, the main process sends it no further stamps.
        is_led = request.continue_s == 0
        processes.runtime.policy_cache.follow(request.policies, is_led)
        runner = processes.runner(request.sends_events)
        return request.work(runner)()
    except Exception as error:
        # Not as an event, which would be counted twice if the main process runs the chunk.
        processes.runtime.events.log("chunk.failed", {"error": error})
        text = f"{type(error).__name__}: {error}"
        detached = runner.detached if runner is not None else ()
        return Report(
            pid=os.getpid(), detached=detached, error=text, reason=FailureReason.of(error)
        )
    finally:
        processes.ended_chunk()


# -- Celery's pool ---------------------------------------------------------------------------------


def freeze_loaded_objects() -> None:
    """Exempt everything that is loaded from garbage collection. Called before the pool forks.

    In a process that has loaded Celery, SQLAlchemy and a project, a full collection stops
    everything for 50 to 100 ms, and a burst of tasks causes several. In addition, memory pages
    that the forked processes share stay shared.
    """
    gc.collect()
    gc.freeze()


def running_pids(celery_pool: Any) -> set[int]:
    """Return the processes that run the jobs of a pool: its own ones, or this one.

    A process that the pool is about to start in place of another one has no id yet.
    """
    try:
        info = celery_pool.info or {}
    except AttributeError:
        return set()  # a prefork pool that has stopped has no information
    pids = info.get("processes") or [os.getpid()]
    return {pid for pid in pids if pid is not None}


def is_forgotten(result: Any) -> bool:
    """Return whether Celery made its prefork pool forget the job.

    When a worker loses the broker, and when it stops, Celery forgets every job that no process has
    confirmed. It takes them for messages that the broker delivers again. Some of these jobs have
    reached a process nevertheless.
    """
    cache = getattr(result, "_cache", None)
    # The order matters: a job that ends meanwhile is ready before it leaves the cache.
    return cache is not None and result._job not in cache and not result.ready()


@dataclass
class SentChunk:
    """A chunk in the pool."""

    request: ChunkRequest
    #: When it was sent, by the clock of the database. The leases of the rows that it claims are
    #: renewed.
    began_us: float
    #: The pool's result object, or None if the pool takes no more work.
    result: Any = None
    #: The processes that a prefork pool had at that time. Other pools have none.
    pids: frozenset[int] = frozenset()

    @property
    def process(self) -> Any:
        """The process of a prefork pool that has the job, or None.

        The pool assigns the jobs of a process that died to its successor, which does not have them.
        Such a successor is not in `pids`.
        """
        process = getattr(self.result, "_write_to", None)
        has_it = process is not None and process.pid in self.pids and process._is_alive()
        return process if has_it else None


class Pool:
    """Sends chunks to Celery's pool.

    `send`, `recall` and the size may be used from one thread only: that of the event loop, if
    there is one. The lock of the dispatcher guards `chunks`.
    """

    def __init__(self, celery_pool: Any) -> None:
        self._celery_pool = celery_pool
        #: The chunks in the pool, by number.
        self.chunks: dict[int, SentChunk] = {}

    @property
    def size(self) -> int:
        """How many chunks the pool runs simultaneously."""
        pool = self._celery_pool
        # Before Celery 5.7, a pool of greenlets counts those that run as its processes.
        if getattr(pool, "is_green", False):
            return int(pool.limit or 1)
        return int(getattr(pool, "num_processes", None) or pool.limit or 1)

    @property
    def runs_inline(self) -> bool:
        """Whether a chunk runs in the thread of the event loop, which must not be busy for long."""
        return isinstance(self._celery_pool, solo.TaskPool)

    def send(
        self, chunk: SentChunk, done: Callable[[Any], None], lost: Callable[[Any], None]
    ) -> None:
        """Send a chunk. A solo pool runs it within this call; other pools may be as quick."""
        processes = getattr(getattr(self._celery_pool, "_pool", None), "_pool", ())
        chunk.pids = frozenset(process.pid for process in processes if process.pid is not None)
        chunk.result = result = self._celery_pool.apply_async(
            run_chunk, args=(chunk.request,), callback=done, error_callback=lost
        )
        if hasattr(result, "_on_timeout_set"):
            # The app's `task_time_limit` is for messages. A chunk has many tasks, and the limit
            # would end all of them. A pool with such a limit applies it to every job that it
            # accepts.
            result._on_timeout_set = None
            result._timeout = result._soft_timeout = math.inf

    def pids(self) -> set[int]:
        """Return the processes that have reported that they have chunks."""
        results = [chunk.result for chunk in list(self.chunks.values())]
        return {pid for result in results for pid in getattr(result, "worker_pids", list)()}

    def recall(self) -> list[ChunkRequest]:
        """Restore the forgotten chunks that a process has; return those that no process has.

        Otherwise the former would occupy their processes forever, and a process that ends would
        wait for half a minute until its result is read.
        """
        lost, busy = [], set()
        for chunk in self.chunks.values():
            process = chunk.process
            if process is not None:
                busy.add(process.inqW_fd)
            if is_forgotten(chunk.result):
                if process is None:
                    lost.append(chunk.request)
                else:
                    chunk.result._cache[chunk.result._job] = chunk.result
        # Before Celery 5.7 a pool forgets which processes are busy when the worker loses its
        # broker. It could then send a job to a process that runs a long job while others are idle.
        workers = getattr(self._celery_pool, "_pool", None)
        getattr(workers, "_busy_workers", set()).update(busy)
        return lost
