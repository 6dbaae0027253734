"""Reads the policies and the requests to cancel tasks once a second.

The loop has a thread of its own, since a sweep may take longer than a pause should take to work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delaytasks.core.errors import StoreError, StoreUnavailableError
from delaytasks.core.loop import Loop
from delaytasks.execution.policy_cache import POLICY_REFRESH_S
from delaytasks.worker.celery_patches import running_pids
from delaytasks.worker.service_watch import DatabaseOutages

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime
    from delaytasks.worker.processes import Processes


#: A read that takes longer is stuck, and a fresh thread with a new connection replaces it.
POLICY_READ_S = 10.0


def policy_loop(
    runtime: Runtime, outages: DatabaseOutages, cancel_requests: CancelRequestReader
) -> Loop:
    """Return the loop. It asks the database each second, so it also reports its outages.

    The same statement reads the number of requests to cancel running tasks.
    """
    cache, seen_requests = runtime.policy_cache, 0

    def read_policies() -> float:
        nonlocal seen_requests
        cache.is_led = True
        before = cache.known.stamp
        outages.mark_asked()
        try:
            now = cache.refresh().stamp
        except StoreUnavailableError as error:
            if error.is_locked:
                outages.mark_up()
            else:
                outages.mark_down(error)
            return POLICY_REFRESH_S
        except StoreError:  # the database has answered, with a refusal
            outages.mark_up()
            raise
        outages.mark_up()
        if now != before:
            runtime.events.emit("policies.read")
        if (requests := cache.cancel_requests) != seen_requests:
            cancel_requests.read()
            seen_requests = requests
        return POLICY_REFRESH_S

    return Loop("policies", read_policies, runtime.events, POLICY_READ_S, runtime.store.close)


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
