"""The value of `celery.current_task` while a task runs, and Celery's own ways to end a task."""

from __future__ import annotations

from contextvars import ContextVar
from datetime import datetime
from types import SimpleNamespace
from typing import Any

from celery import Task
from celery.app.task import Context
from celery.exceptions import MaxRetriesExceededError, Retry, TaskPredicate
from celery.utils.time import maybe_make_aware

from delaytasks.core import task as outcomes
from delaytasks.core.clock import Clock
from delaytasks.core.errors import InvalidOutcomesError, InvalidScheduleError
from delaytasks.core.text import traceback_text

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
            raise InvalidOutcomesError(
                f"retry({', '.join(refused)}=…) cannot change task {self.request.id} "
                f"({self.name}): retry() takes exc, eta, countdown and max_retries; to run other "
                "work use schedule_delay"
            )
        if not throw:
            raise InvalidOutcomesError(
                f"retry(throw=False) has no effect on task {self.request.id} ({self.name}): raise "
                "self.retry(), or return Retry(after=…) of delaytasks"
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
        raise InvalidScheduleError(
            f"{self.name!r} is the tag of a delayed task, and no Celery task that a message can "
            f"call: use schedule_delay({self.name!r}, body, delay)"
        )


class TaskInContext:
    """Celery's current task in the event loop, whose thread runs the coroutines of many rows."""

    def __getattr__(self, name: str) -> Any:
        return getattr(row_in_context.get(_NO_ROW)[0], name)


def retry_of(retry: Retry, app: Any, clock: Clock) -> outcomes.Retry:
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
    return outcomes.Retry(after=when, reason=reason)


def refusal_of(raised: TaskPredicate, tag: str) -> InvalidOutcomesError:
    return InvalidOutcomesError(
        f"the processor of {tag!r} raised celery.exceptions.{type(raised).__name__}, which does "
        f"not say how a delayed task ends: {_INSTEAD}"
    )
