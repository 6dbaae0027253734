"""Makes chunks of due entries and sends them to the pool.

A chunk has as many rows as fit its time budget, and there are never more chunks than processes.
Entries that wait meanwhile become part of the next chunk.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any

from billiard.exceptions import WorkerLostError

from delaytasks.core.clock import Clock
from delaytasks.core.events import Events
from delaytasks.core.interfaces import Entry
from delaytasks.core.policies import Stamp
from delaytasks.core.settings import Settings
from delaytasks.execution.runner import Report
from delaytasks.worker.calls import Call, DelayedCall
from delaytasks.worker.chunk_queue import ChunkQueue
from delaytasks.worker.job import Job
from delaytasks.worker.pool import FailingProcesses, Pool
from delaytasks.worker.shard_health import ShardHealth
from delaytasks.worker.shard_queue import FAILED_SHARD_PAUSE_S
from delaytasks.worker.time_limits import without_celerys_limits
from delaytasks.worker.unfinished_work import UnfinishedWork
from delaytasks.worker.waitlists import PROBE_S


class Dispatcher:
    """Lives in the worker's main process. Each chunk has rows of one shard only.

    The pool may be used from one thread only, to which `call_soon` brings a call. `hold` takes
    entries that a chunk found early. `send_back` takes what a chunk or a timer brings after
    `close`. With `on_report`, chunks count the outcomes of their tasks in their reports. At most
    `row_budget` rows are claimed.
    """

    def __init__(
        self,
        settings: Settings,
        clocks: Sequence[Clock],
        events: Events,
        pool: Any,
        *,
        call_soon: Callable[[Call], object],
        hold: Callable[[Sequence[Entry]], None],
        send_back: Callable[[UnfinishedWork], None],
        policy_stamp: Callable[[int], Stamp | None],
        sends_events: Callable[[], bool],
        on_capacity: Callable[[], None] = lambda: None,
        on_report: Callable[[Report], None] | None = None,
        row_budget: int | None = None,
    ) -> None:
        self._events = events
        self._pool = Pool(pool)
        self._call_soon = call_soon
        self._hold = hold
        self._send_back = send_back
        self._policy_stamp = policy_stamp
        self._sends_events = sends_events
        self._on_capacity = on_capacity
        self._on_report = on_report
        self._lock = threading.RLock()
        self._queue = ChunkQueue(settings, clocks, events, lambda: self._pool.size, row_budget)
        #: The queue of each shard, by its number.
        self.shard_queues = self._queue.shard_queues
        self.shard_health = ShardHealth(self.shard_queues, self._lock, events, self._pump_soon)
        self._is_pumping = False
        self._is_open = True
        self._failing_processes = FailingProcesses(self._pool, events)
        self._delayed_pump = DelayedCall(call_soon, self.pump)

    # -- entries and requests ---------------------------------------------------------------------

    def take(self, entries: Sequence[Entry]) -> None:
        """Take entries that are due now; called by the timing wheel's thread, among others."""
        with self._lock:
            is_open = self._is_open
            if is_open:
                self._queue.add(entries)
        if is_open:
            self._pump_soon()
        elif entries:
            self._send_back(UnfinishedWork(list(entries), []))

    def drain(self, queue: str, priorities: Sequence[int], shard: int = 0) -> None:
        """Claim what is overdue in `queue`, until a chunk comes back that is not full."""
        with self._lock:
            if shard < len(self.shard_queues):  # a newer shard is left to workers that know it
                self.shard_queues[shard].request_drain(queue, priorities)
        self._pump_soon()

    def close(self) -> UnfinishedWork:
        """Send no more chunks, and return what waits."""
        with self._lock:
            self._is_open = False
            return self._queue.clear()

    @property
    def is_busy(self) -> bool:
        """Whether the pool has a chunk, or one could be sent."""
        with self._lock:
            return any(
                one.in_flight or (one.is_busy and not one.is_down) for one in self.shard_queues
            )

    @property
    def is_at_work(self) -> bool:
        """Whether a task runs, as far as the main process knows."""
        return any(one.in_flight or one.running_on for one in self.shard_queues)

    def pids(self) -> set[int]:
        """Return the processes that run tasks, if they are the pool's own."""
        pids = self._pool.pids().union(*(list(one.running_on) for one in self.shard_queues))
        return pids - {os.getpid()}

    @property
    def waiting(self) -> int:
        """How many entries wait."""
        return self._queue.waiting

    @property
    def in_flight(self) -> dict[int, float]:
        """The start of each chunk in the pool, by the clock of its database."""
        with self._lock:
            return {
                number: began
                for one in self.shard_queues
                for number, began in one.in_flight.items()
            }

    @property
    def row_budget(self) -> int | None:
        """How many more rows may be claimed; None means any number."""
        return self._queue.row_budget

    def capacity(self, coming: int = 0) -> int:
        """Return how many more entries can run in time, while `coming` others are on their way."""
        with self._lock:
            return self._queue.capacity(coming) if self._is_open else 0

    def grace_s(self, queue: str) -> float:
        """Return how late an entry of the queue may come."""
        with self._lock:
            return self._queue.grace_s(queue)

    # -- to the pool ------------------------------------------------------------------------------

    def _pump_soon(self) -> None:
        self._call_soon(self.pump)

    def pump(self) -> None:
        """Fill the pool. A solo pool runs the chunk within this call, and calls back from there."""
        with self._lock:
            if self._is_pumping:
                return
            self._is_pumping = True
        try:
            while (numbered := self._next_job()) is not None:
                if self._send(*numbered):
                    self._pump_soon()  # the chunk ran inline: let the loop read its messages first
                    return
        finally:
            with self._lock:
                self._is_pumping = False
                if self._is_open and self._queue.free_processes > 0:
                    # Free processes need not wait for the end of a slow task.
                    self._delayed_pump.call_within(self._queue.held_up_in_s())
            self._on_capacity()

    def _next_job(self) -> tuple[int, Job] | None:
        with self._lock:
            self._queue.drop_late()  # first: they must not accumulate while the pool is busy
            numbered = self._queue.next_job(self._sends_events()) if self._is_open else None
            if numbered is None:
                return None
            number, job = numbered
            return number, job._replace(
                policies=self._policy_stamp(job.shard),
                counts_outcomes=self._on_report is not None,
            )

    def _send(self, number: int, job: Job) -> bool:
        """Return True if the chunk has ended already, as in a solo pool."""
        shard_queue = self.shard_queues[job.shard]
        with self._lock:
            shard_queue.chunk_sent(number)
            check_s = shard_queue.waitlists.next_check_s if job.waitlist is not None else inf
        if check_s < inf:  # it may run one task for minutes: others check the waitlist meanwhile
            self._delayed_pump.call_after(max(check_s, 0))
        try:
            sent = self._pool.send(
                job, partial(self._done, number, job), partial(self._failed, number, job)
            )
        except Exception as error:
            self._failed(number, job, error)
            return False
        with self._lock:
            if number not in shard_queue.in_flight:
                return True
            self._pool.sent[number] = sent
        if sent.result is None:
            self._failed(number, job, "the pool takes no more work")
        else:
            without_celerys_limits(sent.result)
        return False

    # -- from the pool ----------------------------------------------------------------------------

    def recall(self) -> list[Entry]:
        """Restore the chunks that the pool was made to forget.

        Return the entries of those chunks that no process has.
        """
        with self._lock:
            lost = self._pool.recall()
            if self._is_open:  # else a process may have it, and its leases are renewed
                for number, job in lost:
                    self._remove(number, job, is_down=False)
        return [entry for _, job in lost for entry in job.entries]

    def _done(self, number: int, job: Job, report: Any) -> None:
        if not isinstance(report, Report):
            self._failed(number, job, report)
            return
        if self._on_report is not None:
            self._on_report(report)
        shard_queue = self.shard_queues[job.shard]
        with self._lock:
            self._pool.sent.pop(number, None)
            shard_queue.set_running(report.pid, report.left)
            if report.error:
                self._failing_processes.chunk_failed(
                    report.pid, report.error, report.is_stores_error
                )
                self._failed(number, job, report.error, ran=report.ran)
                return
            self._failing_processes.chunk_succeeded(report.pid)
            self._queue.chunk_ended(number, job, report.ran)
            self._queue.learn_size(report)
            shard_queue.mark_answered()
            if is_open := self._is_open:
                self._continue_after(number, job, report)
        if not is_open:
            queues = {state.queue for state in report.lines}
            unfinished = [(queue, set[int](), job.shard) for queue in queues]
            self._send_back(UnfinishedWork(list(report.early), unfinished))
        self._pump_soon()

    def _continue_after(self, number: int, job: Job, report: Report) -> None:
        """Take over what a chunk found. The caller holds the lock."""
        shard_queue = self.shard_queues[job.shard]
        if job.drain is not None:
            shard_queue.drain_chunk_ended(number, job.drain, job.priorities, report.is_full)
        was_probe = job.is_probe and report.seconds < PROBE_S
        check_s = shard_queue.waitlists.update(report.lines, job.waitlist, was_probe)
        if check_s is not None:
            self._delayed_pump.call_after(check_s)
        if report.early:
            self._hold(report.early)

    def _failed(self, number: int, job: Job, info: Any, ran: int = 0) -> None:
        """Record that a chunk's process died, or that the database is unavailable.

        The sweep and the leases take care of its rows.
        """
        is_down = (kind := getattr(info, "type", None)) is not WorkerLostError
        with self._lock:
            if is_down and kind is not None:  # the process could not even report the failure
                self._failing_processes.chunk_failed(
                    self._pool.pid_of(number), str(info.exception), is_stores_error=False
                )
            self._remove(number, job, is_down, ran)
            if is_down:
                self.shard_queues[job.shard].mark_failed()
        error = str(getattr(info, "exception", info))
        # Its process has logged why it failed, or the pool has logged how the process died.
        is_logged = isinstance(info, str) or not is_down
        cause = info if isinstance(info, BaseException) else None
        self._events.emit(
            "chunk.failed", error=error, cause=cause, shard=job.shard, is_logged=is_logged
        )
        self._delayed_pump.call_after(FAILED_SHARD_PAUSE_S if is_down else 0)

    def _remove(self, number: int, job: Job, is_down: bool, ran: int = 0) -> None:
        """Forget a chunk that will not report. The caller holds the lock."""
        self._pool.sent.pop(number, None)
        shard_queue = self.shard_queues[job.shard]
        self._queue.chunk_ended(number, job, ran)
        if job.drain is not None:
            shard_queue.drain_chunk_failed(number, job.drain, is_down)
        if job.waitlist is not None:
            shard_queue.waitlists.visit_failed(job.waitlist)
