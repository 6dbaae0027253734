"""Reads the policies and the requests to cancel tasks once a second, and reports database outages.

The loop has a thread of its own, since a sweep may take longer than a pause should take to work.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from delaytasks.loops import Loop
from delaytasks.model.clock import monotonic
from delaytasks.model.errors import StoreError, StoreUnavailableError
from delaytasks.model.policies import POLICY_REFRESH_S, Policies
from delaytasks.worker.pool import running_pids

if TYPE_CHECKING:
    from delaytasks.worker.worker_runtime import WorkerRuntime

#: A database that has not answered a question for this long counts as unavailable.
DATABASE_ANSWER_S = 5.0
#: A read that takes longer is stuck, and a fresh thread with a new connection replaces it.
POLICY_READ_S = 10.0


class PoliciesLoop:
    """Passes changed policies and requests on to the dispatcher and to the pool's processes.

    It asks the database each second, so it also logs each outage of the database once when it
    begins and once when it ends.
    """

    def __init__(self, worker: WorkerRuntime) -> None:
        self._runtime = runtime = worker.runtime
        self._worker = worker
        self._seen: Policies | None = None
        self._seen_requests = 0
        self._lock = threading.Lock()
        #: When the database was found unavailable, and when it was asked a question that it has
        #: not answered yet.
        self._down_since: float | None = None
        self._asked_at: float | None = None
        self.loop = Loop("policies", self._turn, runtime.events, POLICY_READ_S, runtime.store.close)

    def _turn(self) -> float:
        cache = self._runtime.policy_cache
        cache.is_led = True
        # A sweep reads the policies as well, so that the turn before may know older ones.
        before = self._seen or cache.known
        with self._lock:
            if self._asked_at is None:
                self._asked_at = monotonic()
        try:
            now = cache.refresh()
        except StoreUnavailableError as error:
            if error.is_locked:
                self._mark_up()
            else:
                self._mark_down(error)
            return POLICY_REFRESH_S
        except StoreError:  # the database has answered, with a refusal
            self._mark_up()
            raise
        self._mark_up()
        self._seen = now
        if now.stamp != before.stamp:
            self._runtime.events.emit("policies.read")
            self._worker.dispatcher.limits_changed(now.limits_changed_from(before))
        # The same statement reads the number of requests.
        if (requests := cache.cancel_requests) != self._seen_requests:
            self._pass_on_requests()
            self._seen_requests = requests
        return POLICY_REFRESH_S

    def _pass_on_requests(self) -> None:
        """Tell the processes which of their rows were asked to stop."""
        processes = self._worker.processes
        names = [processes.name(pid) for pid in running_pids(self._worker.celery_worker.pool)]
        processes.requested_runs.record(self._runtime.store.tasks.cancel_requests.of(names))

    # -- outages of the database ------------------------------------------------------------------

    def check_answer(self) -> None:
        """Report an outage if the database owes an answer: the loop's thread may wait for it."""
        asked_at = self._asked_at
        if asked_at is not None and asked_at < monotonic() - DATABASE_ANSWER_S:
            self._mark_down(f"no answer for {DATABASE_ANSWER_S:g} s")

    def _mark_down(self, error: object) -> None:
        with self._lock:
            self._asked_at = None
            is_new = self._down_since is None
            if is_new:
                self._down_since = monotonic()
        if is_new:
            self._runtime.events.emit("store.down", error=str(error))

    def _mark_up(self) -> None:
        with self._lock:
            self._asked_at = None
            since, self._down_since = self._down_since, None
        if since is not None:
            self._runtime.events.emit("store.up", away_s=round(monotonic() - since, 1))
