"""The Celery task context in which a processor runs.

Each task has fresh context variables, a current Celery task with a request of its own, and Celery's
signals. So the receivers of these signals (Django's connections, Sentry, OpenTelemetry) work for
each task.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any

from celery._state import _task_stack
from celery.app.task import Context
from celery.exceptions import Retry, TaskPredicate

from delaytasks.core.clock import Clock
from delaytasks.core.task import DelayTask
from delaytasks.execution.executor import Finish, RunResult, ends_process
from delaytasks.execution.processor_call import ProcessorCall
from delaytasks.processors import event_loop
from delaytasks.processors.registry import ProcessorSpec
from delaytasks.worker.current_task import (
    CurrentTask,
    TaskInContext,
    refusal_of,
    retry_of,
    row_in_context,
)
from delaytasks.worker.task_signals import (
    has_receivers,
    result_of,
    send_end,
    send_postrun,
    send_prerun,
    state_of,
)
from delaytasks.worker.time_limits import limited


class RowRequest(Context):
    """The value of `current_task.request` while a task runs.

    Few processors read it, so some attributes are computed when they are read.
    """

    called_directly = False

    def __init__(
        self,
        task: DelayTask,
        body: Any,
        hostname: str,
        call: ProcessorCall | None = None,
    ) -> None:
        self.delay_task = task
        self._processor_call = call
        self.id = self.root_id = str(task.id)
        self.task = task.tag
        self.args = (body,)
        self.retries = task.attempts - 1
        self.hostname = hostname

    @property
    def delay_tasks(self) -> list[DelayTask]:
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
        return {
            "routing_key": task.queue,
            "priority": task.priority,
            "redelivered": task.attempts > 1,
        }


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

    The Celery task in the signals is named after the tag, and made once per tag. `around` are
    context managers that are entered around each call. With `keeps_time_limits` this process is of
    a pool that can keep time limits.
    """

    def __init__(
        self,
        app: Any,
        hostname: str,
        clock: Clock,
        around: Sequence[Callable[[DelayTask], AbstractContextManager[Any]]] = (),
        keeps_time_limits: bool = False,
    ) -> None:
        self._app = app
        self._hostname = hostname
        self._clock = clock
        self._around = around
        self._keeps_time_limits = keeps_time_limits
        self._tasks: dict[str, Any] = {}
        self._stacks = _ThreadStacks()
        event_loop.at_start(_show_coroutines)

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

    def __call__(self, call: ProcessorCall, end: Finish) -> None:
        """Call the processor, and then `end`. The request is that of a batch's first task."""
        task, processor = call.task, call.processor
        sender = self._tasks.get(processor.tag) or self._make_task(processor)
        error: BaseException | None
        argument, error = _argument_of(call)
        request = RowRequest(task, argument, self._hostname, call)
        token = row_in_context.set((sender, request))
        reused = self._stacks.reused
        stack = reused or CurrentStack()
        stack.show(sender, request)
        value: object = None
        ends: Sequence[RunResult] = ()
        try:
            send_prerun(sender, request)
            if error is None:
                try:
                    if self._keeps_time_limits and processor.has_time_limits:
                        value = limited(processor, partial(self._call, call, argument))
                    else:
                        value = self._call(call, argument) if self._around else call(argument)
                    if isinstance(value, TaskPredicate):
                        raise value
                except BaseException as raised:
                    value, error = self._meaning_of(raised, task.tag)
            ends = end(value, error)
            self._send_ends(stack, sender, request, ends)
        finally:
            try:
                send_postrun(sender, request, ends)
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
            refusal = refusal_of(raised, tag)
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
            if not has_receivers(state_of(ended)):
                continue
            task, own_request = ended.settlement.task, request
            if task is not request.delay_task:
                own_request = RowRequest(task, _body_or_none(task), self._hostname)
                stack.show(sender, own_request)
            send_end(sender, own_request, ended, result_of(ended))
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


def _argument_of(call: ProcessorCall) -> tuple[Any, Exception | None]:
    """Return the processor's argument, or the reason why it cannot be called."""
    try:
        return call.read_argument(), None
    except Exception as error:
        return None, error


def _body_or_none(task: DelayTask) -> Any:
    try:
        return task.body
    except Exception:  # the task has failed for this reason, which its signal reports
        return None
