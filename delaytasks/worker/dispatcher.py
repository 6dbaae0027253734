"""The dispatcher: takes what is due, and sends chunks to free processes of the pool.

A chunk has as many rows as fit its time budget, and there are never more chunks than processes.
The docstring of the package has a map of the modules, and says which thread owns which state.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence, Set
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from billiard.exceptions import WorkerLostError

from delaytasks.events import Events
from delaytasks.loops import Loop
from delaytasks.model.clock import monotonic
from delaytasks.model.task import Entry
from delaytasks.run.runner import FailureReason, Report
from delaytasks.worker.chunk_queue import FAILED_PAUSE_S, ChunkQueue, UnfinishedWork
from delaytasks.worker.chunk_request import ChunkRequest
from delaytasks.worker.pool import POOL_REST_S, Pool

if TYPE_CHECKING:
    from delaytasks.worker.worker_runtime import WorkerRuntime

# -- Calls in the thread that may use the pool: the event loop, or a thread in its place ----------


Call = Callable[[], None]


class CallThread:
    """Takes the place of the event loop if the broker's transport has no event loop.

    A solo pool runs its chunks in this thread. There must be no second thread of this kind, so
    the watchdog never takes it for stuck.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._queue: SimpleQueue[Call] = SimpleQueue()
        self.loop = Loop("calls", self._run_calls, events)

    def call_soon(self, call: Call) -> None:
        self._queue.put(call)
        self.loop.wake()

    def _run_calls(self) -> None:
        while True:
            try:
                call = self._queue.get_nowait()
            except Empty:
                return
            self._events.attempt("calls", "call", call)


class DelayedCall:
    """A call that timers bring to the thread that may use the pool."""

    def __init__(self, call_soon: Callable[[Call], object], call: Call) -> None:
        self._call_soon = call_soon
        self._call = call
        self._planned_at = -inf

    def call_after(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._call_soon, (self._call,))
        timer.daemon = True
        timer.start()

    def call_within(self, seconds: float) -> None:
        """Plan the call unless an earlier call of this method planned one that is yet to come.

        Infinity plans nothing.
        """
        if seconds < inf and monotonic() >= self._planned_at:
            self._planned_at = monotonic() + seconds
            self.call_after(seconds)


class CapacityRequest:
    """One thread requests capacity, and another one grants it by setting the event `granted`."""

    def __init__(self) -> None:
        self.granted = threading.Event()
        self._is_open = False

    def open(self) -> None:
        self._is_open = True

    def withdraw(self) -> None:
        self._is_open = False

    def grant_if(self, has_capacity: Callable[[], int]) -> None:
        """Grant the request if there is one and `has_capacity` returns more than 0."""
        if self._is_open and has_capacity():
            self._is_open = False
            self.granted.set()


class ChunkFailure(NamedTuple):
    """A chunk that failed as a whole."""

    error: str
    reason: FailureReason
    #: The pool process in which the chunk failed, 0 if it is unknown, or None if the failure says
    #: nothing about a process.
    pid: int | None = None
    cause: BaseException | None = None
    #: Whether the process has logged why the chunk failed, or the pool how the process died.
    is_logged: bool = True

    @classmethod
    def reported(cls, report: Report) -> ChunkFailure:
        """The process caught the error and reported it."""
        return cls(report.error, report.reason, report.pid)

    @classmethod
    def unreported(cls, info: Any, pid: int) -> ChunkFailure:
        """The pool passed `info` instead of a report, because process `pid` could not report."""
        kind, error = getattr(info, "type", None), str(getattr(info, "exception", info))
        if kind is WorkerLostError:
            return cls(error, FailureReason.PROCESS_LOST)
        cause = info if isinstance(info, BaseException) else None
        return cls(error, FailureReason.UNKNOWN, pid, cause, is_logged=False)

    @classmethod
    def not_sent(cls, error: str, cause: Exception | None = None) -> ChunkFailure:
        """The pool did not take the chunk."""
        return cls(error, FailureReason.UNKNOWN, cause=cause, is_logged=cause is None)

    def fields(self) -> dict[str, Any]:
        """Return the fields of the event `chunk.failed`."""
        return {**self._asdict(), "reason": self.reason.value}


