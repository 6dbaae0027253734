"""Passes requests to cancel running tasks from the database to the processes that run them.

The loop that reads the policies once a second reads the number of the requests as well. If it has
changed, the main process reads the requests for its own rows, and writes them to memory that its
children share.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from delaytasks.worker.celery_patches import running_pids

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime
    from delaytasks.worker.processes import Processes

#: The most rows of a worker that are asked to stop at the same time.
MOST_ROWS = 1000


class RequestedRuns:
    """The runs of this worker that were asked to stop, by id and version.

    Each number is written as a whole, and the count last.
    """

    def __init__(self) -> None:
        self._memory = memoryview(mmap.mmap(-1, 8 * (1 + 2 * MOST_ROWS))).cast("q")

    def record(self, rows: Sequence[tuple[int, int]]) -> None:
        """Replace the rows."""
        memory = self._memory
        memory[0] = 0
        for number, row in enumerate(rows[:MOST_ROWS]):
            memory[1 + 2 * number], memory[2 + 2 * number] = row
        memory[0] = min(len(rows), MOST_ROWS)

    def has(self, id: int, version: int) -> bool:
        """Return whether this run was asked to stop."""
        memory = self._memory
        if not memory[0]:  # as nearly always
            return False
        return any(
            memory[at] == id and memory[at + 1] == version for at in range(1, 1 + 2 * memory[0], 2)
        )


class CancelRequestReader:
    """Reads the requests for the rows of one worker, in its main process."""

    def __init__(self, runtime: Runtime, processes: Processes, celery_pool: Any) -> None:
        self._requests = runtime.store.tasks.cancel_requests
        self._processes = processes
        self._pool = celery_pool

    def read(self) -> None:
        """Tell the processes which of their rows were asked to stop."""
        names = [self._processes.name(pid) for pid in running_pids(self._pool)]
        self._processes.requested_runs.record(self._requests.of(names))
