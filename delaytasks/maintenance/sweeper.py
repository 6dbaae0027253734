"""The sweep: find what the fast path missed, and arm the rows due within the horizon.

Celery beat starts a sweep of every sweep partition each `sweep_s` seconds. If beat is silent, the
workers sweep by themselves. Each sweep partition arms its share of the rows; number 0 also does the
work that concerns the whole table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from delaytasks.core.clock import Clock, from_us, monotonic
from delaytasks.core.events import Events
from delaytasks.core.interfaces import Entry, Recovered, Timer
from delaytasks.core.policies import NO_POLICIES
from delaytasks.core.settings import Settings
from delaytasks.core.text import first_names
from delaytasks.maintenance.drain_requests import DrainRequests, OnStep, StartDrain
from delaytasks.maintenance.pause_sweeper import PauseSweeper

if TYPE_CHECKING:
    from delaytasks.storage.sweep_queries import SweepQueries
    from delaytasks.storage.worker_table import WorkerTable


#: Rows that one statement recovers. Other transactions wait for their locks only briefly.
RECOVER_ROWS = 500


def _start_no_drain(queue: str, priorities: Sequence[int]) -> bool:
    return False


class Sweeper:
    """Sweeps the tables of one database."""

    def __init__(
        self,
        settings: Settings,
        sweeps: SweepQueries,
        workers: WorkerTable,
        clock: Clock,
        timer: Timer,
        events: Events,
        pauses: PauseSweeper | None = None,
        recurring: Callable[[OnStep], object] | None = None,
        purge_statistics: Callable[[], object] | None = None,
    ) -> None:
        self._settings = settings
        self._sweeps = sweeps
        self._workers = workers
        self._clock = clock
        self._timer = timer
        self._events = events
        self._pauses = pauses
        self._recurring = recurring
        self._policies = NO_POLICIES
        self._drain_requests = DrainRequests(settings, sweeps, workers, timer, events)
        self._cleanup = Cleanup(settings, sweeps, events, purge_statistics)

    def sweep(
        self,
        sweep_partition: int = 0,
        on_step: OnStep = lambda: None,
        contact_s: float = math.inf,
        start_drain: StartDrain = _start_no_drain,
    ) -> bool:
        """Sweep one sweep partition, unless another worker has just done so.

        A stage that fails, for example on a row that cannot be read, is logged and does not stop
        the following stages.

        Parameters
        ----------
        sweep_partition
            Its number. Number 0 also does the work for the whole table.
        on_step
            Called after each step, so that the caller can show that the sweep makes progress.
        contact_s
            Seconds for which the caller has reached this database without an interruption.
        start_drain
            Called for a queue for which the broker accepts no drain messages.

        Returns
        -------
        bool
            False if another worker has just swept the sweep partition.
        """
        is_first, began = sweep_partition == 0, monotonic()
        if is_first:
            self._attempt("workers", lambda: self._expire_silent_workers(contact_s))
        partitions, interval_s = self._settings.sweep_partitions, self._settings.sweep_s * 0.8
        armed_until = self._sweeps.begin_sweep(sweep_partition, partitions, interval_s)
        if armed_until is None:
            return False
        knows_policies = self._attempt("policies", self._read_policies)
        self._attempt(
            "arm", lambda: self._arm_due_within_horizon(sweep_partition, armed_until, on_step)
        )
        if is_first:
            self._attempt("abandoned", lambda: self._recover_abandoned(on_step))
            if knows_policies:  # without them, every paused row would be released
                self._attempt("hold", lambda: self._hold_and_release_paused(on_step))
            paused, requests = self._policies.paused_queues, self._drain_requests
            self._attempt("overdue", lambda: requests.request_all(paused, on_step, start_drain))
            self._attempt("purge", lambda: self._cleanup.purge_finished(on_step))
            self._attempt("audit", self._cleanup.purge_audit)
            # No other stage waits for this one, whose tasks are due later.
            self._attempt("recurring", lambda: self._make_recurring_tasks(on_step))
            self._attempt("statistics", self._cleanup.purge_statistics)
        seconds = monotonic() - began
        self._events.emit("sweep.done", sweep_partition=sweep_partition, seconds=seconds)
        return True

    def start_own_drains(self, queues: Sequence[str], start_drain: StartDrain) -> None:
        """Start drains of the calling worker's queues, whether or not it sweeps."""
        self._read_policies()
        self._drain_requests.start_own(queues, self._policies.paused_queues, start_drain)

    def _attempt(self, stage: str, work: Callable[[], object]) -> bool:
        return self._events.attempt("sweep", stage, work)

    # -- workers and policies ---------------------------------------------------------------------

    def _expire_silent_workers(self, contact_s: float) -> None:
        """Delete dead workers' rows, and have all rows due within the horizon armed again.

        A dead worker may have kept armed rows in memory. Arming all of them again costs duplicate
        messages, which the claims refuse.
        """
        silent_s = self._settings.silent_s
        # An outage silences every worker. Only a caller that reached the database during the whole
        # time can tell a dead worker from an outage.
        if contact_s < silent_s:
            return
        names = self._workers.expire(silent_s)
        if names:
            self._sweeps.forget_armed()
            self._events.emit("worker.lost", count=len(names), worker=first_names(names))

    def _read_policies(self) -> None:
        if self._pauses is not None:
            self._policies = self._pauses.cache.refresh()

    # -- rows due within the horizon --------------------------------------------------------------

    def _arm_due_within_horizon(
        self, sweep_partition: int, armed_until: datetime, on_step: OnStep
    ) -> None:
        """Arm the rows that came within the horizon since the last sweep, up to `armed_until`."""
        horizon_s = self._settings.horizon_s
        if horizon_s is None or not self._settings.uses_broker:
            return  # every row was armed when it was scheduled, or each worker polls the table
        now = self._clock.certain_now()
        since, until = max(armed_until, now), now + timedelta(seconds=horizon_s)
        armed = self._arm(sweep_partition, since, until, on_step)
        if armed is None:
            return
        count, end = armed
        # This is written last. A crash before it costs duplicate messages, but leaves no gap.
        self._sweeps.mark_armed(sweep_partition, self._settings.sweep_partitions, armed_until, end)
        if count:
            self._events.emit("sweep.armed", count=count)
        if self._pauses is not None:
            self._pauses.hold_near(self._policies, since, end, on_step)

    def _arm(
        self, sweep_partition: int, since: datetime, until: datetime, on_step: OnStep
    ) -> tuple[int, datetime] | None:
        """Arm the rows due after `since` and up to `until`, within one sweep interval.

        Returns
        -------
        tuple or None
            The number of armed rows and the due time up to which all rows are armed. None if the
            broker is unavailable: the next sweep starts at the same row.
        """
        count, deadline = 0, monotonic() + self._settings.sweep_s
        partitions = self._settings.sweep_partitions
        for entries in self._sweeps.due_between(
            since, until, sweep_partition, partitions, self._policies
        ):
            on_step()
            if self._timer.arm(entries):
                count += len(entries)
            elif not self._timer.is_up:
                return None
            # Otherwise the broker refuses one queue. Its rows are drained when they are overdue,
            # and the rows of the other queues do not wait for them.
            if monotonic() > deadline and (end := _before_last_instant(entries)) is not None:
                # Each queue needs a message of its own, and overdue rows must not wait for
                # thousands of messages. The next sweep continues with the last due time.
                return count, end
        return count, until

    # -- recurring schedules ----------------------------------------------------------------------

    def _make_recurring_tasks(self, on_step: OnStep) -> None:
        if self._recurring is not None:
            self._recurring(on_step)

    # -- rows of dead workers, paused rows, overdue rows ------------------------------------------

    def _recover_abandoned(self, on_step: OnStep) -> None:
        """Make the rows whose lease is over ready to run again, or FAILED after too many losses."""
        while True:
            on_step()
            recovered = self._sweeps.recover(self._settings.max_lost_leases, RECOVER_ROWS)
            emit_recovered(self._events, recovered)
            if recovered.total < RECOVER_ROWS:
                return

    def _hold_and_release_paused(self, on_step: OnStep) -> None:
        if self._pauses is not None:
            self._pauses.walk(self._policies, on_step)


