"""Chunks that failed as a whole, and pool processes in which all chunks fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from billiard.exceptions import WorkerLostError

from delaytasks.core.events import Events
from delaytasks.execution.failure_reason import FailureReason
from delaytasks.execution.runner import Report
from delaytasks.worker.pool import Pool

#: A process is replaced after this many failed chunks in a row.
MAX_FAILED_CHUNKS = 3


class ChunkFailure(NamedTuple):
    """A chunk that failed as a whole."""

    error: str
    reason: FailureReason
    #: The pool process in which the chunk failed, 0 if it is unknown, or None if the failure says
    #: nothing about a process.
    pid: int | None = None
    cause: BaseException | None = None
    #: Whether the process has logged why the chunk failed, or the pool how the process died.
    is_logged: bool = True

    @classmethod
    def reported(cls, report: Report) -> ChunkFailure:
        """The process caught the error and reported it."""
        return cls(report.error, report.reason, report.pid)

    @classmethod
    def unreported(cls, info: Any, pid: int) -> ChunkFailure:
        """The pool passed `info` instead of a report, because process `pid` could not report."""
        kind, error = getattr(info, "type", None), str(getattr(info, "exception", info))
        if kind is WorkerLostError:
            return cls(error, FailureReason.PROCESS_LOST)
        cause = info if isinstance(info, BaseException) else None
        return cls(error, FailureReason.UNKNOWN, pid, cause, is_logged=False)

    @classmethod
    def not_sent(cls, error: str, cause: Exception | None = None) -> ChunkFailure:
        """The pool did not take the chunk."""
        return cls(error, FailureReason.UNKNOWN, cause=cause, is_logged=cause is None)

    def fields(self) -> dict[str, Any]:
        """Return the fields of the event `chunk.failed`."""
        return {**self._asdict(), "reason": self.reason.value}


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

    def chunk_failed(self, failure: ChunkFailure) -> None:
        """Count a chunk that failed as a whole, and replace its process if it is broken."""
        pid = failure.pid
        if pid is None:
            return
        failures = self._failures.setdefault(pid, ChunkFailures())
        failures.count += 1
        failures.is_not_databases |= failure.reason is FailureReason.UNKNOWN
        if failures.is_not_databases and failures.count >= MAX_FAILED_CHUNKS:
            self._failures.pop(pid, None)
            if self._pool.end_process(pid):
                self._events.emit(
                    "process.replaced", pid=pid, failed_chunks=failures.count, error=failure.error
                )