class Dispatcher:
    """Lives in the worker's main process.

    `pump`, `_send` and `recall` use the pool, and run in the thread to which `call_soon` brings a
    call. Any thread may call the other methods.

    What comes after `close` is sent back. If the worker has an `on_report`, chunks count the
    outcomes of their tasks in their reports.
    """

    def __init__(self, worker: WorkerRuntime) -> None:
        self._worker = worker
        self._events = worker.events
        self._send_back = worker.work_sender.send_back
        self._pool = Pool(worker.celery_worker.pool)
        self._call_soon = worker.call_soon
        self._lock = threading.RLock()
        self._queue = ChunkQueue(worker, self._pool)
        self._is_pumping = False
        self._is_open = True
        self._delayed_pump = DelayedCall(self._call_soon, self.pump)

    # -- what arrives -----------------------------------------------------------------------------

    def receive(self, entries: Sequence[Entry]) -> None:
        """Hold the entries until they are due, and take those that are due now."""
        due = self._worker.near_entries.hold(entries)
        if due:
            self.take(due)

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

    def start_drain(self, queue: str, priorities: Sequence[int]) -> None:
        """Drain `queue`: send chunks that claim its due rows, until one comes back not full."""
        with self._lock:
            is_open = self._is_open
            if is_open:
                self._queue.start_drain(queue, priorities)
        if is_open:
            self._pump_soon()
        else:
            # One message for one, since this worker may receive it again before it stops.
            self._send_back(UnfinishedWork([], [(queue, set(priorities))], messages=1))

    def limits_changed(self, tags: Set[str]) -> None:
        """Check the waitlists of these tags now."""
        with self._lock:
            if self._queue.waitlists is None:
                return
            self._queue.waitlists.limits_changed(tags)
        self._pump_soon()

    def close(self) -> UnfinishedWork:
        """Send no more chunks, and return what waits."""
        with self._lock:
            self._is_open = False
            return self._queue.clear()

    def take_left_to_table(self) -> UnfinishedWork:
        """Return the queues whose entries were left to the table since the last call."""
        with self._lock:
            return self._queue.take_left_to_table()

    # -- what other parts of the worker ask -------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether the pool has a chunk, or one could be sent."""
        with self._lock:
            return self._queue.is_busy

    @property
    def is_at_work(self) -> bool:
        """Whether a task runs, as far as the main process knows."""
        return bool(self._queue.in_flight or self._queue.detached)

    def pids(self) -> set[int]:
        """Return the processes that run tasks, if they are the pool's own."""
        pids = self._pool.pids() | set(self._queue.detached)
        return pids - {os.getpid()}

    def running(self) -> tuple[list[float], dict[int, Sequence[int]]]:
        """Return the starts of the chunks, and by process the rows that outlive theirs."""
        with self._lock:
            return [*self._queue.in_flight.values()], dict(self._queue.detached)

    def process_died(self, pid: int) -> None:
        with self._lock:
            self._queue.set_detached(pid, ())

    @property
    def waiting(self) -> int:
        """How many entries wait."""
        return self._queue.waiting

    @property
    def in_flight(self) -> list[float]:
        """The start of each chunk in the pool, by the clock of the database."""
        with self._lock:
            return list(self._queue.in_flight.values())

    @property
    def drain_count(self) -> int:
        """How many queues are drained, or wait for their turn."""
        return self._queue.drain_count

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
            while (request := self._next_chunk()) is not None:
                if self._send(request):
                    self._pump_soon()  # the chunk ran inline: let the loop read its messages first
                    return
        finally:
            with self._lock:
                self._is_pumping = False
                if self._is_open and self._queue.free_processes > 0:
                    # A drain whose chunk a slow task holds up gets another chunk then.
                    self._delayed_pump.call_within(self._queue.extra_chunk_in_s())
            self._worker.capacity_request.grant_if(self.capacity)

    def _next_chunk(self) -> ChunkRequest | None:
        with self._lock:
            self._queue.drop_late()  # first: they must not accumulate while the pool is busy
            can_send = self._is_open and not self._pool.is_resting
            request = self._queue.next_chunk() if can_send else None
            if request is None:
                return None
            return request._replace(
                sends_events=self._worker.sends_events(),
                policies=self._worker.runtime.policy_cache.stamp,
                counts_outcomes=self._worker.on_report is not None,
            )

    def _send(self, request: ChunkRequest) -> bool:
        """Return True if the chunk has ended already, as in a solo pool."""
        with self._lock:
            self._queue.chunk_sent(request)
            check_due_in_s = (
                self._queue.waitlist_check_due_in_s if request.waitlist is not None else inf
            )
        if check_due_in_s < inf:
            # The chunk may run one task for minutes: others check the waitlist meanwhile.
            self._delayed_pump.call_after(max(check_due_in_s, 0))
        try:
            sent = self._pool.send(
                request, partial(self._done, request), partial(self._lost, request)
            )
        except Exception as error:
            self._not_sent(request, ChunkFailure.not_sent(str(error), error))
            return False
        with self._lock:
            if request.number not in self._queue.in_flight:
                return True
            self._pool.sent[request.number] = sent
        if sent.result is None:
            self._not_sent(request, ChunkFailure.not_sent("the pool takes no more work"))
        return False

    def _not_sent(self, request: ChunkRequest, failure: ChunkFailure) -> None:
        """Let the pool rest, or every waiting entry would fail in the same way."""
        self._pool.rest()
        self._failed(request, failure)
        self._delayed_pump.call_after(POOL_REST_S)

    # -- from the pool ----------------------------------------------------------------------------
    # `_done` and `_lost` end in `_succeeded` or `_failed`, which pump again.

    def recall(self) -> list[Entry]:
        """Restore the chunks that the pool was made to forget.

        Return the entries of those chunks that no process has.
        """
        with self._lock:
            lost = self._pool.recall()
            if self._is_open:  # else a process may have it, and its leases are renewed
                for request in lost:
                    self._pool.forget(request.number)
                    self._queue.chunk_failed(request, FailureReason.PROCESS_LOST, ran=0)
        return [entry for request in lost for entry in request.entries]

    def _done(self, request: ChunkRequest, report: Any) -> None:
        """Called by the pool with the report of a chunk, or with what ended the chunk's thread."""
        if not isinstance(report, Report):
            self._lost(request, report)
            return
        if self._worker.on_report is not None:
            self._worker.on_report(report)
        if self._worker.counts is not None:
            self._worker.counts.add(report.statistics)
        with self._lock:
            self._queue.set_detached(report.pid, report.detached)
        if report.error:
            self._failed(request, ChunkFailure.reported(report), ran=report.ran)
        else:
            self._succeeded(request, report)

    def _lost(self, request: ChunkRequest, info: Any) -> None:
        """Called by the pool if the process of a chunk could not report."""
        self._failed(request, ChunkFailure.unreported(info, self._pool.pid_of(request.number)))

    def _succeeded(self, request: ChunkRequest, report: Report) -> None:
        with self._lock:
            self._pool.forget(request.number)
            self._queue.chunk_ended(request, report.ran)
            self._queue.learn_size(report)
            if is_open := self._is_open:
                check_due_in_s = self._queue.continue_after(request, report)
                if check_due_in_s is not None:
                    self._delayed_pump.call_after(check_due_in_s)
                if report.early:  # under the lock, or `close` could come before it
                    self.receive(report.early)
        if not is_open:
            queues = {state.queue for state in report.waitlists}
            unfinished = [(queue, set[int]()) for queue in queues]
            self._send_back(UnfinishedWork(list(report.early), unfinished))
        self._pump_soon()

    def _failed(self, request: ChunkRequest, failure: ChunkFailure, ran: int = 0) -> None:
        """Record that a chunk failed as a whole. The sweep and the leases take care of its rows."""
        with self._lock:
            self._pool.forget(request.number)
            self._queue.chunk_failed(request, failure.reason, ran)
        self._events.emit("chunk.failed", **failure.fields())
        if failure.reason is FailureReason.UNAVAILABLE:
            self._delayed_pump.call_after(FAILED_PAUSE_S)
        self._pump_soon()
