"""Calls the processor of one task or batch, and decides from the result how the row is settled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from datetime import datetime
from types import AsyncGeneratorType, GeneratorType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, get_args

from delaytasks.model.body import NO_NAME, PLAIN, encode_body, is_encrypted, name_in, names_of
from delaytasks.model.clock import monotonic
from delaytasks.model.errors import (
    InvalidInputError,
    LeaseLostError,
    TaskCancelledError,
    TaskStateError,
)
from delaytasks.model.inputs import check_wait
from delaytasks.model.outcomes import Cancel, Done, Fail, Outcome, Retry, Snooze
from delaytasks.model.task import (
    CallerConnection,
    DelayedTask,
    Settlement,
    Transaction,
    current_run,
)
from delaytasks.model.text import (
    DEFER_MAX_S,
    DEFER_MIN_S,
    NEWER_BODY,
    NO_KEY,
    NO_PROCESSOR,
    NO_TIME_LIMITS,
    count,
    defer_until,
    shown,
    storable,
    traceback_text,
)
from delaytasks.model.workers import NO_RENEWAL, LastRenewal
from delaytasks.registry import ProcessorSpec, Registry, ThreadSlots, awaited
from delaytasks.run.settlement import RunCounter

if TYPE_CHECKING:
    from delaytasks.db.claims import Claims
    from delaytasks.limits.admission import Waitlist
    from delaytasks.run.policy_cache import PauseFilter
    from delaytasks.runtime import Runtime


# -- Rules for claimed rows that this process does not run: they have expired, or are deferred ----


#: The reason of a task that was asked to stop in an earlier run, or before its processor began.
CANCELLED_EARLIER = "cancelled while another run of it, or of its chunk, was under way"
#: The longest reason of a deferral that is stored.
MAX_DEFERRAL_BYTES = 4096


class DeferralRules:
    def __init__(self, runtime: Runtime, host: Host) -> None:
        self._clock, self._events = runtime.clock, runtime.events
        self._host = host
        keys = runtime.settings.encryption_keys
        self._keys = [name for name in names_of(keys) if name != PLAIN]
        self._readable = {NO_NAME, *self._keys}

    def settlement(self, processor: ProcessorSpec | None, task: DelayedTask) -> Settlement | None:
        """Return the settlement of a task that is not run here now, or None if the task can run."""
        if task.cancel_request is not None or self._host.is_asked_to_stop(task.id, task.version):
            self._events.emit("task.withdrawn", **task.event_fields, reason=CANCELLED_EARLIER)
            return Settlement(task, "expire", error=CANCELLED_EARLIER)
        if processor is None:  # a deploy may bring it
            known = ", ".join(sorted(processor.tag for processor in self._host.registry)) or "none"
            why = f"{NO_PROCESSOR}{task.tag} (this worker knows: {known}); is its module imported?"
            return self._defer(task, why, "task.no_processor")
        max_late_s = processor.max_late_s if task.max_late_s is None else task.max_late_s
        if max_late_s is not None and (expired := self._expired(task, max_late_s)) is not None:
            return expired
        if self._lacks_key(task):  # some workers get a new key later than others
            key, known = name_in(task.body_json), ", ".join(self._keys) or "none"
            why = f"{NO_KEY}{key} (this worker has: {known}); add it to delaytasks_encryption_keys"
            return self._defer(task, why, "task.no_key", key=key)
        versions = processor.versions
        if versions is not None and versions.is_newer(task.body_version):
            why = f"{NEWER_BODY}{task.tag} (version {task.body_version}, not {versions.version})"
            return self._defer(task, why, "task.newer_body")
        if processor.has_time_limits and not self._host.keeps_time_limits:
            why = f"{NO_TIME_LIMITS}{task.tag}; let a worker with -P prefork serve the queue "
            return self._defer(task, why + task.queue, "task.no_time_limits")
        return None

    def _expired(self, task: DelayedTask, max_late_s: float) -> Settlement | None:
        late_s = (self._clock.now() - task.due).total_seconds()
        if late_s <= max_late_s:
            return None
        self._events.emit("task.expired", **task.event_fields, late_s=late_s)
        error = f"expired: {late_s:.3f} s late, and worth running for {max_late_s:g} s"
        return Settlement(task, "expire", error=error)

    def _lacks_key(self, task: DelayedTask) -> bool:
        """Whether another process may be able to decrypt the body.

        A body without a key's name was changed, and so was one that a key of this process cannot
        decrypt. No process can read them, so their tasks run and fail.
        """
        return is_encrypted(task.body_json) and name_in(task.body_json) not in self._readable

    def _defer(self, task: DelayedTask, why: str, event: str, **fields: Any) -> Settlement:
        """Let the task run later on a worker that can run it; it keeps its due time.

        It waits for a tenth of the time that it has been overdue, within bounds.
        """
        overdue_s = (self._clock.now() - task.due).total_seconds()
        wait_s = min(max(overdue_s / 10, DEFER_MIN_S), DEFER_MAX_S)
        self._events.emit(event, **task.event_fields, **fields, next_try_s=wait_s)
        next_try = self._clock.after(wait_s)
        return Settlement(
            task,
            "give_back",
            error=defer_until(storable(why, MAX_DEFERRAL_BYTES), next_try),
            expected_time=next_try,
            due_time=task.due,
        )


# -- One run of one task: its lease, and its completion in the processor's own transaction --------


#: The longest result of a task. Results are for inspection; data belongs elsewhere.
MAX_RESULT_BYTES = 16 * 1024
#: `check_lease` raises if less than this part of the lease is left. If renewals succeed, more than
#: half is left.
LAST_PART = 1 / 3
#: Returns the transaction of a caller's `session=`.
TransactionOf = Callable[[Any], Transaction | None]


class LeaseEndsError(LeaseLostError):
    """The lease is about to end or has ended, because the worker could not renew it."""


@dataclass(frozen=True)
class Lease:
    """How long this process owns its rows, as far as it knows without a query."""

    duration_s: float
    #: The longest time from the claim of a row to the start of its run.
    max_wait_s: float
    #: Returns the last renewal that succeeded.
    last_renewal: Callable[[], LastRenewal]
    #: Whether a caller has asked the run of this id and version to stop.
    is_asked_to_stop: Callable[[int, int], bool]

    def left_s(self, began: float) -> float:
        """Return how long the lease of a row lasts whose run began at `began`.

        A lease that ended has no time left, even if the worker has renewed its leases since then:
        another worker may have recovered the row before that.
        """
        claimed_at = began - self.max_wait_s
        renewal = self.last_renewal()
        if claimed_at < renewal.lost_if_claimed_before:
            return 0.0
        return max(claimed_at, renewal.asked_at) + self.duration_s - monotonic()


class TaskRun:
    def __init__(
        self, task: DelayedTask, claims: Claims, transaction_of: TransactionOf, lease: Lease
    ) -> None:
        self.task = task
        self._claims = claims
        self._transaction_of = transaction_of
        self._lease = lease
        #: The time of the monotonic clock.
        self.began = monotonic()
        #: The processor has settled the row as DONE in its own transaction.
        self.is_written = False
        #: The transaction is committed, or was about to be.
        self.is_committed = False
        #: The commit is confirmed. SQLAlchemy reports the commit of a plain connection before it
        #: happens.
        self.is_certain = False
        self._connection: CallerConnection | None = None

    @property
    def is_left_open(self) -> bool:
        """Whether the processor's transaction has not ended, so that the row is still locked."""
        if self.is_committed or self._connection is None:
            return False
        return self._connection.in_transaction()

    @property
    def is_rolled_back(self) -> bool:
        return self.is_written and not self.is_committed and not self.is_left_open

    def complete(self, session: Any, result: Any) -> None:
        task = self.task
        kept = None if result is None else encode_body(result, MAX_RESULT_BYTES)
        transaction = self._transaction_of(session)
        if transaction is None:
            raise InvalidInputError(
                "complete() takes the session that the effect is written in: session=…", "session"
            )
        with transaction.guard() as self._connection:
            if not self._claims.complete(task, kept, self._connection):
                raise LeaseLostError(
                    f"task {task.id} ({task.tag}) is no longer this run's: roll back what it did",
                    task.id,
                )
        self.is_written = True
        transaction.after_commit([task], self._committed)

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether `cancel(running=True)` has asked this run to stop."""
        return self._lease.is_asked_to_stop(self.task.id, self.task.version)

    def check_lease(self) -> None:
        task, left_s = self.task, self._lease.left_s(self.began)
        if self.is_asked_to_stop:
            raise TaskCancelledError(f"task {task.id} ({task.tag}) was cancelled: stop", task.id)
        if left_s < self._lease.duration_s * LAST_PART:
            end = f"ends in {left_s:.1f} s" if left_s > 0 else "has ended"
            raise LeaseEndsError(
                f"the lease of task {task.id} ({task.tag}) could not be renewed and {end}: stop",
                task.id,
            )

    def _committed(self, _tasks: Sequence[DelayedTask], is_committed: bool = True) -> None:
        self.is_committed, self.is_certain = True, is_committed


# -- Outcome rules: from what a processor returned or raised to the settlement of its task --------


#: The code of these values runs only during an iteration over them.
_LAZY = (GeneratorType, AsyncGeneratorType, map, filter)
#: The outcomes of a run that is repeated or that fails.
_UNFINISHED = (Retry, Snooze, Fail)


class OutcomeRules:
    def __init__(self, runtime: Runtime) -> None:
        self._settings, self._clock = runtime.settings, runtime.clock
        self._events = runtime.events

    def settlement(
        self,
        processor: ProcessorSpec,
        run: TaskRun,
        began: datetime,
        value: object,
        error: BaseException | None,
    ) -> tuple[Settlement, BaseException | None]:
        """Return the settlement of a run, and the error that decided it.

        The error is the given one, or it says why `value` is no valid outcome.
        """
        if _is_unfinished(run, value, error) and _is_cancelled(run, error):
            return self._cancelled(run.task, began, error), None
        if error is None:
            try:
                if run.is_rolled_back:
                    return self._of_rolled_back(processor, run.task, began, value), None
                if run.is_written:
                    return self._of_completed(run, began, None), None
                return self._of_value(processor, run.task, began, value), None
            except Exception as raised:  # becomes the error of the task, with its traceback
                error = raised
        if run.is_certain or run.is_left_open:
            return self._of_completed(run, began, error), error
        # If that transaction was committed nevertheless, the fence refuses this settlement.
        return self.of_error(processor, run.task, began, error), error

    def _cancelled(
        self, task: DelayedTask, began: datetime, error: BaseException | None
    ) -> Settlement:
        """Return the settlement of a run that a caller has cancelled and that did not succeed."""
        reason = "cancelled by a caller while it ran"
        self._events.emit("task.withdrawn", **task.event_fields, began=began, reason=reason)
        text = reason
        if error is not None and not isinstance(error, TaskCancelledError):
            text += "\n" + traceback_text(error, self._settings.max_error_bytes)
        return Settlement(task, "withdraw", began, self._text(text))

    def of_error(
        self, processor: ProcessorSpec, task: DelayedTask, began: datetime, error: BaseException
    ) -> Settlement:
        """Schedule a retry or fail the task.

        If its lease was about to end, or if another task of its batch was cancelled, run it again
        immediately.
        """
        is_others = isinstance(error, TaskCancelledError) and error.id not in (None, task.id)
        if is_others or isinstance(error, LeaseEndsError):  # not the task's fault
            self._events.emit("task.interrupted", **task.event_fields, error=error)
            return Settlement(
                task, "snooze", began, expected_time=self._clock.now(), due_time=task.due
            )
        text = traceback_text(error, self._settings.max_error_bytes)
        retry_schedule = processor.retry_schedule_for(error, task)
        wait_s = None if retry_schedule is None else retry_schedule.wait_s(task.runs)
        if wait_s is None:
            return self._failed(task, began, text, error)
        return self._schedule_retry(task, began, text, wait_s, error)

    def _of_value(
        self, processor: ProcessorSpec, task: DelayedTask, began: datetime, value: object
    ) -> Settlement:
        """Return the settlement of an outcome; any other value is a success."""
        if value is None:  # as most processors return
            return Settlement(task, "succeed", began)
        if isinstance(value, Retry):
            return self._retry(processor, task, began, value)
        if isinstance(value, Snooze):
            self._events.emit("task.snoozed", **task.event_fields, began=began)
            return Settlement(
                task, "snooze", began, expected_time=self._clock.after(self._wait_s(value.after))
            )
        if isinstance(value, Cancel):
            self._events.emit(
                "task.withdrawn", **task.event_fields, began=began, reason=value.reason
            )
            reason = value.reason or "cancelled by its processor"
            return Settlement(task, "withdraw", began, self._text(reason))
        if isinstance(value, Fail):
            reason = value.reason or "failed by its processor"
            return self._failed(task, began, self._text(reason), reason)
        result = value.result if isinstance(value, Done) else value
        if isinstance(result, _LAZY) or hasattr(type(result), "__await__"):
            raise InvalidInputError(
                f"the processor of {task.tag!r} returned an object of type "
                f"{type(result).__name__}, whose code does not run by itself: iterate over it or "
                "await it in the processor, and return None, a value or an outcome",
                "outcome",
            )
        kept = self._kept(task, result) if processor.keep_result and result is not None else None
        return Settlement(task, "succeed", began, result=kept)

    def _of_completed(
        self, run: TaskRun, began: datetime, error: BaseException | None
    ) -> Settlement:
        """Return the settlement that the processor has made itself with `complete()`."""
        task = run.task
        if not run.is_committed:
            # The open transaction has locked the row. Without a commit the row is abandoned.
            why = (
                "complete() was called, and its transaction was still open when the processor "
                "ended: end it first"
            )
            self._events.emit("task.left_open", **task.event_fields, remedy=why, error=error)
            return Settlement(task, "fail", began, why, is_made=True)
        if error is not None:
            self._events.emit("task.raised_late", **task.event_fields, error=error)
        return Settlement(task, "succeed", began, is_made=True)

    def _of_rolled_back(
        self, processor: ProcessorSpec, task: DelayedTask, began: datetime, value: object
    ) -> Settlement:
        """Return the settlement of a run that rolled its `complete()` back, which is no success."""
        if isinstance(value, Outcome) and not isinstance(value, Done):
            return self._of_value(processor, task, began, value)
        raise TaskStateError(
            "complete() was called, its transaction was rolled back, and the processor returned as "
            "if all were well: let the error out of it, or return Retry() or another outcome",
            task.id,
        )

    def _retry(
        self, processor: ProcessorSpec, task: DelayedTask, began: datetime, asked: Retry
    ) -> Settlement:
        retry_schedule = processor.retries.retry_schedule_for(Exception, task.retry_schedule)
        reason = asked.reason or "its processor asked to be run again"
        wait_s = None if retry_schedule is None else retry_schedule.wait_s(task.runs)
        if retry_schedule is not None and wait_s is None:
            text = self._text(f"{reason} (its retry schedule has no delay left)")
            return self._failed(task, began, text, reason)
        if asked.after is not None:
            wait_s = self._wait_s(asked.after)
        if wait_s is None:
            raise InvalidInputError(
                "Retry() without after= needs a retry schedule: @processor(tag, retries=...)",
                "after",
            )
        return self._schedule_retry(task, began, self._text(reason), wait_s, reason)

    def _failed(self, task: DelayedTask, began: datetime, text: str, error: object) -> Settlement:
        self._events.emit("task.failed", **task.event_fields, began=began, error=error)
        return Settlement(task, "fail", began, text)

    def _schedule_retry(
        self, task: DelayedTask, began: datetime, text: str, wait_s: float, error: object
    ) -> Settlement:
        self._events.emit(
            "task.retry_scheduled",
            **task.event_fields,
            began=began,
            attempt=task.runs,
            wait_s=wait_s,
            error=error,
        )
        return Settlement(task, "schedule_retry", began, text, self._clock.after(wait_s))

    def _kept(self, task: DelayedTask, result: object) -> str | None:
        """Return the result as JSON; a result that cannot be kept does not undo the run."""
        try:
            return encode_body(result, MAX_RESULT_BYTES)
        except InvalidInputError as error:
            self._events.emit("result.dropped", **task.event_fields, error=str(error))
            return None

    def _wait_s(self, after: object) -> float:
        return check_wait(after, self._settings.max_delay_s, "after")

    def _text(self, reason: str) -> str:
        return storable(str(reason), self._settings.max_error_bytes)


def _is_unfinished(run: TaskRun, value: object, error: BaseException | None) -> bool:
    """Whether a run would be repeated or fail, if nobody had cancelled it."""
    if run.is_written:  # the processor has completed the task in its own transaction
        return False
    return error is not None or isinstance(value, _UNFINISHED)


def _is_cancelled(run: TaskRun, error: BaseException | None) -> bool:
    return run.is_asked_to_stop or (
        isinstance(error, TaskCancelledError) and error.id == run.task.id
    )


# -- One call of a processor, for one task or for a batch of tasks --------------------------------


_OUTCOMES = get_args(Outcome)


class ProcessorCall:
    """While it runs, `task.complete` and `task.check_lease` reach its runs through it."""

    __slots__ = ("_bodies", "_refusal", "processor", "runs")

    def __init__(
        self,
        processor: ProcessorSpec,
        runs: Sequence[TaskRun],
        bodies: Sequence[Any] = (),
        refusal: Exception | None = None,
    ) -> None:
        self.processor = processor
        #: One run, or those of a batch.
        self.runs = runs
        #: The bodies of a batch, as the processor's schema made them.
        self._bodies = bodies
        #: Why the only body of a batch cannot be read.
        self._refusal = refusal

    @property
    def task(self) -> DelayedTask:
        """The task, or the first one of a batch."""
        return self.runs[0].task

    def read_argument(self) -> Any:
        """Return the body, or the bodies of a batch; raise an error if it cannot be read."""
        if self._refusal is not None:
            raise self._refusal
        return (
            self.processor.body_of(self.task)
            if self.processor.batch is None
            else list(self._bodies)
        )

    def __call__(self, argument: Any) -> Any:
        """Call the user's function with what `read_argument` returned."""
        processor, function = self.processor, self.processor.function
        if processor.batch is None:
            body = processor.checked(argument)
            return awaited(function(body, self.task) if processor.wants_task else function(body))
        tasks = [run.task for run in self.runs]
        return awaited(function(argument, tasks) if processor.wants_task else function(tasks))

    def outcomes(self, value: object) -> list[object]:
        """Return the outcome of each run from what the function returned."""
        if self.processor.batch is None:
            return [value]
        return _outcomes_of_batch(value, [run.task.id for run in self.runs])

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
    if not isinstance(value, (list, tuple)):
        raise InvalidInputError(
            f"the batch's processor returned a {type(value).__name__}: it is None, a list with an "
            "outcome for each task, or a dict of outcomes by task.id",
            "outcome",
        )
    if len(value) != len(ids):
        raise InvalidInputError(
            f"the batch's processor returned {count(len(value), 'outcome')} for "
            f"{count(len(ids), 'task')}: return one for each, in their order, or a dict of "
            "outcomes by task.id",
            "outcome",
        )
    return list(value)


