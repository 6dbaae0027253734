"""Celery's pool: how many chunks it runs, which process has which chunk, and lost chunks."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from delaytasks.core.events import Events
from delaytasks.worker.celery_compat.versions import mark_busy
from delaytasks.worker.job import Job, run_job

#: A process is replaced after this many failed chunks in a row.
MAX_FAILED_CHUNKS = 3


def freeze_loaded_objects() -> None:
    """Exempt everything that is loaded from garbage collection. Called before the pool forks.

    In a process that has loaded Celery, SQLAlchemy and a project, a full collection stops
    everything for 50 to 100 ms, and a burst of tasks causes several. In addition, memory pages
    that the forked processes share stay shared.
    """
    gc.collect()
    gc.freeze()


class Sent(NamedTuple):
    """A chunk that was sent to the pool."""

    job: Job
    #: The pool's result object, or None if the pool takes no more work.
    result: Any
    #: The processes that the pool had at that time.
    pids: frozenset[int]

    @property
    def is_forgotten(self) -> bool:
        """Whether Celery made its prefork pool forget the chunk.

        When a worker loses the broker, and when it stops, Celery forgets every job that no process
        has confirmed. It takes them for messages that the broker delivers again. Some of these
        jobs have reached a process nevertheless.
        """
        cache = getattr(self.result, "_cache", None)
        # The order matters: a job that ends meanwhile is ready before it leaves the cache.
        return cache is not None and self.result._job not in cache and not self.result.ready()

    def restore(self) -> bool:
        """Put the chunk back into the pool's cache; return False if no process has it."""
        if self.process is None:
            return False
        self.result._cache[self.result._job] = self.result
        return True

    @property
    def process(self) -> Any:
        """The process of a prefork pool that has the chunk, or None.

        The pool assigns the chunks of a process that died to its successor, which does not have
        them. Such a successor is younger than the chunk.
        """
        process = getattr(self.result, "_write_to", None)
        has_it = process is not None and process.pid in self.pids and process._is_alive()
        return process if has_it else None


class Pool:
    """May be used from one thread only: that of the event loop, if there is one."""

    def __init__(self, celery_pool: Any) -> None:
        self._celery_pool = celery_pool
        #: The chunks in the pool, by number.
        self.sent: dict[int, Sent] = {}

    @property
    def size(self) -> int:
        """How many chunks the pool runs simultaneously."""
        pool = self._celery_pool
        return int(getattr(pool, "num_processes", None) or pool.limit or 1)

    def send(self, job: Job, done: Callable[[Any], None], lost: Callable[[Any], None]) -> Sent:
        """Send a chunk. A solo pool runs it within this call; other pools may be as quick."""
        pids = self._processes()
        result = self._celery_pool.apply_async(
            run_job, args=(job,), callback=done, error_callback=lost
        )
        return Sent(job, result, pids)

    def _processes(self) -> frozenset[int]:
        """Return the processes of a prefork pool. Other pools have none of their own."""
        processes = getattr(getattr(self._celery_pool, "_pool", None), "_pool", ())
        return frozenset(process.pid for process in processes)

    def end_process(self, pid: int) -> bool:
        """End one of the pool's processes, which the pool then replaces.

        Return False if the pool has no such process. The signal is SIGKILL, since a broken process
        may be unable to end by itself.
        """
        if pid not in self._processes():
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        return True

    def pid_of(self, number: int) -> int:
        """Return the process that has this chunk, or 0 if it is unknown."""
        sent = self.sent.get(number)
        pids: Sequence[int] = (
            getattr(sent.result, "worker_pids", tuple)() if sent is not None else ()
        )
        return next(iter(pids), 0)

    def pids(self) -> set[int]:
        """Return the processes that are known to have chunks."""
        results = [sent.result for sent in list(self.sent.values())]
        return {pid for result in results for pid in getattr(result, "worker_pids", tuple)() if pid}

    def recall(self) -> list[tuple[int, Job]]:
        """Restore the forgotten chunks that a process has; return those that no process has.

        Otherwise the former would occupy their processes forever, and a process that ends would
        wait for half a minute until its result is read.
        """
        forgotten = [(number, sent) for number, sent in self.sent.items() if sent.is_forgotten]
        lost = [(number, sent.job) for number, sent in forgotten if not sent.restore()]
        processes = [sent.process for sent in self.sent.values()]
        mark_busy(self._celery_pool, [one for one in processes if one is not None])
        return lost


@dataclass
class ChunkFailures:
    """The failed chunks of one process since its last chunk that succeeded."""

    count: int = 0
    #: Whether the database cannot be the cause of one of them.
    is_not_databases: bool = False


class FailingProcesses:
    """Replaces pool processes in which every chunk fails because a processor broke the process.

    For example, the process has no file descriptors or no memory left, or its recursion limit was
    changed. Not thread-safe: the lock of the dispatcher guards it.
    """

    def __init__(self, pool: Pool, events: Events) -> None:
        self._pool = pool
        self._events = events
        self._failures: dict[int, ChunkFailures] = {}

    def chunk_succeeded(self, pid: int) -> None:
        """The database answers this process, so it is not the cause of the others' failures."""
        self._failures.pop(pid, None)
        for failures in self._failures.values():
            failures.is_not_databases = True

    def chunk_failed(self, pid: int, error: str, is_stores_error: bool) -> None:
        """Count a chunk that failed as a whole, and replace its process if it is broken."""
        failures = self._failures.setdefault(pid, ChunkFailures())
        failures.count += 1
        failures.is_not_databases |= not is_stores_error
        if failures.is_not_databases and failures.count >= MAX_FAILED_CHUNKS:
            self._failures.pop(pid, None)
            if self._pool.end_process(pid):
                self._events.emit(
                    "process.replaced", pid=pid, failed_chunks=failures.count, error=error
                )
