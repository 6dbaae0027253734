"""Celery's current task, signals and time limits around the run of a row.

Each task has fresh context variables, a current Celery task with a request of its own, and Celery's
signals. So the receivers of these signals (Django's connections, Sentry, OpenTelemetry) work for
each task.
"""

from __future__ import annotations

import faulthandler
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import cached_property, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from billiard.einfo import ExceptionInfo
from celery import Task, signals, states
from celery._state import _task_stack
from celery.app.task import Context
from celery.exceptions import MaxRetriesExceededError, Retry, SoftTimeLimitExceeded, TaskPredicate
from celery.utils.time import maybe_make_aware

from delaytasks.model import moves
from delaytasks.model.clock import Clock
from delaytasks.model.errors import ConfigError, InvalidInputError, TaskFailedError
from delaytasks.model.moves import Done
from delaytasks.model.task import DelayedTask
from delaytasks.model.text import traceback_text
from delaytasks.run.calls import ProcessorCall, RunResult, at_start, ends_process

if TYPE_CHECKING:
    from delaytasks.db.producer import QueueRouting
    from delaytasks.registry import ProcessorSpec, Registry
    from delaytasks.runtime import Runtime

# -- The value of `celery.current_task` while a task runs, and Celery's own ways to end a task ----


#: The longest traceback of the error that caused a retry. The row has a limit of its own.
MAX_REASON_BYTES = 64 * 1024
_INSTEAD = (
    "return Retry(after=…), Snooze(after), Cancel(reason), Fail(reason) or Done(result) of "
    "delaytasks instead"
)

#: The Celery task and the request of the row that runs in this context.
row_in_context: ContextVar[tuple[Any, Any]] = ContextVar("row_in_context")
_NO_ROW = (SimpleNamespace(name=None, request=Context()), None)


class CurrentTask(Task):
    """The Celery task of one tag. It is not in the app's registry, so no message can call it.

    `retry` works as in Celery as far as a row allows it. A method that would send a message raises
    an error with a remedy.
    """

    abstract = True
    processor: Any = None

    @property
    def request(self) -> Any:
        """The request of the row, which a coroutine has in its context and not on its thread."""
        sender, in_context = row_in_context.get(_NO_ROW)
        if sender is self and self.request_stack.top is None:
            return in_context
        return super().request

    def retry(
        self,
        args: Any = None,
        kwargs: Any = None,
        exc: BaseException | None = None,
        throw: bool = True,
        eta: datetime | None = None,
        countdown: float | None = None,
        max_retries: int | None = None,
        **options: Any,
    ) -> Any:
        """Retry the task. Without `eta` and `countdown` its retry schedule says when and how often.

        A tag without a retry schedule has Celery's defaults: 180 seconds, three times.
        """
        refused = [
            name for name, value in (("args", args), ("kwargs", kwargs)) if value is not None
        ]
        if refused := [*refused, *options]:
            raise InvalidInputError(
                f"retry({', '.join(refused)}=…) cannot change task {self.request.id} "
                f"({self.name}): retry() takes exc, eta, countdown and max_retries; to run other "
                "work use schedule_delay",
                refused[0],
            )
        if not throw:
            raise InvalidInputError(
                f"retry(throw=False) has no effect on task {self.request.id} ({self.name}): raise "
                "self.retry(), or return Retry(after=…) of delaytasks",
                "throw",
            )
        own_schedule = self.request.delay_task.retry_schedule
        if self.processor.retries.retry_schedule_for(Exception, own_schedule) is None:
            max_retries = self.max_retries if max_retries is None else max_retries
            countdown = self.default_retry_delay if eta is None and countdown is None else countdown
        if max_retries is not None and self.request.retries >= max_retries:
            raise exc or MaxRetriesExceededError(
                f"cannot retry task {self.request.id} ({self.name}): it was retried "
                f"{self.request.retries} times, and max_retries is {max_retries}"
            )
        raise Retry(None, exc, countdown if eta is None else eta)

    def apply_async(self, *_: Any, **__: Any) -> Any:
        """Raise an error. `delay` and signatures call this method, too."""
        raise InvalidInputError(
            f"{self.name!r} is the tag of a delayed task, and no Celery task that a message can "
            f"call: use schedule_delay({self.name!r}, body, delay)",
            "tag",
        )


