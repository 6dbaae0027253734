"""The sweep: find what the fast path missed, and arm the rows due within the horizon.

Celery beat starts a sweep of every sweep partition each `sweep_s` seconds. If beat is silent, the
workers sweep by themselves. Each partition arms its share of the rows; partition 0 also does the
work that concerns the whole table.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from delaytasks.core.clock import Clock, from_us, monotonic
from delaytasks.core.events import Events
from delaytasks.core.inputs import ALL_QUEUES
from delaytasks.core.interfaces import Entry, Lapsed, Timer
from delaytasks.core.policies import NO_POLICIES, Kind
from delaytasks.core.settings import Settings
from delaytasks.maintenance.overdue_queues import Beat, Late, OverdueQueues
from delaytasks.maintenance.pause_sweeper import PauseSweeper

if TYPE_CHECKING:
    from delaytasks.storage.sweep_queries import SweepQueries
    from delaytasks.storage.worker_table import WorkerTable

#: Rows that one statement recovers or purges. Other transactions wait for their locks only briefly.
STEP = 500
#: Statements that purge rows in one sweep.
PURGE_STEPS = 20
#: A worker counts as dead if it was silent for this many sweep intervals.
SILENT_SWEEPS = 3
#: Most drain messages for one queue in one sweep, for any number of workers.
MOST_TOKENS = 500
#: Names that one log line lists.
NAMES = 5
#: Seconds between two checks of the table's partitions.
PARTITIONS_S = 3600.0
#: Seconds before the end of the last partition at which the log warns.
WARN_BEFORE_S = 2 * 86400.0
#: Prefixes of the pool names of workers that receive no messages from the broker. Only a worker
#: with the `DIRECT` prefix polls the table for rows due within the horizon.
DIRECT, DRAIN = "direct/", "drain/"
#: Drains a queue in this worker; returns False if the worker does not serve the queue.
DrainHere = Callable[[str, Sequence[int]], bool]


def _drain_nothing(queue: str, priorities: Sequence[int]) -> bool:
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
        pause_sweeper: PauseSweeper | None = None,
    ) -> None:
        self._settings = settings
        self._sweeps = sweeps
        self._workers = workers
        self._clock = clock
        self._timer = timer
        self._events = events
        self._holding = pause_sweeper
        self._policies = NO_POLICIES
        self._reported_limits: set[tuple[Kind, str]] = set()
        self._overdue = OverdueQueues(sweeps, settings.grace_s)
        self._partitions_checked_at = float("-inf")

    def sweep(
        self,
        partition: int = 0,
        beat: Beat = lambda: None,
        contact_s: float = math.inf,
        drain_here: DrainHere = _drain_nothing,
    ) -> bool:
        """Sweep one partition, unless another worker has just done so.

        A stage that fails, for example on a row that cannot be read, is logged and does not stop
        the following stages.

        Parameters
        ----------
        partition
            The number of the sweep partition. Partition 0 also does the work for the whole table.
        beat
            Called after each step, so that the caller can show that the sweep makes progress.
        contact_s
            Seconds for which the caller has reached this database without an interruption.
        drain_here
            Called for a queue for which the broker accepts no drain messages.

        Returns
        -------
        bool
            False if another worker has just swept the partition.
        """
        is_first = partition == 0
        if is_first:
            self._attempt("bury", lambda: self._expire_silent_workers(contact_s))
        partitions, interval_s = self._settings.sweep_partitions, self._settings.sweep_s * 0.8
        armed_until = self._sweeps.begin_sweep(partition, partitions, interval_s)
        if armed_until is None:
            return False
        knows_policies = self._attempt("policies", self._read_policies)
        self._attempt("near", lambda: self._arm_due_within_horizon(partition, armed_until, beat))
        if is_first:
            self._attempt("lapsed", lambda: self._recover_abandoned(beat))
            if knows_policies:  # without them, every paused row would be released
                self._attempt("hold", lambda: self._hold_and_release_paused(beat))
            self._attempt("overdue", lambda: self._drain_overdue(beat, drain_here))
            self._attempt("purge", lambda: self._purge_finished(beat))
            self._attempt("audit", self._purge_audit)
            self._attempt("partitions", self._check_table_partitions)
        self._events.emit("sweep.done", sweep_partition=partition)
        return True

    def begin(self, queues: Sequence[str], drain_here: DrainHere) -> None:
        """Drain the overdue rows of a starting worker's queues.

        The next sweep may be seconds away.
        """
        self._read_policies()
        for queue, priorities in self._not_paused(self._overdue.of_named(queues)).items():
            drain_here(queue, priorities)

    def _attempt(self, stage: str, work: Callable[[], object]) -> bool:
        return self._events.attempt("sweep", stage, work)

    # -- workers and policies ---------------------------------------------------------------------

    def _expire_silent_workers(self, contact_s: float) -> None:
        """Delete dead workers' rows, and have all rows due within the horizon armed again.

        A dead worker may have held armed rows in memory. Arming all of them again costs duplicate
        messages, which the claims refuse.
        """
        silent_s = SILENT_SWEEPS * self._settings.sweep_s
        # An outage silences every worker. Only a caller that reached the database during the whole
        # time can tell a dead worker from an outage.
        if contact_s < silent_s:
            return
        names = self._workers.bury(silent_s)
        if names:
            self._sweeps.forget_armed()
            self._events.emit("worker.lost", count=len(names), worker=_first(names))

    def _read_policies(self) -> None:
        if self._holding is not None:
            self._policies = self._holding.policies()
            self._report_unusable_limits()

    def _report_unusable_limits(self) -> None:
        unusable = self._policies.unusable
        for name in unusable.keys() - self._reported_limits:
            policy = unusable[name]
            remedy = "set it again: delaytasks policy set"
            self._events.emit(
                "policy.ignored",
                kind=policy.kind,
                policy=policy.name,
                limits=policy.unusable,
                remedy=remedy,
            )
        self._reported_limits = set(unusable)

    # -- rows due within the horizon --------------------------------------------------------------

    def _arm_due_within_horizon(self, partition: int, armed_until: datetime, beat: Beat) -> None:
        """Arm the rows that came within the horizon since the last sweep, up to `armed_until`."""
        horizon_s = self._settings.horizon_s
        if horizon_s is None or self._settings.timer == "direct":
            return  # every row was armed when it was scheduled, or each worker polls the table
        now = self._clock.certain_now()
        since, until = max(armed_until, now), now + timedelta(seconds=horizon_s)
        armed = self._arm(partition, since, until, beat)
        if armed is None:
            return
        count, end = armed
        # This is written last. A crash before it costs duplicate messages, but leaves no gap.
        self._sweeps.mark_armed(partition, self._settings.sweep_partitions, armed_until, end)
        if count:
            self._events.emit("sweep.armed", count=count)
        if self._holding is not None:
            self._holding.hold_near(self._policies, since, end, beat)

    def _arm(
        self, partition: int, since: datetime, until: datetime, beat: Beat
    ) -> tuple[int, datetime] | None:
        """Arm the partition's rows due after `since` and up to `until`, within one sweep interval.

        Returns
        -------
        tuple or None
            The number of armed rows and the due time up to which all rows are armed. None if the
            broker is unavailable: the next sweep starts at the same row.
        """
        count, deadline = 0, monotonic() + self._settings.sweep_s
        partitions = self._settings.sweep_partitions
        for entries in self._sweeps.near(since, until, partition, partitions, self._policies):
            beat()
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

    # -- rows of dead workers, paused rows, overdue rows ------------------------------------------

    def _recover_abandoned(self, beat: Beat) -> None:
        """Make the rows whose lease is over ready to run again, or FAILED after too many losses."""
        while True:
            beat()
            recovered = self._sweeps.lapse(self._settings.max_lost_leases, STEP)
            tell_lapsed(self._events, recovered)
            if recovered.total < STEP:
                return

    def _hold_and_release_paused(self, beat: Beat) -> None:
        if self._holding is not None:
            self._holding.walk(self._policies, beat)

    def _drain_overdue(self, beat: Beat, drain_here: DrainHere) -> None:
        """Send drain messages, upon which workers claim overdue rows by themselves.

        The queues that live workers name come first. Each sweep looks at a part of the others.
        """
        serving = self._workers_by_queue()
        named = serving.keys() - {ALL_QUEUES}
        self._send_drains(self._overdue.of_named(named, beat), serving, beat, drain_here)
        others = self._not_paused(self._overdue.of_others(named, beat))
        if serving[ALL_QUEUES]:
            self._send_drains(others, serving, beat, drain_here)
        elif others:  # no worker would receive the messages, and they would accumulate
            prefix = self._settings.namespace
            remedy = f"start a worker that serves it: celery worker -Q {prefix}.QUEUE"
            self._events.emit(
                "queue.unserved", count=len(others), queue=_first(list(others)), remedy=remedy
            )

    def _workers_by_queue(self) -> Counter[str]:
        """Return the number of live workers that receive drain messages, for each queue."""
        is_direct = self._settings.timer == "direct"
        return Counter(
            queue
            for worker in self._workers.alive()
            if is_direct or not worker["pool"].startswith((DIRECT, DRAIN))
            for queue in worker["queues"]
        )

    def _send_drains(
        self, late: Late, serving: Counter[str], beat: Beat, drain_here: DrainHere
    ) -> None:
        for queue, priorities in self._not_paused(late).items():
            workers = serving[queue] + serving[ALL_QUEUES]
            tokens = min(self._settings.drain_tokens * workers, MOST_TOKENS)
            if self._timer.drain(queue, priorities, tokens, self._settings.sweep_s):
                self._events.emit("sweep.drain", queue=queue, tokens=tokens)
            elif drain_here(queue, priorities):  # the broker takes no messages
                self._events.emit("sweep.drain_here", queue=queue)
            beat()

    def _not_paused(self, late: Late) -> Late:
        paused = self._policies.paused_queues
        return {queue: priorities for queue, priorities in late.items() if queue not in paused}

    # -- finished rows and table partitions -------------------------------------------------------

    def _purge_finished(self, beat: Beat) -> None:
        age_s = self._settings.purge_after_s
        if age_s is None:
            return
        for _ in range(PURGE_STEPS):
            beat()
            purged = self._sweeps.purge(age_s, STEP)
            if purged:
                self._events.emit("task.purged", count=purged)
            if purged < STEP:
                return

    def _purge_audit(self) -> None:
        if self._settings.purge_after_s is not None:
            self._sweeps.purge_audit(self._settings.purge_after_s)

    def _check_table_partitions(self) -> None:
        """Warn before the last partition of the table ends.

        The sweep does not make partitions itself, because its role may not change tables.
        """
        if monotonic() < self._partitions_checked_at + PARTITIONS_S:
            return
        self._partitions_checked_at = monotonic()
        end = self._sweeps.partitions_end()
        if end is not None and (end - self._clock.now()).total_seconds() < WARN_BEFORE_S:
            remedy = "run: delaytasks db partitions maintain"
            self._events.emit("partitions.ending", until=end.isoformat(), remedy=remedy)


def _before_last_instant(entries: Sequence[Entry]) -> datetime | None:
    """Return the instant just before the last due time of a batch; None if it has only one."""
    times = [entry.due_us for entry in entries]
    return from_us(max(times) - 1) if max(times) > min(times) else None


def _first(names: Sequence[str]) -> str:
    """Return the first names for one log line; the event's count is the number of all names."""
    return ", ".join(names[:NAMES])


def tell_lapsed(events: Events, lapsed: Lapsed, **fields: object) -> None:
    """Emit the events of rows that were recovered, timed out, or failed as worker-lost."""
    if lapsed.total:
        events.emit("task.recovered", count=lapsed.total, **fields)
    for id, tag in lapsed.timed_out:
        events.emit("task.timed_out", id=id, tag=tag)
    for task in lapsed.given_up:
        events.emit("task.worker_lost", id=task.id, tag=task.tag, error=task.error or "", task=task)
