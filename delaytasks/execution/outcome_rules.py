"""Outcome rules: from what a processor returned or raised to the settlement of its task."""

from __future__ import annotations

from datetime import datetime
from types import AsyncGeneratorType, GeneratorType

from delaytasks.core.body import encode_body
from delaytasks.core.clock import Clock
from delaytasks.core.errors import (
    InvalidInputError,
    InvalidOutcomesError,
    InvalidScheduleError,
    TaskCancelledError,
    TaskStateError,
)
from delaytasks.core.events import Events
from delaytasks.core.inputs import check_wait
from delaytasks.core.interfaces import Settlement
from delaytasks.core.settings import Settings
from delaytasks.core.task import Cancel, DelayTask, Done, Fail, Outcome, Retry, Snooze
from delaytasks.core.text import storable, traceback_text
from delaytasks.execution.task_run import MAX_RESULT_BYTES, LeaseEndsError, TaskRun
from delaytasks.processors.registry import ProcessorSpec

#: The code of these values runs only during an iteration over them.
_LAZY = (GeneratorType, AsyncGeneratorType, map, filter)
#: The outcomes of a run that is repeated or that fails.
_UNFINISHED = (Retry, Snooze, Fail)


class OutcomeRules:
    def __init__(self, settings: Settings, clock: Clock, events: Events) -> None:
        self._settings = settings
        self._clock = clock
        self._events = events

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
        self, task: DelayTask, began: datetime, error: BaseException | None
    ) -> Settlement:
        """Return the settlement of a run that a caller has cancelled and that did not succeed."""
        reason = "cancelled by a caller while it ran"
        self._events.emit("task.withdrawn", **task.event_fields, began=began, reason=reason)
        text = reason
        if error is not None and not isinstance(error, TaskCancelledError):
            text += "\n" + traceback_text(error, self._settings.max_error_bytes)
        return Settlement(task, "withdraw", began, self._text(text))

    def of_error(
        self, processor: ProcessorSpec, task: DelayTask, began: datetime, error: BaseException
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
        wait_s = None if retry_schedule is None else retry_schedule.wait_s(task.attempts)
        if wait_s is None:
            return self._failed(task, began, text, error)
        return self._schedule_retry(task, began, text, wait_s, error)

    def _of_value(
        self, processor: ProcessorSpec, task: DelayTask, began: datetime, value: object
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
            raise InvalidOutcomesError(
                f"the processor of {task.tag!r} returned an object of type "
                f"{type(result).__name__}, whose code does not run by itself: iterate over it or "
                "await it in the processor, and return None, a value or an outcome"
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
        self, processor: ProcessorSpec, task: DelayTask, began: datetime, value: object
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
        self, processor: ProcessorSpec, task: DelayTask, began: datetime, asked: Retry
    ) -> Settlement:
        retry_schedule = processor.retries.retry_schedule_for(Exception, task.retry_schedule)
        reason = asked.reason or "its processor asked to be run again"
        wait_s = None if retry_schedule is None else retry_schedule.wait_s(task.attempts)
        if retry_schedule is not None and wait_s is None:
            text = self._text(f"{reason} (its retry schedule has no delay left)")
            return self._failed(task, began, text, reason)
        if asked.after is not None:
            wait_s = self._wait_s(asked.after)
        if wait_s is None:
            raise InvalidScheduleError(
                "Retry() without after= needs a retry schedule: @processor(tag, retries=...)"
            )
        return self._schedule_retry(task, began, self._text(reason), wait_s, reason)

    def _failed(self, task: DelayTask, began: datetime, text: str, error: object) -> Settlement:
        self._events.emit("task.failed", **task.event_fields, began=began, error=error)
        return Settlement(task, "fail", began, text)

    def _schedule_retry(
        self, task: DelayTask, began: datetime, text: str, wait_s: float, error: object
    ) -> Settlement:
        self._events.emit(
            "task.retry_scheduled",
            **task.event_fields,
            began=began,
            attempt=task.attempts,
            wait_s=wait_s,
            error=error,
        )
        return Settlement(task, "schedule_retry", began, text, self._clock.after(wait_s))

    def _kept(self, task: DelayTask, result: object) -> str | None:
        """Return the result as JSON; a result that cannot be kept does not undo the run."""
        try:
            return encode_body(result, MAX_RESULT_BYTES)
        except InvalidInputError as error:
            self._events.emit("result.dropped", **task.event_fields, error=str(error))
            return None

    def _wait_s(self, after: object) -> float:
        return check_wait(after, self._settings.max_delay_s)

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
