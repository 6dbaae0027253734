"""The way of a task, part 4: the sweep finds what the fast path missed, and prepares what is near."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial

from delaytasks.core.clock import Clock, from_us, monotonic
from delaytasks.core.events import Events
from delaytasks.core.inputs import ALL_QUEUES
from delaytasks.core.interfaces import Lapsed, SweepStore, Timer, WorkerStore
from delaytasks.core.policies import NO_POLICIES
from delaytasks.core.settings import Settings
from delaytasks.maintenance.overdue_queues import Late, OverdueQueues
from delaytasks.maintenance.pause_sweeper import PauseSweeper

#: Rows in one step of lapsing and purging: small enough that nobody waits for their locks.
STEP = 500
#: Steps of purging in one sweep.
PURGE_STEPS = 20
#: A worker that said nothing for so many sweeps is dead.
SILENT_SWEEPS = 3
#: Drain tokens for one queue in one sweep, however many workers serve the queue.
MOST_TOKENS = 500
#: Names that one line of the log lists.
NAMES = 5
#: Seconds between two looks at the partitions, and how long before the end of the last one somebody should know.
PARTITIONS_S, WARN_BEFORE_S = 3600.0, 2 * 86400.0


#: Of the names of pools, in the table of workers: who has one of them takes no messages, who has the first looks for
#: near tasks.
DIRECT, DRAIN = "direct/", "drain/"
#: Drains a queue in this worker; returns False if the worker does not serve the queue.
DrainHere = Callable[[str, Sequence[int]], bool]


def _drain_nothing(queue: str, priorities: Sequence[int]) -> bool:
    return False


class Sweeper:
    def __init__(
        self,
        settings: Settings,
        sweeps: SweepStore,
        workers: WorkerStore,
        clock: Clock,
        timer: Timer,
        events: Events,
        holding: PauseSweeper | None = None,
    ) -> None:
        self._settings = settings
        self._sweeps = sweeps
        self._workers = workers
        self._clock = clock
        self._timer = timer
        self._events = events
        self._holding = holding
        self._policies = NO_POLICIES
        self._overdue = OverdueQueues(sweeps, settings.grace_s)
        self._partitions_at = float("-inf")

    def sweep(
        self,
        house: int = 0,
        beat: Callable[[], None] = lambda: None,
        contact_s: float = math.inf,
        drain_here: DrainHere = _drain_nothing,
    ) -> bool:
        """One sweep of one house number; False if another worker just did it. A stage that fails, be it for one row
        that can not be read, keeps no other one from its work. `beat` is called at each step forward. `contact_s` is
        how long the caller has reached this database without an interruption. `drain_here` is called for a queue whose
        drain tokens the broker does not accept."""
        settings, attempt = self._settings, partial(self._events.attempt, "sweep")
        silent_s = SILENT_SWEEPS * settings.sweep_s
        # An outage silences every worker. Only a caller that reached the database for all of this time may judge.
        if house == 0 and contact_s >= silent_s:
            attempt("bury", partial(self._bury_dead_workers, silent_s))
        armed_until = self._sweeps.begin_sweep(house, settings.houses, settings.sweep_s * 0.8)
        if armed_until is None:
            return False
        knows_policies = attempt("policies", self._read_policies)
        if (
            settings.horizon_s is not None and settings.timer != "direct"
        ):  # for which each worker looks itself
            attempt("near", partial(self._arm_near, house, armed_until, settings.horizon_s, beat))
        if house == 0:
            attempt("lapsed", partial(self._lapse, beat))
            if knows_policies:  # or all that is paused would be released
                attempt("hold", partial(self._hold, beat))
            attempt("overdue", partial(self._drain_overdue, beat, drain_here))
            attempt("purge", partial(self._purge, beat))
            if settings.purge_after_s is not None:
                attempt("audit", partial(self._sweeps.purge_audit, settings.purge_after_s))
            attempt("partitions", self._check_partitions)
        self._events.emit("sweep.done", house=house)
        return True

    def _arm_near(
        self, house: int, armed_until: datetime, horizon_s: float, beat: Callable[[], None]
    ) -> None:
        now = self._clock.certain_now()
        until = now + timedelta(seconds=horizon_s)
        armed, ends = 0, monotonic() + self._settings.sweep_s
        since, policies = max(armed_until, now), self._policies
        for entries in self._sweeps.near(since, until, house, self._settings.houses, policies):
            beat()
            if self._timer.arm(entries):
                armed += len(entries)
            elif not self._timer.is_up:
                return  # the broker is away: the next sweep begins here again
            # Else it refuses a queue, whose rows are found when they are overdue: all others must not wait for them.
            last_us = max(entry.due_us for entry in entries)
            if monotonic() > ends and last_us > min(entry.due_us for entry in entries):
                # Each queue takes a message of its own. What is overdue must not wait for thousands of them, so that
                # the next sweep goes on here, with the rows of this last instant again.
                until = from_us(last_us - 1)
                break
        # Moved only now: a crash before it costs duplicate messages, which are harmless; never a gap.
        self._sweeps.mark_armed(house, self._settings.houses, armed_until, until)
        if armed:
            self._events.emit("sweep.armed", count=armed)
        if self._holding is not None:
            self._holding.hold_near(policies, since, until, beat)

    def _read_policies(self) -> None:
        if self._holding is not None:
            self._policies = self._holding.policies()

    def _hold(self, beat: Callable[[], None]) -> None:
        if self._holding is not None:
            self._holding.walk(self._policies, beat)

    def _lapse(self, beat: Callable[[], None]) -> None:
        while True:
            beat()
            lapsed = self._sweeps.lapse(self._settings.max_lost_leases, STEP)
            tell_lapsed(self._events, lapsed)
            if lapsed.total < STEP:
                return

    def _drain_overdue(self, beat: Callable[[], None], drain_here: DrainHere) -> None:
        """Nothing is listed or rewritten: a few tokens let the workers claim what is late by themselves.

        The queues that live workers name come first. Of all other queues each sweep looks at some.
        """
        is_direct, alive = self._settings.timer == "direct", self._workers.alive()
        takers = [
            worker
            for worker in alive
            if is_direct or not worker["pool"].startswith((DIRECT, DRAIN))
        ]
        serving = Counter(queue for worker in takers for queue in worker["queues"])
        named = serving.keys() - {ALL_QUEUES}
        self._drain(self._overdue.of_named(named, beat), serving, beat, drain_here)
        others = self._not_paused(self._overdue.of_others(named, beat))
        if serving[ALL_QUEUES]:
            self._drain(others, serving, beat, drain_here)
        elif others:  # tokens that nobody takes would pile up
            remedy = "start a worker that serves it (-Q)"
            self._events.emit(
                "queue.unserved", count=len(others), queue=_names(list(others)), remedy=remedy
            )

    def _drain(
        self,
        late: Late,
        serving: Counter[str],
        beat: Callable[[], None],
        drain_here: DrainHere,
    ) -> None:
        for queue, priorities in self._not_paused(late).items():
            tokens = min(
                self._settings.drain_tokens * (serving[queue] + serving[ALL_QUEUES]), MOST_TOKENS
            )
            if self._timer.drain(queue, priorities, tokens, self._settings.sweep_s):
                self._events.emit("sweep.drain", queue=queue, tokens=tokens)
            elif drain_here(
                queue, priorities
            ):  # a broker that takes nothing must not keep us from working
                self._events.emit("sweep.drain_here", queue=queue)
            beat()

    def begin(self, queues: Sequence[str], drain_here: DrainHere) -> None:
        """A worker that begins takes part in what is overdue in its queues at once: the next sweep may be seconds
        away."""
        self._read_policies()
        for queue, priorities in self._not_paused(self._overdue.of_named(queues)).items():
            drain_here(queue, priorities)

    def _not_paused(self, late: Late) -> Late:
        return {
            queue: some for queue, some in late.items() if queue not in self._policies.paused_queues
        }

    def _bury_dead_workers(self, silent_s: float) -> None:
        """What a dead worker held in memory is armed again, in time, at the price of duplicates."""
        names = self._workers.bury(silent_s)
        if names:
            self._sweeps.forget_armed()
            self._events.emit("worker.lost", count=len(names), worker=_names(names))

    def _purge(self, beat: Callable[[], None]) -> None:
        age = self._settings.purge_after_s
        if age is None:
            return
        for _ in range(PURGE_STEPS):
            beat()
            purged = self._sweeps.purge(age, STEP)
            if purged:
                self._events.emit("task.purged", count=purged)
            if purged < STEP:
                return

    def _check_partitions(self) -> None:
        """New ones are made by a command, whose role may change tables; here it is told when nobody ran it."""
        if monotonic() < self._partitions_at + PARTITIONS_S:
            return
        self._partitions_at = monotonic()
        end = self._sweeps.partitions_end()
        if end is not None and (end - self._clock.now()).total_seconds() < WARN_BEFORE_S:
            remedy = "run: delaytasks db partitions maintain"
            self._events.emit("partitions.ending", until=end.isoformat(), remedy=remedy)


def _names(names: Sequence[str]) -> str:
    """The first ones, for one line of the log; the event's count says how many there are."""
    return ", ".join(names[:NAMES])


def tell_lapsed(events: Events, lapsed: Lapsed, **fields: object) -> None:
    if lapsed.total:
        events.emit("task.recovered", count=lapsed.total, **fields)
    for id, tag in lapsed.timed_out:
        events.emit("task.timed_out", id=id, tag=tag)
    for task in lapsed.given_up:
        events.emit("task.worker_lost", id=task.id, tag=task.tag, error=task.error or "", task=task)