logger = logging.getLogger("delaytasks")
_EXITS = (SystemExit, KeyboardInterrupt)


class RunResult(NamedTuple):
    """The settlement of one task, with the value or the error of its processor."""

    settlement: Settlement
    value: object = None
    error: BaseException | None = None


#: Returns the settlements of one call from its value or its error.
Finish = Callable[[object, BaseException | None], Sequence[RunResult]]
#: Calls the processor, and then `Finish`, in the context that the processor expects. An exception
#: that it raises before it has called `Finish` counts as the processor's.
Execute = Callable[[ProcessorCall, Finish], object]


def ends_process(error: BaseException) -> bool:
    """Whether the error is Celery's WorkerShutdown or WorkerTerminate, which end the worker."""
    return isinstance(error, _EXITS) and type(error) not in _EXITS


class Watcher(Protocol):
    """Observes the run of each row; its methods must not raise."""

    def started(self, task: DelayedTask, claimed: datetime, began: datetime) -> None: ...
    def ended(self, ending: Settlement, ended: datetime, error: BaseException | None) -> None: ...
    def expired(self, ending: Settlement, claimed: datetime) -> None: ...
    def defer(self, task: DelayedTask, claimed: datetime, why: str) -> None: ...
    def flush(self) -> None:
        """Send what was observed."""