def _before_last_instant(entries: Sequence[Entry]) -> datetime | None:
    """Return the instant just before the last due time of a batch; None if it has only one."""
    times = [entry.due_us for entry in entries]
    return from_us(max(times) - 1) if max(times) > min(times) else None


def emit_recovered(events: Events, recovered: Recovered, **fields: object) -> None:
    """Emit the events of rows that were recovered, timed out, or failed as worker-lost."""
    if recovered.total:
        events.emit("task.recovered", count=recovered.total, **fields)
    for id, tag in recovered.timed_out:
        events.emit("task.timed_out", id=id, tag=tag)
    for task in recovered.worker_lost:
        events.emit("task.worker_lost", **task.event_fields, error=task.error or "")


#: Rows that one statement purges, and statements in one sweep. Other transactions wait for the
#: locks of a statement only briefly.
PURGE_ROWS, PURGE_STEPS = 500, 20
#: The time between two purges of the statistics by one process.
STATISTICS_S = 3600.0


class Cleanup:
    def __init__(
        self,
        settings: Settings,
        sweeps: SweepQueries,
        events: Events,
        purge_statistics: Callable[[], object] | None,
    ) -> None:
        self._age_s = settings.purge_after_s
        self._sweeps = sweeps
        self._events = events
        self._purge_statistics = purge_statistics
        self._purged_at = float("-inf")

    def purge_finished(self, on_step: OnStep) -> None:
        if self._age_s is None:
            return
        for _ in range(PURGE_STEPS):
            on_step()
            purged = self._sweeps.purge(self._age_s, PURGE_ROWS)
            if purged:
                self._events.emit("task.purged", count=purged)
            if purged < PURGE_ROWS:
                return

    def purge_audit(self) -> None:
        if self._age_s is not None:
            self._sweeps.purge_audit(self._age_s)

    def purge_statistics(self) -> None:
        now = monotonic()
        if self._purge_statistics is not None and now - self._purged_at >= STATISTICS_S:
            self._purged_at = now
            self._purge_statistics()
