"""Pool processes in which every chunk fails, because a processor broke the process: its recursion limit, its file
descriptors, its memory. A fresh process takes such a process's place."""

from __future__ import annotations

from dataclasses import dataclass

from delaytasks.core.events import Events
from delaytasks.worker.pool import Pool

#: Chunks that failed in a row before their process is replaced.
MOST_FAILURES = 3


@dataclass
class Failures:
    """Those of one process, since its last chunk that did not fail."""

    count: int = 0
    #: Whether one of them can not be the database's fault.
    is_its_own: bool = False


class Failing:
    """Not thread-safe: the dispatcher's lock guards it."""

    def __init__(self, pool: Pool, events: Events) -> None:
        self._pool = pool
        self._events = events
        self._processes: dict[int, Failures] = {}

    def succeeded(self, pid: int) -> None:
        """The database answers this process, so that it is not what the other ones fail for."""
        self._processes.pop(pid, None)
        for failures in self._processes.values():
            failures.is_its_own = True

    def failed(self, pid: int, error: str, is_stores: bool) -> None:
        """A chunk failed as a whole; `is_stores` is whether the database refused it or could not be reached."""
        failures = self._processes.setdefault(pid, Failures())
        failures.count += 1
        failures.is_its_own |= not is_stores
        if failures.is_its_own and failures.count >= MOST_FAILURES:
            self._processes.pop(pid, None)
            if self._pool.end_process(pid):
                self._events.emit(
                    "process.replaced", pid=pid, failed_chunks=failures.count, error=error
                )