class TaskInContext:
    """Celery's current task in the event loop, whose thread runs the coroutines of many rows."""

    def __getattr__(self, name: str) -> Any:
        return getattr(row_in_context.get(_NO_ROW)[0], name)


def retry_of(retry: Retry, app: Any, clock: Clock) -> moves.Retry:
    """Return the outcome that Celery's exception stands for."""
    when = retry.when
    if isinstance(when, datetime):
        when = max((maybe_make_aware(when, app.timezone) - clock.now()).total_seconds(), 0)
    error = retry.exc
    reason = (
        traceback_text(error, MAX_REASON_BYTES)
        if isinstance(error, BaseException)
        else str(retry.message or "")
    )
    return moves.Retry(after=when, reason=reason)


# -- Celery's signals about a task's run ----------------------------------------------------------

# Those about its end follow the move of the row, whatever its processor returned or raised. So the
# row agrees with the receivers (Sentry, OpenTelemetry, metrics).


_SIGNALS = {
    states.SUCCESS: signals.task_success,
    states.FAILURE: signals.task_failure,
    states.REVOKED: signals.task_revoked,
    states.RETRY: signals.task_retry,
}


def _send_postrun(sender: Any, request: Any, ends: Sequence[RunResult]) -> None:
    """Send the signal after a run. `ends` is empty if its settlement failed."""
    signals.task_postrun.send(
        sender=sender,
        task_id=request.id,
        task=sender,
        args=request.args,
        kwargs=request.kwargs,
        retval=_result_of(ends[0]) if ends else None,
        state=_state_of(ends[0]) if ends else states.FAILURE,
    )


def _state_of(ended: RunResult) -> str:
    return ended.settlement.ending.celery_state


def _result_of(ended: RunResult) -> Any:
    """Return what Celery calls the return value: an exception if the run did not succeed."""
    state, why = _state_of(ended), ended.settlement.error or ""
    if state == states.SUCCESS:
        return ended.value.result if isinstance(ended.value, Done) else ended.value
    if ended.error is not None:
        return ended.error
    if state == states.RETRY:
        why = why or "its processor requested another run"
        return Retry(why, when=ended.settlement.expected_time)
    return TaskFailedError(why, ended.settlement.task.id)


def _send_end(sender: Any, request: Any, state: str, result: Any) -> None:
    """Send the signal for this end. `result` is what `_result_of` returns."""
    if state == states.SUCCESS:
        signals.task_success.send(sender=sender, result=result)
    elif state == states.REVOKED:
        signals.task_revoked.send(
            sender=sender, request=request, terminated=False, signum=None, expired=False
        )
    elif state == states.RETRY:
        einfo = _exception_info(result)
        signals.task_retry.send(sender=sender, request=request, reason=result, einfo=einfo)
    else:
        _send_failure(sender, request, result)


def _send_failure(sender: Any, request: Any, error: BaseException) -> None:
    """Send the signal while the exception is handled, as Celery does.

    Some receivers, such as that of Elastic APM, read the exception with `sys.exc_info()`.
    """
    einfo = _exception_info(error)  # first, since it may add the exception's traceback
    traceback = error.__traceback__
    try:
        raise error
    except BaseException:
        error.__traceback__ = traceback  # without this function
        signals.task_failure.send(
            sender=sender,
            task_id=request.id,
            exception=error,
            args=request.args,
            kwargs={},
            traceback=traceback,
            einfo=einfo,
        )


def _exception_info(error: BaseException) -> Any:
    if error.__traceback__ is None:
        # It was never raised, and Celery's form of a traceback needs at least one frame.
        try:
            raise error
        except BaseException:
            pass
    return ExceptionInfo((type(error), error, error.__traceback__))


# -- The time limits of processors, kept by the process that runs the task -------------------------

# They count from the start of the processor, and they apply while it runs C code or keeps the GIL.
#
# A soft limit is the signal of a timer, which raises in the processor. A hard limit is a native
# thread of `faulthandler`, which does not need the interpreter: it writes to stderr where each
# thread is, and ends the process. The worker's main process sees this, and the rows are recovered.


T = TypeVar("T")
#: The file descriptor, which is stderr even if `sys.stderr` is redirected.
STDERR = 2


def can_limit_time(pool: Any) -> bool:
    """Return whether this is a prefork pool.

    Signals reach only the main thread of a process, and a process that ends must have no other
    tasks.
    """
    from celery.concurrency import prefork  # loaded in workers, and other processes do not need it

    return isinstance(pool, prefork.TaskPool)


