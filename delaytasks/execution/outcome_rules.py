"""How a run ends: from what its processor returned or raised to the move of its row."""

from __future__ import annotations

from datetime import datetime, timedelta

from delaytasks.core.clock import Clock
from delaytasks.core.encryption import NO_NAME, PLAIN, is_encrypted, name_in, names_of
from delaytasks.core.errors import InvalidInputError, InvalidScheduleError, TaskStateError
from delaytasks.core.events import Events
from delaytasks.core.inputs import check_wait, encode_body
from delaytasks.core.interfaces import Settlement
from delaytasks.core.outcomes import Cancel, Done, Fail, Retry, Snooze
from delaytasks.core.settings import Settings
from delaytasks.core.task import DelayTask
from delaytasks.core.text import (
    DEFER_MAX_S,
    DEFER_MIN_S,
    NO_KEY,
    NO_PROCESSOR,
    NO_TIME_LIMITS,
    defer_until,
    storable,
    traceback_text,
)
from delaytasks.execution.task_run import MAX_RESULT_BYTES, LeaseEndsError, TaskRun
from delaytasks.processors.registry import Processor, Registry


class OutcomeRules:
    def __init__(self, settings: Settings, clock: Clock, events: Events) -> None:
        self._settings = settings
        self._clock = clock
        self._events = events
        self._keys = [name for name in names_of(settings.encryption_keys) if name != PLAIN]

    def too_late(self, processor: Processor, task: DelayTask) -> Settlement | None:
        """The end of a task that is not worth running any more."""
        expires_s = task.expires_s if task.expires_s is not None else processor.expires_s
        if expires_s is None:
            return None
        late_s = (self._clock.now() - task.due).total_seconds()
        if late_s <= expires_s:
            return None
        self._events.emit("task.expired", id=task.id, tag=task.tag, late_s=late_s)
        return Settlement(
            task,
            "expire",
            error=f"expired: {late_s:.3f} s late, and worth running for {expires_s:g} s",
        )

    def no_processor(self, task: DelayTask, registry: Registry) -> Settlement:
        """A deploy may bring its processor: never failed, tried again less and less often."""
        known = ", ".join(sorted(processor.tag for processor in registry)) or "none"
        wait_s = self._defer_s(task)
        due = self._after(wait_s)
        why = f"{NO_PROCESSOR}{task.tag} (this worker knows: {known}); is its module imported?"
        error = defer_until(storable(why, 4096), due)
        self._events.emit("task.no_processor", id=task.id, tag=task.tag, next_try_s=wait_s)
        return _deferred(task, error, due)

    def lacks_key(self, task: DelayTask) -> bool:
        """Whether another process may be able to read the body. What is encrypted with a key of ours and can not be
        read was changed, as what names no key at all: nobody can, and that is its task's failure."""
        return is_encrypted(task.body_json) and name_in(task.body_json) not in (
            NO_NAME,
            *self._keys,
        )

    def no_key(self, task: DelayTask) -> Settlement:
        """While keys are exchanged some workers have a new one earlier than others."""
        name, known = name_in(task.body_json), ", ".join(self._keys) or "none"
        wait_s = self._defer_s(task)
        due = self._after(wait_s)
        why = f"{NO_KEY}{name} (this worker has: {known}); add it to delaytasks_encryption_keys"
        self._events.emit("task.no_key", id=task.id, tag=task.tag, key=name, next_try_s=wait_s)
        return _deferred(task, defer_until(why, due), due)

    def no_time_limits(self, task: DelayTask) -> Settlement:
        """Another worker may be able to keep those of its tag."""
        why = (
            f"{NO_TIME_LIMITS}{task.tag}; let a worker with -P prefork serve the queue {task.queue}"
        )
        wait_s = self._defer_s(task)
        due = self._after(wait_s)
        self._events.emit("task.no_time_limits", id=task.id, tag=task.tag, next_try_s=wait_s)
        return _deferred(task, defer_until(why, due), due)

    def of_error(
        self, processor: Processor, task: DelayTask, began: datetime, error: BaseException
    ) -> Settlement:
        """The next rung of the ladder, or FAILED; at once again if its lease was lost."""
        if isinstance(error, LeaseEndsError):  # the worker's fault, and not the task's
            self._events.emit("task.broke_off", id=task.id, tag=task.tag, error=error)
            return Settlement(task, "snooze", began, due=self._clock.now(), due_time=task.due)
        text = traceback_text(error, self._settings.max_error_bytes)
        retry_schedule = processor.retry_schedule_for(error, task)
        wait_s = None if retry_schedule is None else retry_schedule.wait_s(task.attempts)
        return (
            self._failed(task, began, text, error)
            if wait_s is None
            else self._schedule_retry(task, began, text, wait_s, error)
        )

    def of_value(
        self, processor: Processor, task: DelayTask, began: datetime, value: object
    ) -> Settlement:
        """What an outcome says; any other value is success."""
        if isinstance(value, Retry):
            return self._retry(processor, task, began, value)
        if isinstance(value, Snooze):
            self._events.emit("task.snoozed", id=task.id, tag=task.tag)
            return Settlement(task, "snooze", began, due=self._after(self._wait_s(value.after)))
        if isinstance(value, Cancel):
            self._events.emit("task.withdrawn", id=task.id, tag=task.tag, reason=value.reason)
            return Settlement(
                task, "withdraw", began, self._text(value.reason or "cancelled by its processor")
            )
        if isinstance(value, Fail):
            reason = value.reason or "failed by its processor"
            return self._failed(task, began, self._text(reason), reason)
        result = value.result if isinstance(value, Done) else value
        kept = self._kept(task, result) if processor.keep_result and result is not None else None
        return Settlement(task, "succeed", began, result=kept)

    def of_completed(
        self, run: TaskRun, began: datetime, error: BaseException | None
    ) -> Settlement:
        """The processor has settled its task itself: nothing is left to be made of the row."""
        task = run.task
        if not run.is_committed:
            # It can not be settled while that transaction has it locked; if it is never committed, the row lapses.
            why = "complete() was called, and its transaction was still open when the processor ended: end it first"
            self._events.emit("task.left_open", id=task.id, tag=task.tag, remedy=why, error=error)
            return Settlement(task, "fail", began, why, is_made=True)
        if error is not None:
            self._events.emit("task.raised_late", id=task.id, tag=task.tag, error=error)
        return Settlement(task, "succeed", began, is_made=True)

    def of_rolled_back(
        self, processor: Processor, task: DelayTask, began: datetime, value: object
    ) -> Settlement:
        """The processor has settled its task, and undone that: no success, whatever it did besides."""
        if isinstance(value, (Retry, Snooze, Cancel, Fail)):
            return self.of_value(processor, task, began, value)
        raise TaskStateError(
            "complete() was called, its transaction was rolled back, and the processor returned as if all were well: "
            "let the error out of it, or return Retry() or another outcome",
            task.id,
        )

    def _retry(
        self, processor: Processor, task: DelayTask, began: datetime, asked: Retry
    ) -> Settlement:
        retry_schedule = processor.retries.retry_schedule_for(Exception, task.retry_schedule)
        reason = asked.reason or "its processor asked to be run again"
        wait_s = None if retry_schedule is None else retry_schedule.wait_s(task.attempts)
        if retry_schedule is not None and wait_s is None:
            return self._failed(
                task, began, self._text(f"{reason} (no rung of its ladder is left)"), reason
            )
        if asked.after is not None:
            wait_s = self._wait_s(asked.after)
        if wait_s is None:
            raise InvalidScheduleError(
                "Retry() without after= needs a ladder: @processor(tag, retry=...)"
            )
        return self._schedule_retry(task, began, self._text(reason), wait_s, reason)

    def _defer_s(self, task: DelayTask) -> float:
        now = self._clock.now()
        waited_s = (now - (task.create_time or now)).total_seconds() - task.delay_s
        return min(max(waited_s / 10, DEFER_MIN_S), DEFER_MAX_S)

    def _failed(self, task: DelayTask, began: datetime, text: str, error: object) -> Settlement:
        self._events.emit("task.failed", id=task.id, tag=task.tag, error=error)
        return Settlement(task, "fail", began, text)

    def _schedule_retry(
        self, task: DelayTask, began: datetime, text: str, wait_s: float, error: object
    ) -> Settlement:
        self._events.emit(
            "task.retry_scheduled",
            id=task.id,
            tag=task.tag,
            attempt=task.attempts,
            wait_s=wait_s,
            error=error,
        )
        return Settlement(task, "schedule_retry", began, text, self._after(wait_s))

    def _kept(self, task: DelayTask, result: object) -> str | None:
        """The run is over and its effects are there: a result that can not be kept does not undo them."""
        try:
            return encode_body(result, MAX_RESULT_BYTES)
        except InvalidInputError as error:
            self._events.emit("result.dropped", id=task.id, tag=task.tag, error=str(error))
            return None

    def _after(self, wait_s: float) -> datetime:
        return self._clock.now() + timedelta(seconds=wait_s)

    def _wait_s(self, after: object) -> float:
        return check_wait(after, self._settings.max_delay_s)

    def _text(self, reason: str) -> str:
        return storable(str(reason), self._settings.max_error_bytes)


def _deferred(task: DelayTask, error: str, due: datetime) -> Settlement:
    """A task that this worker cannot run is tried again later, and keeps its due time."""
    return Settlement(task, "give_back", None, error, due, task.due)
