"""Calls the processor of one task or batch, from the claimed row to its settlement.

`Calls.run` first looks at each row: one that has expired, was cancelled, or needs what this process
lacks is not called here. For each call of the others, which is one task or a batch of tasks, it
runs `Host.execute` in a context of its own. This provides what the processor expects around it,
such as Celery's current task, calls the processor, and then `ProcessorCall.end`, in which each
`TaskRun` decides how its task is settled. While the processor runs, `task.complete` and
`task.check_lease` reach its `TaskRun` through the context.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import logging
import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from math import inf
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args

from delaytasks.model.body import NO_NAME, PLAIN, encode_body, name_in, names_of
from delaytasks.model.clock import fork_safe, monotonic
from delaytasks.model.errors import (
    InvalidInputError,
    LeaseLostError,
    TaskCancelledError,
    TaskStateError,
)
from delaytasks.model.inputs import MAX_DELAY_S, MAX_SLOTS, check_wait
from delaytasks.model.moves import Cancel, Done, Fail, LateReason, Outcome, Retry, Snooze
from delaytasks.model.task import (
    ASKED,
    CallerConnection,
    DelayedTask,
    Settlement,
    current_run,
    is_encrypted,
)
from delaytasks.model.text import (
    DEFER_MAX_S,
    DEFER_MIN_S,
    DEFERRALS,
    count,
    defer_until,
    shown,
    storable,
    traceback_text,
)
from delaytasks.run.observers import Observer

if TYPE_CHECKING:
    from delaytasks.db.claims import Claims
    from delaytasks.limits.admission import Admission
    from delaytasks.registry import ProcessorSpec, Registry
    from delaytasks.runtime import Runtime

logger = logging.getLogger("delaytasks")
T = TypeVar("T")


# -- Threads for concurrent calls of processors; each tag has a limited number of slots -----------


class ThreadSlots:
    """The slots of a process, which its chunks share.

    A call that finds no idle thread starts one, which stays.
    """

    def __init__(self) -> None:
        fork_safe(self)

    def after_fork(self) -> None:
        self._changed = threading.Condition()
        self._taken: Counter[str] = Counter()
        self._all_taken = 0
        self._threads = ThreadPoolExecutor(MAX_SLOTS, "delaytasks-row")
        #: The calls that ended since the last call of `ended`.
        self._ended, self._seconds = 0, 0.0

    def take(self, tag: str, slots: int, until: float) -> bool:
        """Take one of the tag's slots when one is free.

        Return False if this takes longer than `until`.
        """
        with self._changed:
            if not self._wait(lambda: self._free(tag, slots) > 0, until):
                return False
            self._taken[tag] += 1
            self._all_taken += 1
            return True

    def give_back(self, tag: str) -> None:
        """Free a slot in which no call was started."""
        with self._changed:
            self._leave(tag)
        self.notify()

    def start(
        self, tag: str, slots: int, rows: int, call: Callable[[], T], done: Callable[[T], None]
    ) -> None:
        """Run `call` in a thread for which a slot was taken.

        `done` gets the result after the slot is free.
        """
        self._threads.submit(self._run, tag, slots, rows, call, done)

    def free(self, tag: str, slots: int) -> int:
        with self._changed:
            return self._free(tag, slots)

    def wait(self, is_so: Callable[[], bool], until: float | None = None) -> bool:
        """Wait until `is_so` returns True, tested whenever a call has ended.

        Return False after `until`.
        """
        with self._changed:
            return self._wait(is_so, until)

    def notify(self) -> None:
        """Let the callers of `wait` test again."""
        with self._changed:
            self._changed.notify_all()

    def ended(self) -> tuple[int, float]:
        """Return the rows that ended since the last call, and their time divided by the slots."""
        if not self._ended:  # as in a process without concurrent calls
            return 0, 0.0
        with self._changed:
            ended, self._ended, self._seconds = (self._ended, self._seconds), 0, 0.0
            return ended

    def _run(
        self, tag: str, slots: int, rows: int, call: Callable[[], T], done: Callable[[T], None]
    ) -> None:
        began = monotonic()
        answer = call()
        with self._changed:
            self._ended += rows
            self._seconds += (monotonic() - began) / slots
            self._leave(tag)
        try:
            done(answer)
        finally:
            self.notify()

    def _leave(self, tag: str) -> None:
        self._taken[tag] -= 1
        self._all_taken -= 1

    def _free(self, tag: str, slots: int) -> int:
        return min(slots - self._taken[tag], MAX_SLOTS - self._all_taken)

    def _wait(self, is_so: Callable[[], bool], until: float | None) -> bool:
        return self._changed.wait_for(is_so, None if until is None else until - monotonic())


# -- The event loop of a process, in which processors that are `async def` run --------------------

#: Runs the coroutines of this context in place of the event loop. A test runs them in its own
#: thread or event loop, where its connections are.
run_coroutine: contextvars.ContextVar[Callable[[Coroutine[Any, Any, Any]], Any] | None] = (
    contextvars.ContextVar("run_coroutine", default=None)
)


class EventLoop:
    """An event loop in a thread of its own, which the first coroutine starts.

    All processors share one loop, and thus its clients and connections. If a coroutine stops the
    loop, or a task that it began raises `SystemExit`, the loop goes on, since other coroutines need
    it.
    """

    def __init__(self) -> None:
        fork_safe(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def result_of(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run the coroutine with the caller's context variables, and return its result."""
        if (run := run_coroutine.get()) is not None:
            return run(coroutine)
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                threading.Thread(
                    target=_run_forever, args=(loop,), name="delaytasks-async", daemon=True
                ).start()
                self._loop = loop  # only now: a process may have too many threads
        future = asyncio.run_coroutine_threadsafe(_value_and_error(coroutine), self._loop)
        try:
            value, error = future.result()
        except BaseException:  # such as a soft time limit, which a signal raises in this thread
            future.cancel()
            raise
        if error is not None:
            raise error
        return value


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            loop.run_forever()
        except BaseException:
            logger.exception(
                "delaytasks: a task of a coroutine ended the event loop, which goes on"
            )