def check_time_limits(
    registry: Registry, queue_routing: QueueRouting, served: Collection[str], pool: Any
) -> None:
    """Raise `ConfigError` if the pool cannot keep the limits of a tag whose queue is served."""
    if can_limit_time(pool):
        return
    limited_tags = [processor.tag for processor in registry if processor.has_time_limits]
    for tag in sorted(limited_tags):
        queue = queue_routing.of(tag)
        if queue in served:
            name = type(pool).__module__.rpartition(".")[2]
            raise ConfigError(
                f"the tag {tag!r} has time limits, which the pool {name!r} cannot keep: start this "
                f"worker with -P prefork, or let it serve (-Q) other queues than {queue!r}"
            )


def limited(processor: ProcessorSpec, call: Callable[[], T]) -> T:
    """Call a processor within its limits.

    Both limits must be disarmed, even if the soft one strikes at the last moment. So each one has a
    `finally` of its own, and the soft one is the inner one.
    """
    soft = partial(_soft_limited, processor.soft_time_limit_s, call)
    if processor.time_limit_s is None:
        return soft()
    faulthandler.dump_traceback_later(processor.time_limit_s, exit=True, file=STDERR)
    try:
        return soft()
    finally:
        faulthandler.cancel_dump_traceback_later()


def _soft_limited(limit_s: float | None, call: Callable[[], T]) -> T:
    if limit_s is None:
        return call()

    def exceed(*_: Any) -> None:
        raise SoftTimeLimitExceeded(limit_s)

    before = signal.signal(signal.SIGALRM, exceed)
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            return call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        # A limit that struck before this statement raises here at the latest.
        signal.signal(signal.SIGALRM, before)


# -- A call of a processor, as a Celery task -------------------------------------------------------


class RowRequest(Context):
    """The value of `current_task.request` while a task runs.

    Few processors read it, so some attributes are computed when they are read.
    """

    called_directly = False

    def __init__(
        self, task: DelayedTask, body: Any, hostname: str, call: ProcessorCall | None = None
    ) -> None:
        self.delay_task = task
        self._processor_call = call
        self.id = self.root_id = str(task.id)
        self.task = task.tag
        self.args = (body,)
        self.retries = task.runs - 1
        self.hostname = hostname

    @property
    def delay_tasks(self) -> list[DelayedTask]:
        """The tasks of the call: one, or those of a batch."""
        call = self._processor_call
        return [self.delay_task] if call is None else [run.task for run in call.runs]

    @cached_property
    def kwargs(self) -> dict[str, Any]:
        return {}

    @cached_property
    def headers(self) -> dict[str, Any]:
        """The meta, in which monitors find the trace of the caller."""
        return dict(self.delay_task.meta)

    @cached_property
    def eta(self) -> str:
        return self.delay_task.due.isoformat()

    @cached_property
    def delivery_info(self) -> dict[str, Any]:
        task = self.delay_task
        return {"routing_key": task.queue, "priority": task.priority, "redelivered": task.runs > 1}


class CurrentStack:
    """The current Celery task of a thread, with the request of one task after another."""

    def __init__(self) -> None:
        self._sender: Any = None
        self._requests: list[Any] = []

    def show(self, sender: Any, request: RowRequest) -> None:
        """Make this the current task and request.

        Celery's stacks search for their thread in every operation. For the next task of the same
        tag it is enough to replace the top element.
        """
        if sender is self._sender:
            self._requests[-1] = request
            return
        self.clear()
        _task_stack.push(sender)
        sender.request_stack.push(request)
        self._sender, self._requests = sender, sender.request_stack.stack

    def clear(self) -> None:
        if self._sender is not None:
            self._sender.request_stack.pop()
            _task_stack.pop()
            self._sender = None


class _ThreadStacks(threading.local):
    reused: CurrentStack | None = None