@dataclass(frozen=True)
class Host:
    """What a process gives its runner. The defaults are those of a process without a worker."""

    claims: Claims
    waitlist: Waitlist
    registry: Registry
    #: Calls a processor in the context that it expects.
    execute: Execute
    #: Keeps this context between rows that a thread runs one after another.
    thread_context: Callable[[], AbstractContextManager[object]] = nullcontext
    #: Returns the watcher of the moment.
    watcher: Callable[[], Watcher | None] = lambda: None
    pause_filter: PauseFilter | None = None
    thread_slots: ThreadSlots = field(default_factory=ThreadSlots)
    #: Whether the time limits of processors can be kept.
    keeps_time_limits: bool = True
    #: Whether concurrent rows may go on while the next chunk runs: another process has to renew
    #: their leases, and `Runner.finish` has to be called at the end.
    may_detach: bool = False
    #: Returns the last renewal of the leases that succeeded.
    last_renewal: Callable[[], LastRenewal] = lambda: NO_RENEWAL
    #: Whether a caller has asked the run of this id and version to stop.
    is_asked_to_stop: Callable[[int, int], bool] = lambda id, version: False
    #: Whether other tasks than those of a backlog wait for this process.
    has_others: Callable[[], bool] = lambda: False


class TaskExecutor:
    """Runs tasks. `counter` counts the runs for the statistics, if they are on."""

    def __init__(
        self, runtime: Runtime, host: Host, lease: Lease, counter: RunCounter | None
    ) -> None:
        self._clock, self._events = runtime.clock, runtime.events
        self._deferral_rules = DeferralRules(runtime, host)
        self._outcome_rules = OutcomeRules(runtime)
        self._claims, self._execute = host.claims, host.execute
        self._watcher = host.watcher
        self._transaction_of = runtime.transactions.of
        self._lease = lease
        self._counter = counter
        self._logs_starts = runtime.settings.has_structured_log

    def run(
        self, processor: ProcessorSpec | None, tasks: Sequence[DelayedTask], claimed: datetime
    ) -> list[Settlement]:
        """Run tasks of one tag, one or as many as its processor takes in one call."""
        watcher, began = self._watcher(), self._clock.now()
        settlements, ready = self._defer(processor, tasks, claimed, watcher)
        if processor is None:
            return settlements
        for call in self._calls(processor, ready):
            if watcher is not None or self._logs_starts:
                self._started(call, claimed, began, watcher)
            ended: list[RunResult] = []
            context, end = copy_context(), self._end(call, began, ended, watcher)
            context.run(current_run.set, call)
            try:
                context.run(self._execute, call, end)
            except BaseException as error:
                if ends_process(error):
                    raise
                self._raised(call, error, ended, end)
            settlements += [one.settlement for one in ended]
        return settlements

    def _started(
        self, call: ProcessorCall, claimed: datetime, began: datetime, watcher: Watcher | None
    ) -> None:
        for run in call.runs:
            if watcher is not None:
                watcher.started(run.task, claimed, began)
            if self._logs_starts:
                self._events.emit("task.started", **run.task.event_fields, began=began)

    def failed(
        self, processor: ProcessorSpec, tasks: Sequence[DelayedTask], error: BaseException
    ) -> list[Settlement]:
        """Return the settlements of tasks for which `run` itself has raised."""
        began = self._clock.now()
        return [self._outcome_rules.of_error(processor, task, began, error) for task in tasks]

    @property
    def is_watched(self) -> bool:
        return self._watcher() is not None

    def flush(self) -> None:
        """Let the watcher send what it has observed."""
        watcher = self._watcher()
        if watcher is not None:
            watcher.flush()

    # -- calls ------------------------------------------------------------------------------------

    def _defer(
        self,
        processor: ProcessorSpec | None,
        tasks: Sequence[DelayedTask],
        claimed: datetime,
        watcher: Watcher | None,
    ) -> tuple[list[Settlement], list[DelayedTask]]:
        """Return the settlements of the tasks that do not run here, and the tasks that do."""
        settlements: list[Settlement] = []
        ready: list[DelayedTask] = []
        for task in tasks:
            settlement = self._deferral_rules.settlement(processor, task)
            if settlement is None:
                ready.append(task)
                continue
            settlements.append(settlement)
            if watcher is not None and settlement.move == "expire":
                watcher.expired(settlement, claimed)
            elif watcher is not None:
                watcher.defer(task, claimed, settlement.error or "")
        return settlements, ready

    def _calls(
        self, processor: ProcessorSpec, tasks: Sequence[DelayedTask]
    ) -> Iterator[ProcessorCall]:
        if processor.batch is None:
            for task in tasks:
                yield ProcessorCall(processor, [self._run(task)])
            return
        runs: list[TaskRun] = []
        bodies: list[Any] = []
        for task in tasks:
            run = self._run(task)
            try:
                bodies.append(processor.checked(processor.body_of(task)))
            except Exception as error:  # fails this task alone, with this traceback
                yield ProcessorCall(processor, [run], refusal=error)
            else:
                runs.append(run)
        if runs:
            yield ProcessorCall(processor, runs, bodies)

    def _run(self, task: DelayedTask) -> TaskRun:
        return TaskRun(task, self._claims, self._transaction_of, self._lease)

    # -- ends -------------------------------------------------------------------------------------

    def _end(
        self, call: ProcessorCall, began: datetime, ended: list[RunResult], watcher: Watcher | None
    ) -> Finish:
        """Return the function that fills `ended` from what the processor returned or raised."""

        def end(value: object, error: BaseException | None) -> Sequence[RunResult]:
            values = [value] * len(call.runs)
            if error is None:
                try:
                    values = call.outcomes(value)
                except InvalidInputError as refusal:
                    error = refusal
            for run, one in zip(call.runs, values, strict=True):
                settlement, raised = self._outcome_rules.settlement(
                    call.processor, run, began, one, error
                )
                if watcher is not None:
                    watcher.ended(settlement, self._clock.now(), raised)
                if self._counter is not None:
                    self._counter.add_run(run.task, began, monotonic() - run.began)
                ended.append(RunResult(settlement, one, raised))
            return ended

        return end

    def _raised(
        self, call: ProcessorCall, error: BaseException, ended: list[RunResult], end: Finish
    ) -> None:
        """Settle a call whose `execute` has raised, or log the error if the call is settled."""
        if not ended:
            end(None, error)
            return
        where = "delaytasks: an error after the end of task %s (tag %r)"
        logger.error(where, call.task.id, call.task.tag, exc_info=error)
