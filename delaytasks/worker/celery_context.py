"""A processor's surroundings: fresh context variables, a current Celery task with a request of its own, and
Celery's signals, so that what hangs on them (Django's connections, Sentry, OpenTelemetry) works for each row."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any

from celery import signals
from celery._state import _task_stack
from celery.app.task import Context
from celery.exceptions import Retry, TaskPredicate

from delaytasks.core.clock import Clock
from delaytasks.core.task import DelayTask
from delaytasks.execution.batch import Batch, Work
from delaytasks.execution.executor import End, Ended, ends_process
from delaytasks.processors import event_loop
from delaytasks.worker.current_task import (
    CurrentTask,
    TaskInContext,
    refusal_of,
    retry_of,
    row_in_context,
)
from delaytasks.worker.task_signals import has_receivers, result_of, state_of, tell_end
from delaytasks.worker.time_limits import limited


class RowRequest(Context):
    """What `current_task.request` is while a row runs. Few look at it, so some of it is made when somebody does."""

    called_directly = False

    def __init__(self, task: DelayTask, body: Any, hostname: str) -> None:
        self.delay_task = task
        self.id = self.root_id = str(task.id)
        self.task = task.tag
        self.args = (body,)
        self.retries = task.attempts - 1
        self.hostname = hostname

    @cached_property
    def kwargs(self) -> dict[str, Any]:
        return {}

    @cached_property
    def headers(self) -> dict[str, Any]:
        return {}

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


class Stage:
    """A thread's current Celery task, with the request of one row after the other."""

    def __init__(self) -> None:
        self._sender: Any = None
        self._requests: list[Any] = []

    def show(self, sender: Any, request: RowRequest) -> None:
        """Celery's stacks look for their thread at every step: for the next row of a tag it is enough to replace what
        is on top."""
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


class _Stages(threading.local):
    kept: Stage | None = None


class CeleryTaskContext:
    """Calls processors. The Celery task that a row's signals see is named by its tag, and made once per tag."""

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
        self._stages = _Stages()
        event_loop.at_start(_show_coroutines)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """For rows that this thread runs one after another."""
        before, stage = self._stages.kept, Stage()
        self._stages.kept = stage
        try:
            yield
        finally:
            self._stages.kept = before
            stage.clear()

    def __call__(self, work: Work, task: DelayTask, end: End) -> None:
        """For a batch, `task` is the first of its tasks."""
        contextvars.copy_context().run(self._run, work, task, end)

    def _run(self, work: Work, task: DelayTask, end: End) -> None:
        sender = self._tasks.get(task.tag) or self._make_task(work)
        error: BaseException | None
        body, error = _body_of(work, task)
        request = RowRequest(task, body, self._hostname)
        row_in_context.set((sender, request))
        kept = self._stages.kept
        stage = kept or Stage()
        stage.show(sender, request)
        value: object = None
        ends: Sequence[Ended] = ()
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
                value, error = self._called(work, task, body)
            ends = end(value, error)
            self._tell(stage, sender, request, ends)
        finally:
            try:
                if signals.task_postrun.receivers:
                    signals.task_postrun.send(
                        sender=sender,
                        task_id=request.id,
                        task=sender,
                        args=request.args,
                        kwargs=request.kwargs,
                        retval=result_of(ends[0]) if ends else None,
                        state=state_of(ends[0]) if ends else "FAILURE",
                    )
            finally:
                if stage is not kept:
                    stage.clear()

    def _called(
        self, work: Work, task: DelayTask, body: Any
    ) -> tuple[object, BaseException | None]:
        """What the processor returned, or what it raised."""
        try:
            if self._keeps_time_limits and work.has_time_limits:
                value = limited(work, partial(self._call, work, task, body))
            else:
                value = self._call(work, task, body) if self._around else work(task, body)
            if isinstance(value, TaskPredicate):
                raise value
            return value, None
        except Retry as asked:
            return retry_of(asked, self._app, self._clock), None
        except TaskPredicate as raised:  # Ignore and Reject
            refusal = refusal_of(raised, work.tag)
            refusal.__cause__ = raised
            return None, refusal
        except BaseException as error:
            if ends_process(error):
                raise
            return None, error

    def _call(self, work: Work, task: DelayTask, body: Any) -> Any:
        with ExitStack() as stack:
            for surround in self._around:
                stack.enter_context(surround(task))
            return work(task, body)

    def _tell(self, stage: Stage, sender: Any, request: RowRequest, ends: Sequence[Ended]) -> None:
        """Each task of a batch has a signal of its own, with a request of its own."""
        for ended in ends:
            if not has_receivers(state_of(ended)):
                continue
            task, of_task = ended.settlement.task, request
            if task is not request.delay_task:
                of_task = RowRequest(task, _body_or_none(task), self._hostname)
                stage.show(sender, of_task)
            tell_end(sender, of_task, ended, result_of(ended))
        if len(ends) > 1:
            stage.show(sender, request)

    def _make_task(self, work: Work) -> Any:
        """Not in the app's registry: nobody can call it by a message."""
        body = {
            "name": work.tag,
            "run": staticmethod(work.function),
            "__module__": work.function.__module__,
            "processor": work.processor if isinstance(work, Batch) else work,
        }
        sender = type("DelayTaskRow", (CurrentTask, self._app.Task), body)()
        sender.bind(self._app)
        self._tasks[work.tag] = sender
        return sender


def _show_coroutines() -> None:
    """Make `celery.current_task` available to the coroutines of this thread's event loop."""
    _task_stack.push(TaskInContext())


def _body_of(work: Work, task: DelayTask) -> tuple[Any, Exception | None]:
    """What the processor is given; or why it can not be called."""
    try:
        return work.body_of(task), None
    except Exception as error:
        return None, error


def _body_or_none(task: DelayTask) -> Any:
    try:
        return task.body
    except Exception:  # its end says so
        return None
