"""Watches the database, the broker and beat, and follows changes of policies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Set
from typing import TYPE_CHECKING, Any

from delaytasks.events import Events
from delaytasks.loops import Loop
from delaytasks.model.clock import monotonic
from delaytasks.model.errors import StoreError, StoreUnavailableError
from delaytasks.model.policies import Policies
from delaytasks.model.task import Timer
from delaytasks.model.workers import ServiceTimes
from delaytasks.run.policy_cache import POLICY_REFRESH_S
from delaytasks.worker.celery_patches import running_pids

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime
    from delaytasks.worker.processes import Processes


class ServiceWatch:
    """Records when a worker lost a service, for the worker's row.

    Each attribute is written as a whole, so that several threads may use it.

    Parameters
    ----------
    timer
        The timer of the worker.
    check_timer
        Lets a timer that is down try its server, since an idle worker arms nothing.
    """

    def __init__(self, timer: Timer, check_timer: Callable[[], object]) -> None:
        self._timer = timer
        self._check_timer = check_timer
        self._broker_lost_at: float | None = None
        self._timer_lost_at: float | None = None
        self._beat_at = monotonic()

    def mark_broker_lost(self) -> None:
        if self._broker_lost_at is None:
            self._broker_lost_at = monotonic()

    def mark_broker_back(self) -> None:
        if self._broker_lost_at is not None:
            self._beat_at = monotonic()  # no message of beat could arrive in the meantime
        self._broker_lost_at = None

    def mark_beat(self) -> None:
        """Record a message of beat."""
        self._beat_at = monotonic()

    def times(self, reads_beat: bool) -> ServiceTimes:
        """Return the present times. `reads_beat`: the worker consumes beat's messages."""
        if not self._timer.is_up:
            self._check_timer()
        now = monotonic()
        if self._timer.is_up:
            self._timer_lost_at = None
        elif self._timer_lost_at is None:
            self._timer_lost_at = now
        broker_lost_at, timer_lost_at = self._broker_lost_at, self._timer_lost_at
        return ServiceTimes(
            None if broker_lost_at is None else now - broker_lost_at,
            None if timer_lost_at is None else now - timer_lost_at,
            now - self._beat_at if reads_beat else None,
        )


#: A database that has not answered a question for this long counts as unavailable.
DATABASE_ANSWER_S = 5.0


class DatabaseOutages:
    """Logs each outage of the database once when it begins and once when it ends. Thread-safe."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._lock = threading.Lock()
        #: When the database was found unavailable, and when it was asked a question that it has
        #: not answered yet.
        self._down_since: float | None = None
        self._asked_at: float | None = None

    def mark_asked(self) -> None:
        with self._lock:
            if self._asked_at is None:
                self._asked_at = monotonic()

    def mark_down(self, error: object) -> None:
        with self._lock:
            self._asked_at = None
            is_new = self._down_since is None
            if is_new:
                self._down_since = monotonic()
        if is_new:
            self._events.emit("store.down", error=str(error))

    def mark_up(self) -> None:
        with self._lock:
            self._asked_at = None
            since, self._down_since = self._down_since, None
        if since is not None:
            self._events.emit("store.up", away_s=round(monotonic() - since, 1))

    def check_answer(self) -> None:
        """Mark the database if it owes an answer; the thread that asked may still be waiting."""
        asked_at = self._asked_at
        if asked_at is not None and asked_at < monotonic() - DATABASE_ANSWER_S:
            self.mark_down(f"no answer for {DATABASE_ANSWER_S:g} s")


class DatabaseContact:
    """Measures for how long this process has reached the database without an interruption.

    A process that did not reach the database cannot tell a worker that died from one that could
    not report. A process that was suspended cannot tell either.
    """

    def __init__(self, gap_s: float) -> None:
        """After `gap_s` without an answer the contact begins anew."""
        self._gap_s = gap_s
        self._since = self._answered_at = float("-inf")

    def mark_answered(self) -> None:
        now = monotonic()
        if now - self._answered_at > self._gap_s:
            self._since = now
        self._answered_at = now

    def mark_failed(self) -> None:
        self._answered_at = float("-inf")

    @property
    def seconds(self) -> float:
        now = monotonic()
        return 0.0 if now - self._answered_at > self._gap_s else now - self._since


# -- Reads the policies and the requests to cancel tasks once a second ----------------------------

# The loop has a thread of its own, since a sweep may take longer than a pause should take to work.


#: A read that takes longer is stuck, and a fresh thread with a new connection replaces it.
POLICY_READ_S = 10.0


def policy_loop(
    runtime: Runtime,
    outages: DatabaseOutages,
    cancel_requests: CancelRequestReader,
    limits_changed: Callable[[Set[str]], object],
) -> Loop:
    """Return the loop. It asks the database each second, so it also reports its outages.

    The same statement reads the number of requests to cancel running tasks. `limits_changed` gets
    the tags whose limits have changed.
    """
    cache, seen_requests = runtime.policy_cache, 0
    seen: Policies | None = None

    def read_policies() -> float:
        nonlocal seen_requests, seen
        cache.is_led = True
        # A sweep reads the policies as well, so that the turn before may know older ones.
        before = seen or cache.known
        outages.mark_asked()
        try:
            now = cache.refresh()
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
        seen = now
        if now.stamp != before.stamp:
            runtime.events.emit("policies.read")
            limits_changed(now.limits_changed_from(before))
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
