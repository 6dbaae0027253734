"""From what a processor returned or raised to the settlement of its task.

In this order: a run that a caller has cancelled ends as CANCELLED, unless it has succeeded. A run
that has settled its row with `complete()` stays DONE, whatever it raises after the commit. An
outcome (`Retry`, `Snooze`, `Cancel`, `Fail`, `Done`) decides; any other value is a success. An
error is retried by the retry schedule of the task or of its processor, or else fails the task. An
outcome that cannot be used becomes such an error.
"""

from __future__ import annotations

from types import AsyncGeneratorType, GeneratorType
from typing import TYPE_CHECKING, Any

from delaytasks.model.body import encode_body
from delaytasks.model.errors import (
    InvalidInputError,
    LeaseLostError,
    TaskCancelledError,
    TaskStateError,
)
from delaytasks.model.inputs import check_wait
from delaytasks.model.outcomes import Cancel, Done, Fail, Outcome, Retry, Snooze
from delaytasks.model.task import Settlement
from delaytasks.model.text import storable, traceback_text

if TYPE_CHECKING:
    from delaytasks.run.calls import TaskRun
    from delaytasks.runtime import Runtime


#: The longest result of a task. Results are for inspection; data belongs elsewhere.
MAX_RESULT_BYTES = 16 * 1024
#: The code of these values runs only during an iteration over them.
_LAZY = (GeneratorType, AsyncGeneratorType, map, filter)
#: The outcomes of a run that is repeated or that fails.
_UNFINISHED = (Retry, Snooze, Fail)


class LeaseEndsError(LeaseLostError):
    """The lease is about to end or has ended, because the worker could not renew it."""


