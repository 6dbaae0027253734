"""From entries that fell due to chunks in the pool: as many rows as fit the time box, never more chunks than
processes, so that what waits grows into the next chunk."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple

from billiard.exceptions import WorkerLostError

from delaytasks.core.clock import Clock
from delaytasks.core.events import Events
from delaytasks.core.interfaces import Entry, by_shard
from delaytasks.core.policies import Stamp
from delaytasks.core.settings import Settings
from delaytasks.execution.chunk import ChunkSize
from delaytasks.execution.runner import Report
from delaytasks.worker.delayed_calls import Later
from delaytasks.worker.failing_processes import Failing
from delaytasks.worker.job import Job
from delaytasks.worker.pool import Pool
from delaytasks.worker.shard_health import ShardHealth
from delaytasks.worker.shard_queue import REST_S, ShardQueue
from delaytasks.worker.time_limits import without_celerys_limits
from delaytasks.worker.waitlists import AGAIN_S, GO_ON_ALONE_S, GO_ON_S


class DispatcherState(NamedTuple):
    """What others have to go on with."""

    entries: list[Entry]
    #: Queues that were being worked off from the table, their priorities (none: lines only), and the shard.
    queues: list[tuple[str, set[int], int]]


class Dispatcher:
    """Lives in the worker's main process. The pool may be used from one thread only, the event loop's where there
    is one: `soon` brings a call there. Each shard has a lane, and a chunk has rows of one lane only."""

    def __init__(
        self,
        settings: Settings,
        clocks: Sequence[Clock],
        events: Events,
        pool: Any,
        soon: Callable[[Callable[[], None]], None],
        rearm: Callable[[Sequence[Entry]], None],
        sends_events: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._events = events
        self._pool = Pool(pool)
        self._soon = soon
        self._rearm = rearm
        self.sends_events = sends_events
        #: Called when there may be room again.
        self.on_room: Callable[[], None] = lambda: None
        #: Told of each chunk that ended; asked for, it says what became of the tasks.
        self.on_report: Callable[[Report], None] | None = None
        #: Told of what a chunk found when there are no more chunks.
        self.on_left: Callable[[DispatcherState], None] = lambda left: None
        #: So many rows may be claimed yet; None is any number.
        self.budget: int | None = None
        #: The stamp of a shard's policies.
        self.stamp_of: Callable[[int], Stamp | None] = lambda shard: Stamp()
        self._lock = threading.RLock()
        #: By the numbers of their shards.
        self.lanes = [
            ShardQueue(number, clock, len(clocks) > 1) for number, clock in enumerate(clocks)
        ]
        #: In the order of their turns.
        self._turns = list(self.lanes)
        self.shard_health = ShardHealth(
            self.lanes, self._lock, events, lambda: self._soon(self.pump)
        )
        self._size = ChunkSize(settings.chunk_time_box_s, settings.chunk_max)
        self._is_pumping = False
        self._is_open = True
        self._jobs = 0
        self._failing = Failing(self._pool, events)
        self._later = Later(soon, self.pump)

    # -- in ---------------------------------------------------------------------------------------

    def take(self, entries: Sequence[Entry]) -> None:
        """Entries that are due now; called by the wheel's thread."""
        with self._lock:
            for shard, some in by_shard(entries, len(self.lanes)).items():
                self.lanes[shard].take(some)
        self._soon(self.pump)

    def drain(self, queue: str, priorities: Sequence[int], shard: int = 0) -> None:
        """Claim by ourselves what is overdue in `queue`, until a chunk comes back that is not full."""
        with self._lock:
            if shard < len(self.lanes):  # else others know it
                self.lanes[shard].ask(queue, priorities)
        self._soon(self.pump)

    def close(self) -> DispatcherState:
        """No more chunks."""
        with self._lock:
            self._is_open = False
            queues = [
                (queue, some, lane.shard)
                for lane in self.lanes
                for queue, some in lane.unfinished.items()
            ]
            return DispatcherState([entry for lane in self.lanes for entry in lane.clear()], queues)

    @property
    def is_busy(self) -> bool:
        """Whether a chunk is under way, or one could be sent."""
        with self._lock:
            return any(lane.in_flight or (lane.is_busy and not lane.is_down) for lane in self.lanes)

    @property
    def is_at_work(self) -> bool:
        """Whether a row runs, as far as the main process knows."""
        return any(lane.in_flight or lane.running_on for lane in self.lanes)

    def pids(self) -> set[int]:
        """The processes that run rows, where they are the pool's own."""
        return self._pool.pids().union(*(list(lane.running_on) for lane in self.lanes)) - {
            os.getpid()
        }

    @property
    def waiting(self) -> int:
        return sum(lane.waiting for lane in self.lanes)

    @property
    def in_flight(self) -> dict[int, float]:
        """Start of each chunk in the pool, by the clock of its database."""
        with self._lock:
            return {
                number: began for lane in self.lanes for number, began in lane.in_flight.items()
            }

    def room(self, coming: int = 0) -> int:
        """How many more entries are welcome, beside those that are on their way: a time box full of them for each free
        process, and another one for each that can be expected to end its chunk soon. What it can not run in time is
        better left to other workers. None as long as less than half is free: it would cost more to bring a few than to
        bring many."""
        with self._lock:
            if not self._is_open:
                return 0
            boxes = free = self._free()
            if self._size.fits:
                boxes += free + sum(
                    lane.began_within(2 * self._settings.chunk_time_box_s) for lane in self.lanes
                )
            most = boxes * self._size.brought
            waiting = coming + sum(lane.waiting for lane in self.lanes if lane.is_open())
            return most - waiting if 2 * waiting <= most else 0

    def grace_s(self, queue: str) -> float:
        """How late an entry may come."""
        with self._lock:
            return self._settings.grace_s + max(lane.backlog_s(queue) for lane in self.lanes)

    # -- out --------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Fills the pool. A solo pool runs the chunk inside this call, and then calls us back from within."""
        with self._lock:
            if self._is_pumping:
                return
            self._is_pumping = True
        try:
            while (job := self._next_job()) is not None:
                if self._send(self._jobs, job):
                    self._soon(
                        self.pump
                    )  # it ran inline: the loop may look after its messages in between
                    return
        finally:
            with self._lock:
                self._is_pumping = False
                if (
                    self._is_open and self._free() > 0
                ):  # free processes do not wait for the end of a slow row
                    self._later.within(min(lane.held_up_in_s() for lane in self.lanes))
            self.on_room()

    def _next_job(self) -> Job | None:
        with self._lock:
            self._drop_late()  # first, so that a pool that is busy for long does not let them pile up
            free = self._free()
            size = self._size.rows if self.budget is None else min(self._size.rows, self.budget)
            if not self._is_open or free <= 0 or size <= 0:
                return None
            for lane in self._turns:
                if not lane.is_open() or (self._has_all_others(lane) and not lane.may_take_last()):
                    continue
                job = lane.next_job(
                    self._jobs + 1, size, free, self.sends_events(), self._size.least
                )
                if job is not None:
                    self._jobs += 1
                    self._turns.remove(lane)
                    self._turns.append(lane)
                    for_s = 0.0 if job.is_look else GO_ON_S if free > 1 else GO_ON_ALONE_S
                    if self.budget is not None:
                        self.budget -= job.limit
                        for_s = 0
                    counts = self.on_report is not None
                    return job._replace(
                        policies=self.stamp_of(lane.shard), for_s=for_s, counts=counts
                    )
            return None

    def _has_all_others(self, lane: ShardQueue) -> bool:
        """All processes of the pool but one are at chunks of this lane."""
        return 0 < len(lane.in_flight) == self._pool.size - 1

    def _drop_late(self) -> None:
        for lane in self.lanes:
            dropped = lane.drop_late(self._settings.grace_s)
            if dropped:
                self._events.emit("entry.late", count=dropped)

    def _free(self) -> int:
        return self._pool.size - sum(len(lane.in_flight) for lane in self.lanes)

    def _send(self, number: int, job: Job) -> bool:
        """True if the job is over already, as in a solo pool."""
        with self._lock:
            lane = self.lanes[job.shard]
            lane.sent(number)
            look_s = lane.lines.look_s if job.line is not None else inf
        if look_s < inf:  # the line may run a row for minutes: others have to look meanwhile
            self._later.after(max(look_s, 0))
        try:
            sent = self._pool.send(
                job, partial(self._done, number, job), partial(self._failed, number, job)
            )
        except Exception as error:
            self._failed(number, job, error)
            return False
        with self._lock:
            if number not in lane.in_flight:
                return True
            self._pool.sent[number] = sent
        if sent.answer is None:
            self._failed(number, job, "the pool takes no more work")
        else:
            without_celerys_limits(sent.answer)
        return False

    def recall(self) -> list[Entry]:
        """Chunks that the pool was made to forget take their places again. Returns the entries of those that no
        process has."""
        with self._lock:
            lost = self._pool.recall()
            if self._is_open:  # when closed they stay in flight, for their leases: a process may have one after all
                for number, job in lost:
                    self._gone(number, job, is_down=False)
        return [entry for _, job in lost for entry in job.entries]

    def _done(self, number: int, job: Job, report: Any) -> None:
        if not isinstance(report, Report):
            self._failed(number, job, report)
            return
        lane = self.lanes[job.shard]
        if self.on_report is not None:
            self.on_report(report)
        with self._lock:
            self._pool.sent.pop(number, None)
            lane.left(report.pid, report.left)
            if report.error:
                self._failing.failed(report.pid, report.error, report.is_stores_error)
                self._failed(number, job, report.error, ran=report.ran)
                return
            self._failing.succeeded(report.pid)
            is_open = self._is_open
            self._ended(number, job, report.ran)
            lane.answered()
            self._size.learn(report.ran, report.seconds, report.wanted)
            if job.drain is not None:
                lane.drained(number, job.drain, job.priorities, report.is_full, is_open)
            is_look = job.is_look and report.seconds < AGAIN_S
            look_s = lane.lines.heard(report.lines, job.line, is_look) if is_open else None
        if not is_open:
            queues = {opening.queue for opening in report.lines}
            self.on_left(
                DispatcherState(list(report.early), [(queue, set(), job.shard) for queue in queues])
            )
        elif report.early:
            self._rearm(report.early)
        if look_s is not None:
            self._later.after(look_s)
        self._soon(self.pump)

    def _ended(self, number: int, job: Job, ran: int) -> None:
        """The pool is done with it."""
        if (
            self.lanes[job.shard].in_flight.pop(number, None) is not None
            and self.budget is not None
        ):
            self.budget += max(job.limit - ran, 0)

    def _failed(self, number: int, job: Job, info: Any, ran: int = 0) -> None:
        """A chunk's process died, or the database is away: its rows are the sweep's and the leases' business."""
        is_down = (kind := getattr(info, "type", None)) is not WorkerLostError
        with self._lock:
            if is_down and kind is not None:  # the process could not even say what failed
                self._failing.failed(
                    self._pool.pid_of(number), str(info.exception), is_stores=False
                )
            self._gone(number, job, is_down, ran)
            if is_down:
                self.lanes[job.shard].failed()
        error = str(getattr(info, "exception", info))
        # Its process has logged why it failed, or the pool how the process died.
        is_logged = isinstance(info, str) or not is_down
        self._events.emit("chunk.failed", error=error, shard=job.shard, is_logged=is_logged)
        self._later.after(REST_S if is_down else 0)

    def _gone(self, number: int, job: Job, is_down: bool, ran: int = 0) -> None:
        """Nothing more will be heard of it. The caller holds the lock."""
        self._pool.sent.pop(number, None)
        lane = self.lanes[job.shard]
        self._ended(number, job, ran)
        if job.drain is not None:
            lane.failed_to_drain(number, job.drain, is_down)
        if job.line is not None:
            lane.lines.failed(job.line)
