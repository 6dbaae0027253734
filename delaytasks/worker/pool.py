"""Celery's pool: how many chunks it runs, which process has which chunk, and lost chunks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

from celery.concurrency import solo

from delaytasks.model.clock import monotonic
from delaytasks.worker.celery_patches import (
    is_forgotten,
    mark_busy,
    pids_with,
    process_ids,
    process_with,
    put_back,
    without_time_limits,
)
from delaytasks.worker.chunk_request import ChunkRequest, run_chunk

#: After the pool did not take a chunk, it is sent none for this long.
POOL_REST_S = 1.0


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

    request: ChunkRequest
    #: The pool's result object, or None if the pool takes no more work.
    result: Any
    #: The processes that the pool had at that time.
    pids: frozenset[int]


class Pool:
    """Sends chunks to Celery's pool.

    `send`, `recall` and the size may be used from one thread only: that of the event loop, if
    there is one. `forget` and the reading of pids are safe in any thread.
    """

    def __init__(self, celery_pool: Any) -> None:
        self._celery_pool = celery_pool
        #: The chunks in the pool, by number.
        self.sent: dict[int, Sent] = {}
        self._rests_until = 0.0

    @property
    def size(self) -> int:
        """How many chunks the pool runs simultaneously."""
        pool = self._celery_pool
        # Before Celery 5.7, a pool of greenlets counts those that run as its processes.
        if getattr(pool, "is_green", False):
            return int(pool.limit or 1)
        return int(getattr(pool, "num_processes", None) or pool.limit or 1)

    def rest(self) -> None:
        self._rests_until = monotonic() + POOL_REST_S

    @property
    def is_resting(self) -> bool:
        return monotonic() < self._rests_until

    @property
    def runs_inline(self) -> bool:
        """Whether a chunk runs in the thread of the event loop, which must not be busy for long."""
        return isinstance(self._celery_pool, solo.TaskPool)

    def send(
        self, request: ChunkRequest, done: Callable[[Any], None], lost: Callable[[Any], None]
    ) -> Sent:
        """Send a chunk. A solo pool runs it within this call; other pools may be as quick."""
        pids = process_ids(self._celery_pool)
        result = self._celery_pool.apply_async(
            run_chunk, args=(request,), callback=done, error_callback=lost
        )
        without_time_limits(result)
        return Sent(request, result, pids)

    def pid_of(self, number: int) -> int:
        """Return the process that has this chunk, or 0 if it is unknown."""
        sent = self.sent.get(number)
        return next(iter(() if sent is None else pids_with(sent.result)), 0)

    def pids(self) -> set[int]:
        """Return the processes that are known to have chunks."""
        results = [sent.result for sent in list(self.sent.values())]
        return {pid for result in results for pid in pids_with(result) if pid}

    def forget(self, number: int) -> None:
        """Forget a chunk that has ended."""
        self.sent.pop(number, None)

    def recall(self) -> list[ChunkRequest]:
        """Restore the forgotten chunks that a process has; return those that no process has.

        Otherwise the former would occupy their processes forever, and a process that ends would
        wait for half a minute until its result is read.
        """
        lost, busy = [], []
        for sent in self.sent.values():
            process = process_with(sent.result, sent.pids)
            if process is not None:
                busy.append(process)
            if is_forgotten(sent.result):
                if process is None:
                    lost.append(sent.request)
                else:
                    put_back(sent.result)
        mark_busy(self._celery_pool, busy)
        return lost
