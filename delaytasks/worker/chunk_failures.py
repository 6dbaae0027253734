"""Chunks that failed as a whole, and pool processes in which all chunks fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from billiard.exceptions import WorkerLostError

from delaytasks.core.events import Events
from delaytasks.worker.pool import Pool

#: A process is replaced after this many failed chunks in a row.
MAX_FAILED_CHUNKS = 3


class ChunkFailure(NamedTuple):
    """Why a chunk failed."""

    error: str
    cause: BaseException | None
    #: Whether the database may be unavailable. It is not the reason if the chunk's process died.
    is_down: bool
    #: Whether the chunk's process could not report the failure.
    is_unreported: bool
    #: Whether the process has logged why the chunk failed, or the pool how the process died.
    is_logged: bool

    @classmethod
    def of(cls, info: Any) -> ChunkFailure:
        """Read what the pool passes to its callback, or the error of a report."""
        kind = getattr(info, "type", None)
        is_down = kind is not WorkerLostError
        return cls(
            str(getattr(info, "exception", info)),
            info if isinstance(info, BaseException) else None,
            is_down,
            is_down and kind is not None,
            isinstance(info, str) or not is_down,
        )


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
