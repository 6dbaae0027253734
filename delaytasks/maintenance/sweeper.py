"""The sweep: recovers rows, arms near rows, drains overdue ones, releases paused ones, and cleans
up.

Celery beat starts a sweep of every sweep partition each `delaytasks_sweep`. If beat is silent, the
workers sweep by themselves. Each sweep partition arms its share of the rows; number 0 also does the
work that concerns the whole table.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from delaytasks.events import Events
from delaytasks.model.clock import UTC, Clock, from_us, monotonic
from delaytasks.model.filters import batches
from delaytasks.model.inputs import ALL_QUEUES
from delaytasks.model.moves import Status
from delaytasks.model.policies import NO_POLICIES, Policies, Policy
from delaytasks.model.task import Entry, FoundRow, Level, QueuePlace, Recovered, Timer
from delaytasks.model.text import first_names
from delaytasks.model.why import one_more_worker
from delaytasks.run.policy_cache import PolicyCache
from delaytasks.settings import Settings

if TYPE_CHECKING:
    from delaytasks.db.policy_rows import PausedRows, PolicyTable
    from delaytasks.db.sweep_queries import SweepQueries
    from delaytasks.db.worker_table import WorkerTable


# -- Asks workers to drain the queues that have overdue rows --------------------------------------


#: Most drain messages for one queue in one sweep, for any number of workers.
MOST_MESSAGES_PER_QUEUE = 500
#: The pool names of workers without a broker begin with one of these prefixes: those that poll the
#: table for rows due within the horizon, and those that only drain (`delaytasks run`).
POLLING_PREFIX, ONLY_DRAINING_PREFIX = "direct/", "drain/"
#: Starts a drain in this worker; returns False if the worker does not serve the queue.
StartDrain = Callable[[str, Sequence[int]], bool]


class DrainRequests:
    """Finds the overdue queues. Sends drain messages, or starts drains here."""

    def __init__(
        self,
        settings: Settings,
        sweeps: SweepQueries,
        workers: WorkerTable,
        timer: Timer,
        events: Events,
    ) -> None:
        self._settings = settings
        self._workers = workers
        self._timer = timer
        self._events = events
        self._overdue = OverdueQueues(sweeps, settings.grace_s)

    def request_all(
        self, paused: Collection[str], on_step: OnStep, start_drain: StartDrain
    ) -> None:
        """Send drain messages, upon which workers claim overdue rows by themselves.

        The queues that live workers name come first. Each sweep looks at a part of the others.
        """
        serving = self._workers_by_queue()
        named = serving.keys() - {ALL_QUEUES}
        late = _without(paused, self._overdue.of_named(named, on_step))
        self._send(late, serving, on_step, start_drain)
        others = _without(paused, self._overdue.of_others(named, on_step))
        if serving[ALL_QUEUES]:
            self._send(others, serving, on_step, start_drain)
        elif others:  # no worker would receive the messages, and they would accumulate
            self._events.emit(
                "queue.unserved",
                count=len(others),
                queue=first_names(others),
                remedy=one_more_worker(others, self._settings.namespace),
            )

    def start_own(
        self, queues: Sequence[str], paused: Collection[str], start_drain: StartDrain
    ) -> None:
        """Start drains in this worker, for those of its queues that have overdue rows."""
        for queue, priorities in _without(paused, self._overdue.of_named(queues)).items():
            start_drain(queue, priorities)

    def _workers_by_queue(self) -> Counter[str]:
        """Return the number of live workers that receive drain messages, for each queue."""
        without_broker = POLLING_PREFIX, ONLY_DRAINING_PREFIX
        return Counter(
            queue
            for worker in self._workers.all()
            if not self._settings.uses_broker or not worker["pool"].startswith(without_broker)
            for queue in worker["queues"]
        )

    def _send(
        self, late: OverdueLevels, serving: Counter[str], on_step: OnStep, start_drain: StartDrain
    ) -> None:
        for queue, priorities in late.items():
            workers = serving[queue] + serving[ALL_QUEUES]
            messages = min(self._settings.drain_messages * workers, MOST_MESSAGES_PER_QUEUE)
            if self._timer.request_drain(queue, priorities, messages, self._settings.sweep_s):
                self._events.emit("sweep.drain", queue=queue, messages=messages)
            elif start_drain(queue, priorities):  # the broker takes no messages
                self._events.emit("sweep.local_drain", queue=queue)
            on_step()


def _without(paused: Collection[str], late: OverdueLevels) -> OverdueLevels:
    return {queue: priorities for queue, priorities in late.items() if queue not in paused}


#: Queues of live workers, and other queues, that one call checks. The next call continues after
#: them.
MOST_NAMED, MOST_OTHERS = 1000, 100
#: Queues in one query.
QUEUES_PER_QUERY = 50

#: Called after each step of a sweep, so that the caller can show that the sweep makes progress.
OnStep = Callable[[], None]
#: The priorities that have overdue tasks, by queue. A queue with only a waitlist has priority 0.
OverdueLevels = dict[str, list[int]]


class OverdueQueues:
    """Looks for overdue tasks in a bounded number of queues at a time, in turn."""

    def __init__(self, sweeps: SweepQueries, late_s: float) -> None:
        self._sweeps = sweeps
        self._late_s = late_s
        self._named_after = ""
        self._place = QueuePlace()

    def of(self, queues: Iterable[str], on_step: OnStep = lambda: None) -> OverdueLevels:
        """Return the overdue levels of these queues."""
        late: OverdueLevels = {}
        for some in batches(queues, QUEUES_PER_QUERY):
            for level in self._sweeps.levels_of(some, self._late_s):
                late.setdefault(level.queue, []).append(level.priority)
            on_step()
        return late

    def of_named(self, queues: Collection[str], on_step: OnStep = lambda: None) -> OverdueLevels:
        """Return the overdue levels of the queues that workers name, of at most `MOST_NAMED`."""
        names: Sequence[str] = sorted(queues)
        if len(names) > MOST_NAMED:
            next_names = [name for name in names if name > self._named_after]
            names = [*next_names, *names][:MOST_NAMED]
            self._named_after = names[-1]
        return self.of(names, on_step)

    def of_others(
        self, named: Collection[str], on_step: OnStep = lambda: None, most: int = MOST_OTHERS
    ) -> OverdueLevels:
        """Return the overdue levels of the next `most` queues of the table, except those named."""
        if most <= 0:
            return {}
        queues, self._place = self._sweeps.next_queues(self._place, most)
        on_step()
        return self.of(sorted(queues.difference(named)), on_step)


# -- pause sweeper --------------------------------------------------------------------------------

# Hold the waiting rows of paused tags and queues, and release them after the pause, in steps.
#
# Each change of a policy starts a walk over the waiting rows (or the held ones), level by level,
# with the due rows first. A walk takes only a part of each sweep and continues in the next one. If
# its worker dies, the policy stays unapplied, and the next worker starts a new walk. A row that is
# scheduled behind a walk is held when it comes within the horizon, or when a worker claims it.


#: Rows that one statement holds or releases.
PAUSE_ROWS = 500
#: The last instant that a row can have as its due time.
LATEST_DUE = datetime.max.replace(tzinfo=UTC)
#: The part of a sweep interval that a walk may take.
SHARE = 0.4
#: Seconds between two checks for rows that are held although nothing pauses them. A worker that was
#: suspended in the middle of a step leaves such rows.
STRAYS_S = 60.0
#: Seconds after which a worker deletes policies without content again. Each process that has read
#: such a policy then reads all policies anew.
FORGET_S = 3600.0
#: Policies that one transaction marks as applied.
APPLIED = 200


class PauseSweeper:
    """Applies the pauses of policies to rows, as a part of each sweep."""

    def __init__(
        self,
        settings: Settings,
        cache: PolicyCache,
        table: PolicyTable,
        rows: PausedRows,
        clock: Clock,
        timer: Timer,
        events: Events,
    ) -> None:
        self.cache = cache
        self._table = table
        self._rows = rows
        self._clock = clock
        self._timer = timer
        self._events = events
        self._horizon = timedelta(seconds=settings.horizon_s or 0)
        self._budget_s = settings.sweep_s * SHARE
        #: The walk in progress, and the policies for which it was started.
        self._walk: Iterator[None] | None = None
        self._walk_policies: Sequence[Policy] = ()
        #: False if the walk could not release a row, because another transaction had locked it.
        self._is_complete = True
        self._strays_checked_at = float("-inf")
        self._forget_at = monotonic() + FORGET_S

    def read(self) -> Policies:
        """Return the policies as they are now, after ending the pauses whose time is over."""
        policies = self.cache.refresh()
        if min(policies.ends.values(), default=LATEST_DUE) <= self._clock.now():
            for ended in self._table.end_pauses():
                self._events.emit(
                    "policy.changed",
                    kind=ended.kind,
                    policy=ended.name,
                    changes=repr({"is_paused": False}),
                    actor=ended.updated_by,
                )
            policies = self.cache.refresh()
        return policies

    def hold_near(
        self, policies: Policies, since: datetime, until: datetime, on_step: OnStep
    ) -> None:
        """Hold paused rows that came within the horizon, until the time budget is used up.

        Claims hold the remaining rows.
        """
        deadline = monotonic() + self._budget_s
        while policies.has_pauses and monotonic() < deadline:
            on_step()
            ids = self._rows.due_between(since, until)
            if not ids or not self._hold(ids):
                return

    def walk(self, policies: Policies, on_step: OnStep) -> None:
        """Continue the walk that holds and releases rows, or start one if policies have changed."""
        unapplied = list(policies.unapplied.values())
        releases = any(not policy.is_paused for policy in unapplied) or self._has_strays(policies)
        if self._walk is None and not unapplied and not releases:
            return
        if self._walk is None or self._walk_policies != unapplied:
            self._walk = self._steps(policies, unapplied, releases)
            self._walk_policies, self._is_complete = unapplied, True
        deadline = monotonic() + self._budget_s
        for _ in self._walk:
            on_step()
            if monotonic() > deadline:
                return
        self._walk = None
        self._forget_empty_policies()
        if self._is_complete:
            for batch in batches(unapplied, APPLIED):
                self._table.applied(batch)
                on_step()

    def _has_strays(self, policies: Policies) -> bool:
        """Check, once in a while, for held rows that no policy holds."""
        if self._walk is not None or monotonic() < self._strays_checked_at + STRAYS_S:
            return False
        self._strays_checked_at = monotonic()
        return any(
            not policies.pauses(tag, queue) and tag not in policies.limited
            for tag, queue in self._table.count(Status.HELD)
        )

    def _forget_empty_policies(self) -> None:
        if monotonic() > self._forget_at:
            self._forget_at = monotonic() + FORGET_S
            self._table.forget()

    # -- the steps of a walk ----------------------------------------------------------------------

    def _steps(
        self, policies: Policies, unapplied: Sequence[Policy], releases: bool
    ) -> Iterator[None]:
        """Release and hold rows, first those due within the horizon, then all."""
        pauses = [policy for policy in unapplied if policy.is_paused]
        for until in (self._clock.certain_now() + self._horizon, None):
            if releases:
                yield from self._release_all(policies, until)
            if pauses:
                yield from self._hold_all(policies, pauses, until)

    def _hold_all(
        self, policies: Policies, pauses: Sequence[Policy], until: datetime | None
    ) -> Iterator[None]:
        queues = {policy.name for policy in pauses if policy.kind == "queue"}
        pauses_tags = any(policy.kind == "tag" for policy in pauses)
        for level in self._levels(Status.NOT_COMPLETE):
            yield
            if not pauses_tags and level.queue not in queues:
                continue
            for rows in self._rows_of(Status.NOT_COMPLETE, level, until):
                yield
                ids = [row.id for row in rows if policies.pauses(row.tag, level.queue)]
                for batch in batches(ids, PAUSE_ROWS):
                    self._hold(batch)
                    yield

    def _release_all(self, policies: Policies, until: datetime | None) -> Iterator[None]:
        for level in self._levels(Status.HELD):
            yield
            for rows in self._rows_of(Status.HELD, level, until):
                yield
                ids = [row.id for row in rows if not policies.pauses(row.tag, level.queue)]
                for batch in batches(ids, PAUSE_ROWS):
                    self._release(batch)
                    yield

    def _levels(self, status: Status) -> Iterator[Level]:
        """Yield the levels of all queues, with one query for every few queues."""
        levels, after = self._rows.levels(status, None)
        while True:
            yield from levels
            if after is None:
                return
            levels, after = self._rows.levels(status, after)

    def _rows_of(
        self, status: Status, level: Level, until: datetime | None
    ) -> Iterator[list[FoundRow]]:
        """Yield the rows of a level in batches, in the order of their due times."""
        since: datetime | None = None
        while rows := self._rows.look(status, level, since, until):
            yield rows
            since = rows[-1].due
            if since != rows[0].due:
                continue
            # The batch has one due time only: read all rows of that instant in the order of their
            # ids, then continue behind it.
            after_id = 0
            while rows := self._rows.due_at(status, level, since, after_id):
                yield rows
                after_id = rows[-1].id
            if since == LATEST_DUE:
                return
            since += timedelta(microseconds=1)

    def _hold(self, ids: Sequence[int]) -> int:
        """Hold the rows among `ids` that wait and are paused; return their number.

        The statement checks the policy again. A row whose pause has ended meanwhile is not counted.
        """
        held = self._rows.hold(ids)
        if held:
            self._events.emit("task.held", count=held)
        return held

    def _release(self, ids: Sequence[int]) -> None:
        released = self._rows.release(ids)
        if len(released) < len(ids):
            self._is_complete = False  # another transaction has locked a row: walk again
        if not released:
            return
        self._events.emit("task.released", count=len(released))
        now_us = self._clock.now_us()
        horizon_us = self._horizon.total_seconds() * 1e6 or 1e15
        near = [entry for entry in released if now_us < entry.due_us <= now_us + horizon_us]
        if near:  # the sweep drains the overdue ones
            self._timer.arm(near)


#: Rows that one statement recovers. Other transactions wait for their locks only briefly.
RECOVER_ROWS = 500


def _start_no_drain(queue: str, priorities: Sequence[int]) -> bool:
    return False


class Sweeper:
    """Sweeps the tables."""

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
            self._policies = self._pauses.read()

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