class CeleryTaskContext:
    """Calls processors.

    The Celery task in the signals is named after the tag, and made once per tag. With
    `keeps_time_limits` this process is of a pool that can keep time limits.
    """

    def __init__(self, runtime: Runtime, hostname: str, keeps_time_limits: bool) -> None:
        self._app, self._clock = runtime.celery, runtime.clock
        #: Context managers that are entered around each call.
        self._around = runtime.processor_contexts
        self._hostname = hostname
        self._keeps_time_limits = keeps_time_limits
        self._tasks: dict[str, Any] = {}
        self._stacks = _ThreadStacks()
        at_start(_show_coroutines)

    @contextmanager
    def reuse_stack(self) -> Iterator[None]:
        """Reuse one stack for the tasks that this thread runs one after another."""
        before, stack = self._stacks.reused, CurrentStack()
        self._stacks.reused = stack
        try:
            yield
        finally:
            self._stacks.reused = before
            stack.clear()

    def __call__(self, call: ProcessorCall) -> None:
        """Call the processor, and then `call.end`. The request is that of a batch's first task."""
        processor = call.processor
        sender = self._tasks.get(processor.tag) or self._make_task(processor)
        argument: Any = None
        value: object = None
        error: BaseException | None = None
        try:
            argument = call.read_argument()
        except Exception as raised:  # the reason why the processor cannot be called
            error = raised
        request = RowRequest(call.task, argument, self._hostname, call)
        token = row_in_context.set((sender, request))
        reused = self._stacks.reused
        stack = reused or CurrentStack()
        stack.show(sender, request)
        try:
            if signals.task_prerun.receivers:
                signals.task_prerun.send(
                    sender=sender,
                    task_id=request.id,
                    task=sender,
                    args=request.args,
                    kwargs=request.kwargs,
                )
            if error is None:
                try:
                    if self._keeps_time_limits and processor.has_time_limits:
                        value = limited(processor, partial(self._call, call, argument))
                    else:
                        value = self._call(call, argument) if self._around else call(argument)
                    if isinstance(value, TaskPredicate):
                        raise value
                except BaseException as raised:
                    value, error = self._meaning_of(raised, processor.tag)
            self._send_ends(stack, sender, request, call.end(value, error))
        finally:
            try:
                if signals.task_postrun.receivers:
                    _send_postrun(sender, request, call.results)
            finally:
                row_in_context.reset(token)
                if stack is not reused:
                    stack.clear()

    def _call(self, call: ProcessorCall, argument: Any) -> Any:
        """Call a processor within the context managers of `around`."""
        with ExitStack() as stack:
            for make_context in self._around:
                stack.enter_context(make_context(call.task))
            return call(argument)

    def _meaning_of(self, raised: BaseException, tag: str) -> tuple[object, BaseException | None]:
        """Return the outcome or the error that an exception of a processor means."""
        if isinstance(raised, Retry):
            return retry_of(raised, self._app, self._clock), None
        if isinstance(raised, TaskPredicate):  # Ignore and Reject
            refusal = InvalidInputError(
                f"the processor of {tag!r} raised celery.exceptions.{type(raised).__name__}, which "
                f"does not say how a delayed task ends: {_INSTEAD}",
                "outcome",
            )
            refusal.__cause__ = raised
            return None, refusal
        if ends_process(raised):
            raise raised
        return None, raised

    def _send_ends(
        self, stack: CurrentStack, sender: Any, request: RowRequest, ends: Sequence[RunResult]
    ) -> None:
        """Send one signal for each task of a batch, each with a request of its own."""
        for ended in ends:
            state = _state_of(ended)
            if not _SIGNALS[state].receivers:
                continue
            task, own_request = ended.settlement.task, request
            if task is not request.delay_task:
                own_request = RowRequest(task, _body_or_none(task), self._hostname)
                stack.show(sender, own_request)
            _send_end(sender, own_request, state, _result_of(ended))
        if len(ends) > 1:
            stack.show(sender, request)

    def _make_task(self, processor: ProcessorSpec) -> Any:
        """Make the Celery task of a tag. No message can call it: the app's registry lacks it."""
        body = {
            "name": processor.tag,
            "run": staticmethod(processor.function),
            "__module__": processor.function.__module__,
            # As in Celery's own tasks. Monitors show it.
            "__name__": getattr(processor.function, "__name__", processor.tag),
            "processor": processor,
        }
        sender = type("DelayTaskRow", (CurrentTask, self._app.Task), body)()
        sender.bind(self._app)
        self._tasks[processor.tag] = sender
        return sender


def _show_coroutines() -> None:
    """Make `celery.current_task` available to the coroutines of this thread's event loop."""
    _task_stack.push(TaskInContext())


def _body_or_none(task: DelayedTask) -> Any:
    try:
        return task.body
    except Exception:  # the task has failed for this reason, which its signal reports
        return None