async def _value_and_error(coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    """Catch every exception, since an exit would end the loop and all coroutines in it."""
    try:
        return await coroutine, None
    except BaseException as error:
        return None, error


result_of = EventLoop().result_of


def awaited(value: Any) -> Any:
    """Return what a processor returned; if this is a coroutine, run it and return its result."""
    return result_of(value) if type(value) is CoroutineType else value


# -- What the main process of a worker tells the processes of its pool -----------------------------


#: The most runs of a worker that are asked to stop at the same time.
MOST_STOPS = 1000
#: Processes that were busy for longer ago do not explain why a run begins late.
BUSY_US = 3_000_000


class WorkerMemory(ctypes.Structure):
    """What the main process of a worker tells the processes of its pool, in memory that they share.

    Each number is written as a whole. In a process without a worker, nothing was ever written. Only
    `worker` writes it, but runs read it, and `run` imports nothing of `worker`.

    The times of leases are those of the monotonic clock, which all processes of a host share.
    Usually a renewal is answered less than one lease after the previous one was requested, and no
    lease has ended in between. A main process that was frozen may renew too late:

        previous renewal                                   this renewal
            asked_at          lost_if_claimed_before   asked_at   answered_at
        -------|------------------------|-----------------|------------|------> time
                                        |<---------- lease_s --------->|

    The lease of a row that was claimed before `lost_if_claimed_before` had then ended before the
    renewal was answered, and another worker may have recovered the row.

    Attributes
    ----------
    asked_at, lost_if_claimed_before
        The last renewal of the leases that succeeded. The renewed leases last from `asked_at` on.
    lost_at
        When other workers may recover the rows, because this one has not reported since.
    others_wait
        Whether tasks wait for a process that continues with a backlog.
    obstacles_us
        When each `LateReason` last kept due rows from starting, by the database's clock.
    stops, stopped
        How many runs were asked to stop, and the id and version of each.
    """

    asked_at: float
    lost_if_claimed_before: float
    lost_at: float
    others_wait: bool
    obstacles_us: Any
    stops: int
    stopped: Any

    _fields_ = (
        *((name, ctypes.c_double) for name in ("asked_at", "lost_if_claimed_before", "lost_at")),
        ("others_wait", ctypes.c_bool),
        ("obstacles_us", ctypes.c_double * len(LateReason)),
        ("stops", ctypes.c_int64),
        ("stopped", ctypes.c_int64 * 2 * MOST_STOPS),
    )

    @classmethod
    def shared(cls) -> WorkerMemory:
        """Return new memory, which the children of this process will see."""
        memory = cls.from_buffer(mmap.mmap(-1, ctypes.sizeof(cls)))
        memory.lost_at = inf
        return memory

    def record_renewal(self, asked_at: float, answered_at: float, lease_s: float) -> None:
        """Record a renewal that succeeded."""
        one_lease_ago = answered_at - lease_s
        if self.asked_at < one_lease_ago:
            self.lost_if_claimed_before = one_lease_ago
        self.asked_at = asked_at  # written last, since it is read first

    def record_report(self, asked_at: float, answered_at: float, lost_s: float) -> None:
        """Record that the worker has reported. Others recover its rows `lost_s` after its last
        report.
        """
        if self.lost_at < answered_at:
            self.lost_if_claimed_before = answered_at
        self.lost_at = asked_at + lost_s

    def ask_to_stop(self, runs: Sequence[tuple[int, int]]) -> None:
        """Replace the ids and versions of the runs that were asked to stop."""
        self.stops = 0
        for number, run in enumerate(runs[:MOST_STOPS]):
            self.stopped[number][:] = run
        self.stops = min(len(runs), MOST_STOPS)

    def is_asked_to_stop(self, id: int, version: int) -> bool:
        if not self.stops:  # as nearly always
            return False
        return (id, version) in map(tuple, self.stopped[: self.stops])

    def why_late(self, since_us: int, now_us: int) -> LateReason:
        """Return why a row that could have started at `since_us` starts only now."""
        at_us = self.obstacles_us
        for reason in (LateReason.NO_WORKER, LateReason.DATABASE, LateReason.BROKER):
            if at_us[reason] > since_us:
                return reason
        was_busy = at_us[LateReason.BUSY] > max(since_us, now_us - BUSY_US)
        return LateReason.BUSY if was_busy else LateReason.UNNOTICED


# -- Calls ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Host:
    """What a process gives its runner. The defaults are those of a process without a worker."""

    claims: Claims
    admission: Admission
    registry: Registry
    #: Calls a processor in the context that it expects, and then `ProcessorCall.end`. An exception
    #: that it raises before this counts as the processor's.
    execute: Callable[[ProcessorCall], object]
    #: Keeps this context between rows that a thread runs one after another.
    thread_context: Callable[[], AbstractContextManager[object]] = nullcontext
    thread_slots: ThreadSlots = field(default_factory=ThreadSlots)
    #: Whether the time limits of processors can be kept.
    keeps_time_limits: bool = True
    #: Whether concurrent rows may go on while the next chunk runs: another process has to renew
    #: their leases, and `Runner.finish` has to be called at the end.
    may_detach: bool = False
    memory: WorkerMemory = field(default_factory=lambda: WorkerMemory.shared())


# -- One run of one task: its completion, its lease and its settlement -----------------------------


#: The longest time from the claim of a row to its start, in time budgets. A chunk that is claimed
#: ahead waits for the budget of the current one, too.
MAX_BUDGETS = 2
#: `check_lease` raises if less than this part of the lease is left, or of the time after which the
#: rows of a silent worker are recovered. If renewals and reports succeed, more than half is left.
LAST_PART = 1 / 3


class LeaseEndsError(LeaseLostError):
    """The lease is about to end or has ended, because the worker could not renew it."""


#: The longest result of a task. Results are for inspection; data belongs elsewhere.
MAX_RESULT_BYTES = 16 * 1024
#: The code of these values runs only during an iteration over them.
_LAZY = (GeneratorType, AsyncGeneratorType, map, filter)
#: The outcomes of a run that is repeated or that fails.
_UNFINISHED = (Retry, Snooze, Fail)


class TaskRun:
    """One run of one task, from its start to its settlement.

    The settlement is found in this order: a run that a caller has cancelled ends as CANCELLED,
    unless it has succeeded. A run that has settled its row with `complete()` stays DONE, whatever
    it raises after the commit. An outcome (`Retry`, `Snooze`, `Cancel`, `Fail`, `Done`) decides;
    any other value is a success. An error is retried by the retry schedule of the task or of its
    processor, or else fails the task. An outcome that cannot be used becomes such an error.
    """

    #: The processor has settled the row as DONE in its own transaction.
    is_written = False
    #: The transaction is committed, or was about to be.
    is_committed = False
    #: The commit is confirmed. SQLAlchemy reports the commit of a plain connection before it
    #: happens.
    is_certain = False
    _connection: CallerConnection | None = None

    def __init__(
        self, calls: Calls, processor: ProcessorSpec, task: DelayedTask, began: datetime
    ) -> None:
        self._calls, self._runtime = calls, calls.runtime
        self.processor, self.task, self.began = processor, task, began
        #: The time of the monotonic clock.
        self.began_s = monotonic()

    @property
    def is_left_open(self) -> bool:
        """Whether the processor's transaction has not ended, so that the row is still locked."""
        if self.is_committed or self._connection is None:
            return False
        return self._connection.in_transaction()

    def complete(self, session: Any, result: Any) -> None:
        task = self.task
        kept = None if result is None else encode_body(result, MAX_RESULT_BYTES)
        transaction = self._runtime.transactions.of(session)
        if transaction is None:
            raise InvalidInputError(
                "complete() takes the session that the effect is written in: session=…", "session"
            )
        with transaction.guard() as self._connection:
            if not self._calls.host.claims.complete(task, kept, self._connection):
                raise LeaseLostError(
                    f"task {task.id} ({task.tag}) is no longer this run's: roll back what it did",
                    task.id,
                )
        self.is_written = True
        transaction.after_commit([task], self._committed)

    def _committed(self, _tasks: Sequence[DelayedTask], is_committed: bool = True) -> None:
        self.is_committed, self.is_certain = True, is_committed

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether `cancel(running=True)` has asked this run to stop."""
        return self._calls.host.memory.is_asked_to_stop(self.task.id, self.task.version)

    def check_lease(self) -> None:
        task, settings = self.task, self._runtime.settings
        if self.is_asked_to_stop:
            raise TaskCancelledError(f"task {task.id} ({task.tag}) was cancelled: stop", task.id)
        lost_in_s = self._calls.host.memory.lost_at - monotonic()
        left_s = self.lease_left_s()
        if left_s < settings.lease_s * LAST_PART or lost_in_s < settings.lost_s * LAST_PART:
            left_s = min(left_s, lost_in_s)
            end = f"ends in {left_s:.1f} s" if left_s > 0 else "has ended"
            raise LeaseEndsError(
                f"the lease of task {task.id} ({task.tag}) could not be renewed and {end}: stop",
                task.id,
            )

    def lease_left_s(self) -> float:
        """Return how long the lease lasts, as far as this process knows without a query.

        A lease that ended has no time left, even if the worker has renewed its leases since then:
        another worker may have recovered the row before that.
        """
        settings, memory = self._runtime.settings, self._calls.host.memory
        asked_at = memory.asked_at
        claimed_at = self.began_s - MAX_BUDGETS * settings.chunk_time_budget_s
        if claimed_at < memory.lost_if_claimed_before:
            return 0.0
        return max(claimed_at, asked_at) + settings.lease_s - monotonic()

    # -- the settlement ---------------------------------------------------------------------------

    def settlement(
        self, value: object, error: BaseException | None
    ) -> tuple[Settlement, BaseException | None]:
        """Return the settlement of a run, and the error that decided it.

        The error is the given one, or it says why `value` is no valid outcome.
        """
        is_completed = self.is_certain or self.is_left_open
        # An error may have rolled back what `complete()` wrote. If not, the fence refuses a move.
        is_done = self.is_written if error is None else is_completed
        if not is_done and (error is not None or isinstance(value, _UNFINISHED)):
            is_own = isinstance(error, TaskCancelledError) and error.id == self.task.id
            if is_own or self.is_asked_to_stop:
                return self._cancelled(error), None
        if error is None:
            try:
                return self._of_value(value), None
            except Exception as raised:  # becomes the error of the task, with its traceback
                error = raised
        if is_completed:
            return self._of_completed(error), error
        # If that transaction was committed nevertheless, the fence refuses this settlement.
        return self.of_error(error), error

    def of_error(self, error: BaseException) -> Settlement:
        """Schedule a retry or fail the task.

        If another task of its batch was cancelled, run it again immediately. If its lease was about
        to end, wait a sweep interval, since this worker may still be cut off.
        """
        task = self.task
        is_others = isinstance(error, TaskCancelledError) and error.id not in (None, task.id)
        if is_others or isinstance(error, LeaseEndsError):  # not the task's fault
            self._runtime.events.emit("task.interrupted", **task.event_fields, error=error)
            rest_s = 0 if is_others else self._runtime.settings.sweep_s
            again = self._runtime.clock.now() + timedelta(seconds=rest_s)
            return Settlement(task, "snooze", self.began, expected_time=again, due_time=task.due)
        text = traceback_text(error, self._runtime.settings.max_error_bytes)
        retry_schedule = self.processor.retry_schedule_for(type(error), task)
        wait_s = None if retry_schedule is None else retry_schedule.wait_s(task.runs)
        if wait_s is None:
            return self._failed(text, error)
        return self._schedule_retry(text, wait_s, error)

    def _cancelled(self, error: BaseException | None) -> Settlement:
        """Return the settlement of a run that a caller has cancelled and that did not succeed."""
        text = "cancelled by a caller while it ran"
        self._emit("task.withdrawn", reason=text)
        if error is not None and not isinstance(error, TaskCancelledError):
            text += "\n" + traceback_text(error, self._runtime.settings.max_error_bytes)
        return Settlement(self.task, "withdraw", self.began, self._text(text))

    def _of_value(self, value: object) -> Settlement:
        """Return the settlement of what a processor returned."""
        if self.is_written:
            if self.is_committed or self.is_left_open:
                return self._of_completed(None)
            if isinstance(value, Done) or not isinstance(value, Outcome):
                raise TaskStateError(
                    "complete() was called, its transaction was rolled back, and the processor "
                    "returned as if all were well: let the error out of it, or return Retry() or "
                    "another outcome",
                    self.task.id,
                )
        if isinstance(value, Retry):
            return self._retry(value)
        if isinstance(value, Snooze):
            self._emit("task.snoozed")
            next_run = self._runtime.clock.after(self._wait_s(value.after))
            return Settlement(self.task, "snooze", self.began, expected_time=next_run)
        if isinstance(value, Cancel):
            self._emit("task.withdrawn", reason=value.reason)
            reason = value.reason or "cancelled by its processor"
            return Settlement(self.task, "withdraw", self.began, self._text(reason))
        if isinstance(value, Fail):
            reason = value.reason or "failed by its processor"
            return self._failed(self._text(reason), reason)
        return self._succeeded(value.result if isinstance(value, Done) else value)

    def _succeeded(self, result: object) -> Settlement:
        task, kept = self.task, None
        if isinstance(result, _LAZY) or hasattr(type(result), "__await__"):
            raise InvalidInputError(
                f"the processor of {task.tag!r} returned an object of type "
                f"{type(result).__name__}, whose code does not run by itself: iterate over it or "
                "await it in the processor, and return None, a value or an outcome",
                "outcome",
            )
        if result is not None and self.processor.keep_result:
            try:
                kept = encode_body(result, MAX_RESULT_BYTES)
            except InvalidInputError as error:  # does not undo the run
                self._runtime.events.emit("result.dropped", **task.event_fields, error=str(error))
        return Settlement(task, "succeed", self.began, result=kept)

    def _of_completed(self, error: BaseException | None) -> Settlement:
        """Return the settlement that the processor has made itself with `complete()`."""
        task, events = self.task, self._runtime.events
        if not self.is_committed:
            # The open transaction has locked the row. Without a commit the row is abandoned.
            why = (
                "complete() was called, and its transaction was still open when the processor "
                "ended: end it first"
            )
            events.emit("task.left_open", **task.event_fields, remedy=why, error=error)
            return Settlement(task, "fail", self.began, why, is_made=True)
        if error is not None:
            events.emit("task.raised_late", **task.event_fields, error=error)
        return Settlement(task, "succeed", self.began, is_made=True)

    def _retry(self, asked: Retry) -> Settlement:
        task, reason = self.task, asked.reason or "its processor asked to be run again"
        retry_schedule = self.processor.retry_schedule_for(Exception, task)
        wait_s = None if retry_schedule is None else retry_schedule.wait_s(task.runs)
        if retry_schedule is not None and wait_s is None:
            text = self._text(f"{reason} (its retry schedule has no delay left)")
            return self._failed(text, reason)
        if asked.after is not None:
            wait_s = self._wait_s(asked.after)
        if wait_s is None:
            raise InvalidInputError(
                "Retry() without after= needs a retry schedule: @processor(tag, retries=...)",
                "after",
            )
        return self._schedule_retry(self._text(reason), wait_s, reason)

    def _failed(self, text: str, error: object) -> Settlement:
        self._emit("task.failed", error=error)
        return Settlement(self.task, "fail", self.began, text)

    def _schedule_retry(self, text: str, wait_s: float, error: object) -> Settlement:
        attempt = self.task.runs
        self._emit("task.retry_scheduled", attempt=attempt, wait_s=wait_s, error=error)
        return Settlement(
            self.task, "schedule_retry", self.began, text, self._runtime.clock.after(wait_s)
        )

    def _emit(self, name: str, **fields: Any) -> None:
        self._runtime.events.emit(name, **self.task.event_fields, began=self.began, **fields)

    def _wait_s(self, after: object) -> float:
        return check_wait(after, "after", MAX_DELAY_S)

    def _text(self, reason: str) -> str:
        return storable(str(reason), self._runtime.settings.max_error_bytes)


# -- One call of a processor, for one task or for a batch of tasks --------------------------------


class RunResult(NamedTuple):
    """The settlement of one task, with the value or the error of its processor."""

    settlement: Settlement
    value: object = None
    error: BaseException | None = None


_OUTCOMES = get_args(Outcome)


class ProcessorCall:
    __slots__ = ("_bodies", "_calls", "processor", "results", "runs")

    def __init__(self, calls: Calls, runs: Sequence[TaskRun], bodies: Sequence[Any] = ()) -> None:
        self._calls = calls
        self.processor = runs[0].processor
        #: One run, or those of a batch.
        self.runs = runs
        #: The bodies of a batch, as the processor's schema made them; none if its only body cannot
        #: be read.
        self._bodies = bodies
        #: What became of the runs, after `end`.
        self.results: list[RunResult] = []

    @property
    def task(self) -> DelayedTask:
        """The task, or the first one of a batch."""
        return self.runs[0].task

    def read_argument(self) -> Any:
        """Return the body, or the bodies of a batch; raise an error if it cannot be read."""
        if self.processor.batch is None:
            return self.task.body
        return list(self._bodies) or [self.processor.checked(self.task.body)]

    def __call__(self, argument: Any) -> Any:
        """Call the user's function with what `read_argument` returned."""
        processor, function = self.processor, self.processor.function
        if processor.batch is None:
            body = processor.checked(argument)
            return awaited(function(body, self.task) if processor.wants_task else function(body))
        tasks = [run.task for run in self.runs]
        return awaited(function(argument, tasks) if processor.wants_task else function(tasks))

    def end(self, value: object, error: BaseException | None) -> Sequence[RunResult]:
        """Decide how each task is settled, from what the processor returned or raised."""
        values = [value] * len(self.runs)
        if error is None and self.processor.batch is not None:
            try:
                values = _outcomes_of_batch(value, [run.task.id for run in self.runs])
            except InvalidInputError as refusal:
                error = refusal
        for run, one in zip(self.runs, values, strict=True):
            if one is None and error is None and not run.is_written:  # as nearly always
                settlement, raised = Settlement(run.task, "succeed", run.began), error
            else:
                settlement, raised = run.settlement(one, error)
            took_s = monotonic() - run.began_s
            for observer in self._calls.observers:
                observer.ended(settlement, took_s, raised)
            self.results.append(RunResult(settlement, one, raised))
        return self.results

    # -- called by the methods of a task, while the processor runs --------------------------------

    def complete(self, id: int, session: Any, result: Any) -> None:
        self._run(id).complete(session, result)

    def check_lease(self, id: int) -> None:
        self._run(id).check_lease()

    def is_cancelled(self, id: int) -> bool:
        return any(run.task.id == id and run.is_asked_to_stop for run in self.runs)

    def _run(self, id: int) -> TaskRun:
        for run in self.runs:
            if run.task.id == id:
                return run
        ids = [run.task.id for run in self.runs]
        raise TaskStateError(f"task {id} does not run here: this call is for {shown(ids)}", id)


def _outcomes_of_batch(value: object, ids: Sequence[int]) -> list[object]:
    """Return the outcome of each task from what the processor of a batch returned.

    A list has the outcomes in the order of the tasks, a mapping has them by id, and a single
    outcome is for all tasks. A task without an outcome has succeeded.
    """
    if value is None or isinstance(value, _OUTCOMES):
        return [value] * len(ids)
    if isinstance(value, Mapping):
        unknown = value.keys() - set(ids)
        if unknown:
            raise InvalidInputError(
                f"the batch's processor returned outcomes for {count(len(unknown), 'unknown id')}, "
                f"such as {shown(next(iter(unknown)))}: the keys are task.id",
                "outcome",
            )
        return [value.get(id) for id in ids]
    what = f"a {type(value).__name__}"
    if isinstance(value, (list, tuple)):
        if len(value) == len(ids):
            return list(value)
        what = count(len(value), "outcome")
    raise InvalidInputError(
        f"the batch's processor returned {what} for {count(len(ids), 'task')}: it returns None, a "
        "list with an outcome for each task, in their order, or a dict of outcomes by task.id",
        "outcome",
    )


# -- The calls of a process -----------------------------------------------------------------------


_EXITS = (SystemExit, KeyboardInterrupt)
#: The reason of a task that was asked to stop in an earlier run, or before its processor began.
CANCELLED_EARLIER = "cancelled while another run of it, or of its chunk, was under way"
#: The longest reason of a deferral that is stored.
MAX_DEFERRAL_BYTES = 4096


def ends_process(error: BaseException) -> bool:
    """Whether the error is Celery's WorkerShutdown or WorkerTerminate, which end the worker.

    `ProcessorSpec.retry_schedule_for` says which other errors are retried.
    """
    return isinstance(error, _EXITS) and type(error) not in _EXITS


def _end_forked_child(task: DelayedTask) -> None:
    """End a child whose processor has returned, or raised, as if it was the process of the pool.

    It would run the rest of the chunk a second time, settle it, and keep the worker from stopping.
    """
    logger.critical(
        "delaytasks: task %s (tag %r) forked, and its processor returned in the child, which is "
        "ended here: end a child with os._exit()",
        task.id,
        task.tag,
    )
    logging.shutdown()
    os._exit(1)


class Calls:
    def __init__(self, runtime: Runtime, host: Host, observers: list[Observer]) -> None:
        self.runtime, self.host, self.observers = runtime, host, observers
        self._clock, self._events = runtime.clock, runtime.events
        keys = runtime.settings.encryption_keys
        self._keys = [name for name in names_of(keys) if name != PLAIN]
        #: Differs in a forked child. Asking for the process's id would take 3 % of a row's time.
        self._forks = 0
        fork_safe(self)

    def after_fork(self) -> None:
        self._forks += 1

    def run(
        self, processor: ProcessorSpec | None, tasks: Sequence[DelayedTask], claimed: datetime
    ) -> list[Settlement]:
        """Run tasks of one tag, one or as many as its processor takes in one call."""
        settlements: list[Settlement] = []
        began, forks = self._clock.now(), self._forks
        for call in self._ready_calls(processor, tasks, claimed, began, settlements):
            for observer in self.observers:
                for run in call.runs:
                    observer.started(run.task, claimed, began)
            context = copy_context()
            context.run(current_run.set, call)
            try:
                context.run(self.host.execute, call)
            except BaseException as error:
                if ends_process(error) and call.processor.in_flight is None:
                    raise  # in the thread of a concurrent call it would end nothing
                if call.results:
                    where = "delaytasks: an error after the end of task %s (tag %r)"
                    logger.error(where, call.task.id, call.task.tag, exc_info=error)
                else:
                    call.end(None, error)
            finally:
                if self._forks != forks:
                    _end_forked_child(call.task)
            settlements += [one.settlement for one in call.results]
        return settlements

    def flush(self) -> None:
        """Let the observers send what they have observed."""
        for observer in self.observers:
            observer.flush()

    def _ready_calls(
        self,
        processor: ProcessorSpec | None,
        tasks: Sequence[DelayedTask],
        claimed: datetime,
        began: datetime,
        settlements: list[Settlement],
    ) -> Iterator[ProcessorCall]:
        """Yield the calls of the tasks that can run here, and settle the others."""
        runs: list[TaskRun] = []
        bodies: list[Any] = []
        for task in tasks:
            settlement = self.not_now(processor, task)
            if processor is None or settlement is not None:
                assert settlement is not None
                settlements.append(settlement)
                for observer in self.observers:
                    observer.not_called(settlement, claimed)
                continue
            run = TaskRun(self, processor, task, began)
            if processor.batch is None:
                yield ProcessorCall(self, [run])
                continue
            try:
                bodies.append(processor.checked(task.body))
            except Exception:  # fails this task alone, when its body is read again
                yield ProcessorCall(self, [run])
            else:
                runs.append(run)
        if runs:
            yield ProcessorCall(self, runs, bodies)

    # -- rows that this process does not run: they have expired, or wait for another process ------

    def not_now(self, processor: ProcessorSpec | None, task: DelayedTask) -> Settlement | None:
        """Return the settlement of a task that is not run here now, or None if the task can run."""
        is_asked_to_stop = self.host.memory.is_asked_to_stop
        if task.cancel_request == ASKED or is_asked_to_stop(task.id, task.version):
            self._events.emit("task.withdrawn", **task.event_fields, reason=CANCELLED_EARLIER)
            return Settlement(task, "expire", error=CANCELLED_EARLIER)
        if processor is None:  # a deploy may bring it
            known = ", ".join(sorted(processor.tag for processor in self.host.registry)) or "none"
            why = f"{task.tag} (this worker knows: {known}); is its module imported?"
            return self._defer(task, "no_processor", why)
        max_late_s = processor.max_late_s if task.max_late_s is None else task.max_late_s
        if max_late_s is not None:
            late_s = (self._clock.now() - task.due).total_seconds()
            if late_s > max_late_s:
                self._events.emit("task.expired", **task.event_fields, late_s=late_s)
                error = f"expired: {late_s:.3f} s late, and worth running for {max_late_s:g} s"
                return Settlement(task, "expire", error=error)
        if is_encrypted(task.body_json):
            # Some workers get a new key later than others. A body without a key's name was changed,
            # and so was one that a key of this process cannot decrypt. No process can read them, so
            # their tasks run and fail.
            key, known = name_in(task.body_json), ", ".join(self._keys) or "none"
            if key != NO_NAME and key not in self._keys:
                remedy = f"(this worker has: {known}); add it to delaytasks_encryption_keys"
                return self._defer(task, "no_key", f"{key} {remedy}", key=key)
        if processor.is_newer(task.body_version):
            version = f"version {task.body_version}, not {processor.body_version}"
            return self._defer(task, "newer_body", f"{task.tag} ({version})")
        if not self.host.keeps_time_limits and processor.has_time_limits:
            why = f"{task.tag}; let a worker with -P prefork serve the queue {task.queue}"
            return self._defer(task, "no_time_limits", why)
        return None

    def _defer(self, task: DelayedTask, code: str, why: str, **fields: Any) -> Settlement:
        """Let the task run later on a worker that can run it; it keeps its due time.

        It waits for a tenth of the time that it has been overdue, within bounds.
        """
        overdue_s = (self._clock.now() - task.due).total_seconds()
        wait_s = min(max(overdue_s / 10, DEFER_MIN_S), DEFER_MAX_S)
        self._events.emit(f"task.{code}", **task.event_fields, **fields, next_try_s=wait_s)
        error = storable(DEFERRALS[code] + why, MAX_DEFERRAL_BYTES)
        next_try = self._clock.after(wait_s)
        return Settlement(
            task,
            "give_back",
            error=defer_until(error, next_try),
            expected_time=next_try,
            due_time=task.due,
        )