class OutcomeRules:
    def __init__(self, runtime: Runtime) -> None:
        self._settings, self._clock = runtime.settings, runtime.clock
        self._events = runtime.events

    def settlement(
        self, run: TaskRun, value: object, error: BaseException | None
    ) -> tuple[Settlement, BaseException | None]:
        """Return the settlement of a run, and the error that decided it.

        The error is the given one, or it says why `value` is no valid outcome.
        """
        if not run.is_written and (error is not None or isinstance(value, _UNFINISHED)):
            is_own = isinstance(error, TaskCancelledError) and error.id == run.task.id
            if is_own or run.is_asked_to_stop:
                return self._cancelled(run, error), None
        if error is None:
            try:
                return self._of_value(run, value), None
            except Exception as raised:  # becomes the error of the task, with its traceback
                error = raised
        if run.is_certain or run.is_left_open:
            return self._of_completed(run, error), error
        # If that transaction was committed nevertheless, the fence refuses this settlement.
        return self.of_error(run, error), error

    def of_error(self, run: TaskRun, error: BaseException) -> Settlement:
        """Schedule a retry or fail the task.

        If its lease was about to end, or if another task of its batch was cancelled, run it again
        immediately.
        """
        task = run.task
        is_others = isinstance(error, TaskCancelledError) and error.id not in (None, task.id)
        if is_others or isinstance(error, LeaseEndsError):  # not the task's fault
            self._events.emit("task.interrupted", **task.event_fields, error=error)
            now = self._clock.now()
            return Settlement(task, "snooze", run.began, expected_time=now, due_time=task.due)
        text = traceback_text(error, self._settings.max_error_bytes)
        retry_schedule = run.processor.retry_schedule_for(error, task)
        wait_s = None if retry_schedule is None else retry_schedule.wait_s(task.runs)
        if wait_s is None:
            return self._failed(run, text, error)
        return self._schedule_retry(run, text, wait_s, error)

    def _cancelled(self, run: TaskRun, error: BaseException | None) -> Settlement:
        """Return the settlement of a run that a caller has cancelled and that did not succeed."""
        text = "cancelled by a caller while it ran"
        self._emit("task.withdrawn", run, reason=text)
        if error is not None and not isinstance(error, TaskCancelledError):
            text += "\n" + traceback_text(error, self._settings.max_error_bytes)
        return Settlement(run.task, "withdraw", run.began, self._text(text))

    def _of_value(self, run: TaskRun, value: object) -> Settlement:
        """Return the settlement of what a processor returned."""
        if run.is_written:
            if not run.is_rolled_back:
                return self._of_completed(run, None)
            if isinstance(value, Done) or not isinstance(value, Outcome):
                raise TaskStateError(
                    "complete() was called, its transaction was rolled back, and the processor "
                    "returned as if all were well: let the error out of it, or return Retry() or "
                    "another outcome",
                    run.task.id,
                )
        if isinstance(value, Retry):
            return self._retry(run, value)
        if isinstance(value, Snooze):
            self._emit("task.snoozed", run)
            next_run = self._clock.after(self._wait_s(value.after))
            return Settlement(run.task, "snooze", run.began, expected_time=next_run)
        if isinstance(value, Cancel):
            self._emit("task.withdrawn", run, reason=value.reason)
            reason = value.reason or "cancelled by its processor"
            return Settlement(run.task, "withdraw", run.began, self._text(reason))
        if isinstance(value, Fail):
            reason = value.reason or "failed by its processor"
            return self._failed(run, self._text(reason), reason)
        return self._succeeded(run, value.result if isinstance(value, Done) else value)

    def _succeeded(self, run: TaskRun, result: object) -> Settlement:
        task, kept = run.task, None
        if isinstance(result, _LAZY) or hasattr(type(result), "__await__"):
            raise InvalidInputError(
                f"the processor of {task.tag!r} returned an object of type "
                f"{type(result).__name__}, whose code does not run by itself: iterate over it or "
                "await it in the processor, and return None, a value or an outcome",
                "outcome",
            )
        if result is not None and run.processor.keep_result:
            try:
                kept = encode_body(result, MAX_RESULT_BYTES)
            except InvalidInputError as error:  # does not undo the run
                self._events.emit("result.dropped", **task.event_fields, error=str(error))
        return Settlement(task, "succeed", run.began, result=kept)

    def _of_completed(self, run: TaskRun, error: BaseException | None) -> Settlement:
        """Return the settlement that the processor has made itself with `complete()`."""
        task = run.task
        if not run.is_committed:
            # The open transaction has locked the row. Without a commit the row is abandoned.
            why = (
                "complete() was called, and its transaction was still open when the processor "
                "ended: end it first"
            )
            self._events.emit("task.left_open", **task.event_fields, remedy=why, error=error)
            return Settlement(task, "fail", run.began, why, is_made=True)
        if error is not None:
            self._events.emit("task.raised_late", **task.event_fields, error=error)
        return Settlement(task, "succeed", run.began, is_made=True)

    def _retry(self, run: TaskRun, asked: Retry) -> Settlement:
        task, reason = run.task, asked.reason or "its processor asked to be run again"
        retry_schedule = run.processor.retries.retry_schedule_for(Exception, task.retry_schedule)
        wait_s = None if retry_schedule is None else retry_schedule.wait_s(task.runs)
        if retry_schedule is not None and wait_s is None:
            text = self._text(f"{reason} (its retry schedule has no delay left)")
            return self._failed(run, text, reason)
        if asked.after is not None:
            wait_s = self._wait_s(asked.after)
        if wait_s is None:
            raise InvalidInputError(
                "Retry() without after= needs a retry schedule: @processor(tag, retries=...)",
                "after",
            )
        return self._schedule_retry(run, self._text(reason), wait_s, reason)

    def _failed(self, run: TaskRun, text: str, error: object) -> Settlement:
        self._emit("task.failed", run, error=error)
        return Settlement(run.task, "fail", run.began, text)

    def _schedule_retry(self, run: TaskRun, text: str, wait_s: float, error: object) -> Settlement:
        attempt = run.task.runs
        self._emit("task.retry_scheduled", run, attempt=attempt, wait_s=wait_s, error=error)
        return Settlement(run.task, "schedule_retry", run.began, text, self._clock.after(wait_s))

    def _emit(self, name: str, run: TaskRun, **fields: Any) -> None:
        self._events.emit(name, **run.task.event_fields, began=run.began, **fields)

    def _wait_s(self, after: object) -> float:
        return check_wait(after, self._settings.max_delay_s, "after")

    def _text(self, reason: str) -> str:
        return storable(str(reason), self._settings.max_error_bytes)
