"""Passes requests to cancel running tasks from the database to the processes that run them.

The loop that reads the policies once a second reads the number of the requests as well. If it has
changed, the main process reads the requests for its own rows, and writes them to memory that its
children share.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from delaytasks.core.cancel_request import INTERRUPT
from delaytasks.worker.celery_patches import running_pids
from delaytasks.worker.requested_runs import SIGNAL

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime
    from delaytasks.worker.processes import Processes


class CancelRequestReader:
    """Reads the requests for the rows of one worker, in its main process."""

    def __init__(self, runtime: Runtime, processes: Processes, celery_pool: Any) -> None:
        self._requests = runtime.store.tasks.cancel_requests
        self._processes = processes
        self._pool = celery_pool

    def read(self) -> None:
        """Tell the processes which of their rows were asked to stop."""
        pids = {self._processes.name(pid): pid for pid in running_pids(self._pool)}
        rows = self._requests.of(pids)
        self._processes.requested_runs.record(rows)
        if not self._processes.keeps_time_limits:
            return  # signals reach only the main thread of a process
        for pid in {pids[row.worker] for row in rows if row.request == INTERRUPT}:
            try:
                os.kill(pid, SIGNAL)
            except ProcessLookupError:  # it has just died, and its rows are recovered
                continue
