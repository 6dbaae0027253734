"""A processor's surroundings: fresh context variables, a current Celery task with a request of its own, and
Celery's signals, so that what hangs on them (Django's connections, Sentry, OpenTelemetry) works for each row."""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from billiard.einfo import ExceptionInfo
from celery import signals
from celery._state import _task_stack

from delaytasks.core.task import DelayTask
from delaytasks.engine.batch import Work
from delaytasks.worker.timelimits import limited


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

    def __call__(self, work: Work, task: DelayTask) -> Any:
        """For a batch, `task` is the first of its tasks."""
        return contextvars.copy_context().run(self._run, work, task)

    def _run(self, work: Work, task: DelayTask) -> Any:
        sender = self._tasks.get(task.tag) or self._make_task(work)
        id, body = str(task.id), work.body_of(task)
        args = (body,)
        _task_stack.push(sender)
        sender.push_request(
            id=id,
            root_id=id,
            task=task.tag,
            args=args,
            kwargs={},
            retries=task.attempts - 1,
            is_eager=False,
            called_directly=False,
            hostname=self._hostname,
            delivery_info={"routing_key": task.queue, "priority": task.priority, "redelivered": task.attempts > 1},
            eta=task.expected_time.isoformat(),
            delay_task=task,
            # Given, so that Celery does not look for custom ones among all fields of every request.
            headers={},
        )
        state, result = "FAILURE", None
        try:
            if signals.task_prerun.receivers:
                signals.task_prerun.send(sender=sender, task_id=id, task=sender, args=args, kwargs={})
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
                        sender=sender, task_id=id, task=sender, args=args, kwargs={}, retval=result, state=state
                    )
            finally:
                sender.pop_request()
                _task_stack.pop()

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
