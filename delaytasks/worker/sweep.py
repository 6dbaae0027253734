"""The sweep, and the look for overdue rows: two jobs of the thread `sweep` of each worker.

*The sweep* (`Sweeper`) recovers rows, arms near rows, releases held ones, and cleans up. Celery
beat starts a sweep of every sweep partition each `delaytasks_sweep`. If beat is silent, the workers
sweep by themselves. Each sweep partition arms its share of the rows; number 0 also does the work
that concerns the whole table.

*The look for overdue rows* (`SweepLoop.drain_own_queues`) needs no sweep. Each worker looks for
those of its own queues once in a `delaytasks_sweep`, and drains them. A row whose message was lost
is thus found at most about 6 s after its due time: 1 s of grace, and 5 s until the next look. The
look waits for a sweep of its own worker, so this is later if that sweep takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from delaytasks.events import Events
from delaytasks.loops import Loop
from delaytasks.model.clock import from_us, monotonic
from delaytasks.model.inputs import ALL_QUEUES
from delaytasks.model.policies import Policies, Stamp
from delaytasks.model.task import Entry, Level, QueuePlace, Recovered
from delaytasks.model.text import one_more_worker, some_values

if TYPE_CHECKING:
    from delaytasks.db.sweep_queries import SweepQueries
    from delaytasks.runtime import Runtime
    from delaytasks.worker.worker_runtime import WorkerRuntime

#: The priorities that have overdue tasks, by queue. A queue with only a waitlist has priority 0.
OverdueLevels = dict[str, list[int]]


class Stages:
    """Work that is done in order, each stage of it once in an interval.

    A stage that fails is logged, is done again by the next call, and stops no other stage.
    """

    def __init__(self, events: Events, *stages: tuple[str, float, Callable[[], object]]) -> None:
        """A stage has a name, the seconds between two calls of its work, and the work."""
        self._events = events
        self._stages = stages
        self._done_at = {name: -math.inf for name, _, _ in stages}

    def run(self) -> None:
        """Do the stages whose time has come."""
        for name, interval_s, work in self._stages:
            is_due = monotonic() - self._done_at[name] >= interval_s
            if is_due and self._events.attempt("sweep", name, work):
                self._done_at[name] = monotonic()


# -- the queues that have overdue rows ------------------------------------------------------------


#: Queues of live workers, and other queues, that one call checks. The next call continues after
#: them.
MOST_NAMED, MOST_OTHERS = 1000, 100


class OverdueQueues:
    """Looks for overdue tasks in a bounded number of queues at a time, in turn."""

    def __init__(self, sweeps: SweepQueries, late_s: float) -> None:
        self._sweeps = sweeps
        self._late_s = late_s
        self._named_after = ""
        self._place = QueuePlace()

    def of(self, queues: Collection[str]) -> OverdueLevels:
        """Return the overdue levels of these queues."""
        late: OverdueLevels = {}
        for level in self._sweeps.levels(self._late_s, queues):
            late.setdefault(level.queue, []).append(level.priority)
        return late

    def of_named(self, queues: Collection[str]) -> OverdueLevels:
        """Return the overdue levels of the queues that workers name, of at most `MOST_NAMED`."""
        names: Sequence[str] = sorted(queues)
        if len(names) > MOST_NAMED:
            next_names = [name for name in names if name > self._named_after]
            names = [*next_names, *names][:MOST_NAMED]
            self._named_after = names[-1]
        return self.of(names)

    def of_others(self, named: Collection[str], most: int = MOST_OTHERS) -> OverdueLevels:
        """Return the overdue levels of the next `most` queues of the table, except those named."""
        if most <= 0:
            return {}
        queues, self._place = self._sweeps.next_queues(self._place, most)
        return self.of(sorted(queues.difference(named)))


# -- the sweep ------------------------------------------------------------------------------------


#: Rows that one statement recovers. Other transactions wait for their locks only briefly.
RECOVER_ROWS = 500
#: The part of a sweep interval for which one sweep releases held rows.
RELEASE_SHARE = 0.4
#: Seconds between two searches for rows that are held although nothing holds them, also if no
#: policy has changed: a row may have been locked, or held while its pause ended.
SEARCH_HELD_S = 60.0
#: Rows that one statement purges, and statements in one sweep. Other transactions wait for the
#: locks of a statement only briefly.
PURGE_ROWS, PURGE_STEPS = 500, 20
#: How long the purge of one process rests after it found the last old row. Each search reads all
#: rows that were due so long ago, also those that still wait.
PURGE_REST_S = 60.0
#: The time between two purges of the statistics by one process.
STATISTICS_S = 3600.0


class Sweeper:
    """Sweeps the tables."""

    def __init__(
        self,
        runtime: Runtime,
        knows_silence: Callable[[], bool] = lambda: True,
        drain_here: Callable[[str, Sequence[int]], None] = lambda queue, priorities: None,
    ) -> None:
        """`knows_silence` returns whether the caller can tell a worker that died from one that
        could not report. `drain_here` is called for the priorities of a queue if no message could
        ask workers to drain it."""
        self._runtime = runtime
        self._settings = runtime.settings
        self._sweeps = runtime.store.sweeps
        self._workers = runtime.store.workers
        self._events = runtime.events
        self._knows_silence = knows_silence
        self._drain_here = drain_here
        #: The search for held rows to release, which continues in the next sweep, the policies for
        #: which it began, when the next one begins anyway, and whether it took the place of another
        #: one that was not over.
        self._search = runtime.store.paused_rows.search()
        self._searched_for: Stamp | None = None
        self._search_again_at = -math.inf
        self._is_interrupting = False
        self._purge_again_at = -math.inf
        self._overdue = OverdueQueues(self._sweeps, self._settings.grace_s)
        #: The levels of rows that are due, and that this sweep has recovered or released.
        self._ready = set[Level]()
        self._stages_of_table = Stages(
            self._events,
            ("abandoned", 0, self._recover_abandoned),
            ("policies", 0, self.release_resumed),
            ("drains", 0, self._request_drains),
            ("unserved", 0, self._report_unserved),
            ("purge", 0, self._purge_finished),
            # No other stage waits for this one, whose tasks are due later.
            ("recurring", 0, lambda: runtime.make_recurring_tasks()),
            ("statistics", STATISTICS_S, self._purge_statistics),
        )

    def sweep(self, sweep_partition: int = 0) -> bool:
        """Sweep one sweep partition, unless another worker has just done so.

        A stage that fails, for example on a row that cannot be read, is logged and does not stop
        the following stages.

        Parameters
        ----------
        sweep_partition
            Its number. Number 0 also does the work for the whole table.

        Returns
        -------
        bool
            False if another worker has just swept the sweep partition.
        """
        is_first, began = sweep_partition == 0, monotonic()
        attempt = partial(self._events.attempt, "sweep")
        if is_first:
            attempt("workers", self._expire_silent_workers)
        partitions, interval_s = self._settings.sweep_partitions, self._settings.sweep_s * 0.8
        armed_until = self._sweeps.begin_sweep(sweep_partition, partitions, interval_s)
        if armed_until is None:
            return False
        attempt("arm", lambda: self._arm_due_within_horizon(sweep_partition, armed_until))
        if is_first:
            self._stages_of_table.run()
        seconds = monotonic() - began
        self._events.emit("sweep.done", sweep_partition=sweep_partition, seconds=seconds)
        return True

    # -- lost workers -----------------------------------------------------------------------------

    def _expire_silent_workers(self) -> None:
        """Mark silent workers as lost, and have all rows due within the horizon armed again.

        A dead worker may have kept armed rows in memory. Arming all of them again costs duplicate
        messages, which the claims refuse.
        """
        silent_s = self._settings.silent_s
        # An outage silences every worker.
        if not self._knows_silence():
            return
        names = self._workers.expire(silent_s)
        if names:
            self._sweeps.forget_armed()
            self._events.emit("worker.lost", count=len(names), worker=some_values(names, 5))

    # -- held rows --------------------------------------------------------------------------------

    def release_resumed(self) -> None:
        """End the pauses whose time is over, and release the held rows that no pause holds now.

        The search for such rows begins when policies have changed, and once in a while. It takes a
        part of each sweep until it has seen all held rows, also after a sweep that failed.
        """
        policies, search = self._read_policies(), self._search
        has_changed = policies.stamp != self._searched_for
        if search.is_over:
            must_begin = has_changed or monotonic() >= self._search_again_at
        else:
            # A search that has interrupted another one comes to its end, however often policies
            # change.
            must_begin = has_changed and not self._is_interrupting
        if must_begin:
            is_interrupting = not search.is_over
            search.begin()
            self._is_interrupting = is_interrupting
            self._searched_for = policies.stamp
            self._search_again_at = monotonic() + SEARCH_HELD_S
        deadline = monotonic() + self._settings.sweep_s * RELEASE_SHARE
        while not search.is_over:
            self._arm_released(search.step(policies))
            if monotonic() > deadline:
                return

    def _read_policies(self) -> Policies:
        """Return the policies as they are now, after ending the pauses whose time is over."""
        cache, now = self._runtime.policy_cache, self._runtime.clock.now()
        policies = cache.refresh()
        if all(end > now for end in policies.ends):
            return policies
        for ended in self._runtime.store.policies.end_pauses():
            self._events.emit(
                "policy.changed",
                kind=ended.kind,
                policy=ended.name,
                changes=repr({"is_paused": False}),
                actor=ended.updated_by,
            )
        return cache.refresh()

    def _arm_released(self, released: Sequence[Entry]) -> None:
        if not released:
            return
        self._events.emit("task.released", count=len(released))
        now_us = self._runtime.clock.now_us()
        self._runtime.arm_near(entry for entry in released if entry.due_us > now_us)
        due = (entry for entry in released if entry.due_us <= now_us)
        self._ready.update(Level(entry.queue, entry.priority) for entry in due)

    # -- rows due within the horizon --------------------------------------------------------------

    def _arm_due_within_horizon(self, sweep_partition: int, armed_until: datetime) -> None:
        """Arm the rows that came within the horizon since the last sweep, which has armed those
        due up to `armed_until`.
        """
        settings, timer, sweeps = self._settings, self._runtime.timer, self._sweeps
        if settings.horizon_s is None or not settings.uses_broker:
            return  # every row was armed when it was scheduled, or each worker polls the table
        now, partitions = self._runtime.clock.certain_now(), settings.sweep_partitions
        since, until = max(armed_until, now), now + timedelta(seconds=settings.horizon_s)
        count, deadline = 0, monotonic() + settings.sweep_s
        for entries in sweeps.due_between(since, until, sweep_partition, partitions):
            if timer.arm(entries):
                count += len(entries)
            elif not timer.is_up:
                return  # the next sweep starts at the same row
            # Otherwise the broker refuses one queue. Its rows are drained when they are overdue,
            # and the rows of the other queues do not wait for them.
            if monotonic() > deadline and (end := _before_last_instant(entries)) is not None:
                # Each queue needs a message of its own, and overdue rows must not wait for
                # thousands of messages. The next sweep continues with the last due time.
                until = end
                break
        # This is written last. A crash before it costs duplicate messages, but leaves no gap.
        sweeps.mark_armed(sweep_partition, partitions, armed_until, until)
        if count:
            self._events.emit("sweep.armed", count=count)

    # -- rows of dead workers ---------------------------------------------------------------------

    def _recover_abandoned(self) -> None:
        """Make rows whose lease is over or whose worker is lost ready to run again, or FAILED after
        too many losses.
        """
        while True:
            settings = self._settings
            recovered = self._runtime.store.leases.recover(
                settings.max_lost_leases, RECOVER_ROWS, settings.lost_s
            )
            emit_recovered(self._events, recovered)
            self._ready.update(recovered.levels)
            if recovered.total < RECOVER_ROWS:
                return

    # -- overdue rows -----------------------------------------------------------------------------

    def _request_drains(self) -> None:
        """Have the rows drained that became ready in this sweep, before the workers find them."""
        ready, settings = sorted(self._ready), self._settings
        self._ready.clear()
        for queue, levels in groupby(ready, attrgetter("queue")):
            priorities = [level.priority for level in levels]
            messages = settings.drain_messages, settings.sweep_s
            if not self._runtime.timer.request_drain(queue, priorities, *messages):
                self._drain_here(queue, priorities)

    def _report_unserved(self) -> None:
        """Report queues with overdue rows that no worker serves, of some of the queues."""
        served = {queue for worker in self._workers.all() for queue in worker["queues"]}
        if ALL_QUEUES in served:
            return
        paused = self._runtime.policy_cache.known.paused_queues
        unserved = sorted(self._overdue.of_others(served).keys() - paused)
        if unserved:
            self._events.emit(
                "queue.unserved",
                count=len(unserved),
                queue=some_values(unserved, 5),
                remedy=one_more_worker(unserved, self._settings.namespace),
            )

    # -- what is old ------------------------------------------------------------------------------

    def _purge_finished(self) -> None:
        """Delete finished rows, and entries of the audit, that are older than the setting says."""
        age_s = self._settings.purge_after_s
        if age_s is None or monotonic() < self._purge_again_at:
            return
        self._events.attempt("sweep", "audit", lambda: self._runtime.store.bulk.audit.purge(age_s))
        for _ in range(PURGE_STEPS):
            purged = self._sweeps.purge(age_s, PURGE_ROWS)
            if purged:
                self._events.emit("task.purged", count=purged)
            if purged < PURGE_ROWS:
                self._purge_again_at = monotonic() + PURGE_REST_S
                return

    def _purge_statistics(self) -> None:
        if self._settings.statistics:
            self._runtime.purge_statistics()


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


# -- the sweeps of a worker -----------------------------------------------------------------------

# A thread of the worker's main process sweeps, so that no sweep waits for the pool. It sweeps when
# a message of beat requests it, or when no worker has swept for a while.


#: How often a worker looks for sweep partitions that no worker swept. Without beat a sweep comes at
#: most this much later than `self_sweep_s`.
STALE_CHECK_S = 1.0
#: The longest rest between two turns of the loop.
SWEEP_LOOP_REST_S = 1.0
#: How often a worker with declarations compares them with the table.
FOLLOW_S = 60.0


class SweepLoop:
    """The sweeps of a worker, and its looks for overdue rows of its own queues."""

    def __init__(self, worker: WorkerRuntime) -> None:
        self._worker = worker
        self._runtime = runtime = worker.runtime
        self._store = runtime.store
        self._settings = settings = runtime.settings
        self._events = runtime.events
        self._processes = worker.processes
        #: Other threads add to it.
        self._requested: set[int] = set()
        #: How often the timer may have lost rows, and how often that was when they were forgotten.
        self._losses = self._forgotten = 0
        self._has_followed = False
        self._started_at = monotonic()
        #: Without a broker no message can request a sweep, so none is waited for.
        self._patience_s = settings.self_sweep_s if settings.uses_broker else settings.sweep_s
        self.loop = Loop("sweep", self._turn, self._events)
        self._sweeper = Sweeper(runtime, self._knows_silence, worker.drain_here)
        self._overdue = OverdueQueues(self._store.sweeps, settings.grace_s)
        self._rest_s = min(settings.sweep_s, SWEEP_LOOP_REST_S)
        self._stages = Stages(
            self._events,
            ("timer", settings.sweep_s, worker.check_timer),
            ("own queues", settings.sweep_s - self._rest_s, self._drain_with_broker),
            ("forget", 0, self._forget_armed_rows),
            ("requested", 0, self._sweep_requested),
            ("stale", min(STALE_CHECK_S, self._patience_s / 2), self._sweep_stale),
            ("recurring", FOLLOW_S, self._follow_declared_schedules),
        )

    def request(self, sweep_partition: int | None) -> None:
        """Sweep this sweep partition soon, or all of them."""
        every = range(self._settings.sweep_partitions)
        self._requested.update(every if sweep_partition is None else [sweep_partition])
        self.loop.wake()

    def arm_again(self) -> None:
        """Make the next sweep arm all near tasks again, since the timer may have lost some."""
        self._losses += 1
        self.loop.wake()

    def _turn(self) -> float:
        self._stages.run()
        return self._rest_s

    def _drain_with_broker(self) -> None:
        if self._settings.uses_broker:  # else the poller of the table does so more often
            self.drain_own_queues()

    def drain_own_queues(self) -> None:
        """Start drains of this worker's queues that have overdue rows, whichever worker sweeps."""
        queues: Collection[str] = self._processes.queues
        serves_all = ALL_QUEUES in queues
        if serves_all:
            queues = self._runtime.queues.all()
        late = self._overdue.of_named(queues)
        if serves_all:
            # No more unknown queues than can have their turn soon, in between the known ones.
            most = MOST_OTHERS - self._worker.dispatcher.drain_count
            late |= self._overdue.of_others(queues, most)
        for queue, priorities in late.items():
            self._worker.dispatcher.start_drain(queue, priorities)

    def _sweep_requested(self) -> None:
        for sweep_partition in sorted(self._requested.copy()):
            if self._sweep("requested", sweep_partition):
                self._requested.discard(sweep_partition)

    def _sweep(self, stage: str, sweep_partition: int) -> bool:
        """Sweep one sweep partition. A failure, for example on a locked row, stops no others."""
        return self._events.attempt("sweep", stage, partial(self._sweeper.sweep, sweep_partition))

    def _knows_silence(self) -> bool:
        """Return whether a worker that was silent is dead, as far as this one can tell.

        This worker has reported itself for as long, and its row is not old. The row is old after a
        step of the database's clock.
        """
        silent_s, contact = self._settings.silent_s, self._worker.leases_loop.contact
        if contact.seconds() < silent_s:
            return False
        name = self._worker.celery_worker.hostname
        has_reported = self._store.workers.has_reported(name, silent_s)
        if not has_reported:
            contact.mark_failed()
        return has_reported

    def _forget_armed_rows(self) -> None:
        losses = self._losses  # first, since the broker may fail again meanwhile
        if losses != self._forgotten:
            self._store.sweeps.forget_armed()
            self._forgotten = losses

    def _sweep_stale(self) -> None:
        """Sweep the sweep partitions that no worker has swept for a while."""
        settings, sweeps = self._settings, self._store.sweeps
        # While the database was away, sweeps that beat requested failed as well. After a start,
        # beat sends its first message up to a sweep interval later.
        is_beat_silent = (
            self._worker.leases_loop.contact.seconds() > settings.self_sweep_s
            and monotonic() - self._started_at > settings.self_sweep_s + settings.sweep_s
        )
        stale = sweeps.stale_sweep_partitions(settings.sweep_partitions, self._patience_s)
        for sweep_partition in stale:
            if is_beat_silent and settings.uses_broker:
                self._events.emit(
                    "sweep.self",
                    sweep_partition=sweep_partition,
                    remedy="is celery beat running, does the broker answer, and does a worker "
                    "serve the default queue of delaytasks (-Q)?",
                )
            self._sweep("stale", sweep_partition)

    def _follow_declared_schedules(self) -> None:
        """Compare the declared schedules with the table.

        Load the package of recurring schedules only if code declares or has declared one.
        """
        is_first, sweeps = not self._has_followed, self._store.sweeps
        if self._runtime.registry.schedules or (is_first and sweeps.has_declared_schedule()):
            from delaytasks.recurring.recurring import follow

            follow(self._runtime)
        self._has_followed = True
