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
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from billiard.einfo import ExceptionInfo
from celery import Task, signals, states
from celery._state import _task_stack
from celery.app.task import Context
from celery.exceptions import Retry, SoftTimeLimitExceeded, TaskPredicate

from delaytasks.model.errors import ConfigError, InvalidInputError, TaskFailedError
from delaytasks.model.moves import Done
from delaytasks.model.task import DelayedTask
from delaytasks.run.calls import ProcessorCall, RunResult, ends_process

if TYPE_CHECKING:
    from delaytasks.db.producer import QueueRouting
    from delaytasks.registry import ProcessorSpec, Registry
    from delaytasks.runtime import Runtime

# -- The value of `celery.current_task` while a task runs, except in coroutines -------------------


_INSTEAD = (
    "return Retry(after=…), Snooze(after), Cancel(reason), Fail(reason) or Done(result) of "
    "delaytasks instead"
)


class CurrentTask(Task):
    """The Celery task of one tag. It is not in the app's registry, so no message can call it.

    A method that would send a message raises an error with a remedy.
    """

    abstract = True

    def retry(self, *_: Any, **__: Any) -> Any:
        raise InvalidInputError(
            f"retry() cannot send the delayed task {self.name!r} again: {_INSTEAD}", "outcome"
        )

    def apply_async(self, *_: Any, **__: Any) -> Any:
        """Raise an error. `delay` and signatures call this method, too."""
        raise InvalidInputError(
            f"{self.name!r} is the tag of a delayed task, and no Celery task that a message can "
            f"call: use schedule_delay({self.name!r}, body, delay)",
            "tag",
        )


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
    else:
        _send_error(sender, request, state, result)


def _send_error(sender: Any, request: Any, state: str, error: BaseException) -> None:
    """Send the signal while the exception is handled, as Celery does.

    Some receivers, such as that of Elastic APM, read the exception with `sys.exc_info()`.
    """
    traceback = error.__traceback__
    try:
        raise error
    except BaseException:
        if traceback is not None:  # an error that was never raised before needs one frame
            error.__traceback__ = traceback  # without this function
        einfo = ExceptionInfo((type(error), error, error.__traceback__))
        if state == states.RETRY:
            signals.task_retry.send(sender=sender, request=request, reason=error, einfo=einfo)
            return
        signals.task_failure.send(
            sender=sender,
            task_id=request.id,
            exception=error,
            args=request.args,
            kwargs={},
            traceback=error.__traceback__,
            einfo=einfo,
        )


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
        self._app = runtime.celery
        #: Context managers that are entered around each call.
        self._around = runtime.processor_contexts
        self._hostname = hostname
        self._keeps_time_limits = keeps_time_limits
        self._tasks: dict[str, Any] = {}
        self._stacks = _ThreadStacks()

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
                    value, error = None, self._error_of(raised, processor.tag)
            self._send_ends(stack, sender, request, call.end(value, error))
        finally:
            try:
                if signals.task_postrun.receivers:
                    _send_postrun(sender, request, call.results)
            finally:
                if stack is not reused:
                    stack.clear()

    def _call(self, call: ProcessorCall, argument: Any) -> Any:
        """Call a processor within the context managers of `around`."""
        with ExitStack() as stack:
            for make_context in self._around:
                stack.enter_context(make_context(call.task))
            return call(argument)

    @staticmethod
    def _error_of(raised: BaseException, tag: str) -> BaseException:
        """Return the error with which a processor has ended; raise one that ends the worker."""
        if isinstance(raised, TaskPredicate):  # Retry, Ignore and Reject
            refusal = InvalidInputError(
                f"the processor of {tag!r} raised celery.exceptions.{type(raised).__name__}, which "
                f"does not say how a delayed task ends: {_INSTEAD}",
                "outcome",
            )
            refusal.__cause__ = raised
            return refusal
        if ends_process(raised):
            raise raised
        return raised

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
        }
        sender = type("DelayTaskRow", (CurrentTask, self._app.Task), body)()
        sender.bind(self._app)
        self._tasks[processor.tag] = sender
        return sender


def _body_or_none(task: DelayedTask) -> Any:
    try:
        return task.body
    except Exception:  # the task has failed for this reason, which its signal reports
        return None
