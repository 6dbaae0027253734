"""A processor's surroundings: fresh context variables, a current Celery task with a request of its own, and
Celery's signals, so that what hangs on them (Django's connections, Sentry, OpenTelemetry) works for each row."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any

from billiard.einfo import ExceptionInfo
from celery import signals
from celery._state import _task_stack
from celery.app.task import Context

from delaytasks.core.task import DelayTask
from delaytasks.engine.batch import Work
from delaytasks.worker.timelimits import limited


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
        return {"routing_key": task.queue, "priority": task.priority, "redelivered": task.attempts > 1}


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


class Surroundings:
    """Calls processors. The Celery task that a row's signals see is named by its tag, and made once per tag."""

    def __init__(
        self,
        app: Any,
        hostname: str,
        around: Sequence[Callable[[DelayTask], AbstractContextManager[Any]]] = (),
        keeps_time_limits: bool = False,
    ) -> None:
        self._app = app
        self._hostname = hostname
        self._around = around
        self._keeps_time_limits = keeps_time_limits
        self._tasks: dict[str, Any] = {}
        self._stages = _Stages()

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

    def __call__(self, work: Work, task: DelayTask) -> Any:
        """For a batch, `task` is the first of its tasks."""
        return contextvars.copy_context().run(self._run, work, task)

    def _run(self, work: Work, task: DelayTask) -> Any:
        sender = self._tasks.get(task.tag) or self._make_task(work)
        body = work.body_of(task)
        request = RowRequest(task, body, self._hostname)
        id, args = request.id, request.args
        kept = self._stages.kept
        stage = kept or Stage()
        stage.show(sender, request)
        state, result = "FAILURE", None
        try:
            if signals.task_prerun.receivers:
                signals.task_prerun.send(sender=sender, task_id=id, task=sender, args=args, kwargs=request.kwargs)
            try:
                if self._keeps_time_limits and work.has_time_limits:
                    result = limited(work, partial(self._call, work, task, body))
                else:
                    result = self._call(work, task, body) if self._around else work(task, body)
            except Exception as error:
                result = error
                ladder = work.ladder_for(error, task)
                if ladder is not None and ladder.has_rung(task.attempts):
                    state = "RETRY"
                    self._tell_retry(sender, error)
                else:
                    self._tell_failure(sender, id, args, error)
                raise
            state = "SUCCESS"
            if signals.task_success.receivers:
                signals.task_success.send(sender=sender, result=result)
            return result
        finally:
            try:
                if signals.task_postrun.receivers:
                    signals.task_postrun.send(
                        sender=sender,
                        task_id=id,
                        task=sender,
                        args=args,
                        kwargs=request.kwargs,
                        retval=result,
                        state=state,
                    )
            finally:
                if stage is not kept:
                    stage.clear()

    def _call(self, work: Work, task: DelayTask, body: Any) -> Any:
        with ExitStack() as stack:
            for surround in self._around:
                stack.enter_context(surround(task))
            return work(task, body)

    @staticmethod
    def _tell_failure(sender: Any, id: str, args: tuple[Any, ...], error: Exception) -> None:
        if signals.task_failure.receivers:
            signals.task_failure.send(
                sender=sender,
                task_id=id,
                exception=error,
                args=args,
                kwargs={},
                traceback=error.__traceback__,
                einfo=ExceptionInfo(sys.exc_info()),
            )

    @staticmethod
    def _tell_retry(sender: Any, error: Exception) -> None:
        if signals.task_retry.receivers:
            einfo = ExceptionInfo(sys.exc_info())
            signals.task_retry.send(sender=sender, request=sender.request, reason=error, einfo=einfo)

    def _make_task(self, work: Work) -> Any:
        """Not in the app's registry: nobody can call it by a message."""
        body = {
            "name": work.tag,
            "run": staticmethod(work.function),
            "__module__": work.function.__module__,
        }
        sender = type("DelayTaskRow", (self._app.Task,), body)()
        sender.bind(self._app)
        self._tasks[work.tag] = sender
        return sender
