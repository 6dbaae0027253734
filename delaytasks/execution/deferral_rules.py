"""Rules for claimed rows that this process does not run: they have expired, or are deferred."""

from __future__ import annotations

from datetime import datetime, timedelta

from delaytasks.core.clock import Clock
from delaytasks.core.encryption import NO_NAME, PLAIN, is_encrypted, name_in, names_of
from delaytasks.core.events import Events
from delaytasks.core.interfaces import Settlement
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
)
from delaytasks.processors.registry import Processor, Registry


class DeferralRules:
    """`keeps_time_limits` is whether this process can keep the time limits of processors."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        events: Events,
        registry: Registry,
        keeps_time_limits: bool,
    ) -> None:
        self._clock = clock
        self._events = events
        self._registry = registry
        self._keeps_time_limits = keeps_time_limits
        self._keys = [name for name in names_of(settings.encryption_keys) if name != PLAIN]
        self._readable = {NO_NAME, *self._keys}

    def settlement(self, processor: Processor | None, task: DelayTask) -> Settlement | None:
        """Return the settlement of a task that is not run here now, or None if the task can run."""
        if processor is None:
            return self._no_processor(task)
        expires_s = processor.expires_s if task.expires_s is None else task.expires_s
        if expires_s is not None and (expired := self._expired(task, expires_s)) is not None:
            return expired
        if self._lacks_key(task):
            return self._no_key(task)
        if processor.has_time_limits and not self._keeps_time_limits:
            return self._no_time_limits(task)
        return None

    def _expired(self, task: DelayTask, expires_s: float) -> Settlement | None:
        late_s = (self._clock.now() - task.due).total_seconds()
        if late_s <= expires_s:
            return None
        self._events.emit("task.expired", id=task.id, tag=task.tag, late_s=late_s)
        return Settlement(
            task,
            "expire",
            error=f"expired: {late_s:.3f} s late, and worth running for {expires_s:g} s",
        )

    def _no_processor(self, task: DelayTask) -> Settlement:
        """Defer the task, because a deploy may bring its processor."""
        known = ", ".join(sorted(processor.tag for processor in self._registry)) or "none"
        wait_s = self._wait_s(task)
        due = self._after(wait_s)
        why = f"{NO_PROCESSOR}{task.tag} (this worker knows: {known}); is its module imported?"
        error = defer_until(storable(why, 4096), due)
        self._events.emit("task.no_processor", id=task.id, tag=task.tag, next_try_s=wait_s)
        return _deferred(task, error, due)

    def _lacks_key(self, task: DelayTask) -> bool:
        """Whether another process may be able to decrypt the body.

        A body without a key's name was changed, and so was one that a key of this process cannot
        decrypt. No process can read them, so their tasks run and fail.
        """
        return is_encrypted(task.body_json) and name_in(task.body_json) not in self._readable

    def _no_key(self, task: DelayTask) -> Settlement:
        """Defer the task, because some workers get a new key later than others."""
        name, known = name_in(task.body_json), ", ".join(self._keys) or "none"
        wait_s = self._wait_s(task)
        due = self._after(wait_s)
        why = f"{NO_KEY}{name} (this worker has: {known}); add it to delaytasks_encryption_keys"
        self._events.emit("task.no_key", id=task.id, tag=task.tag, key=name, next_try_s=wait_s)
        return _deferred(task, defer_until(why, due), due)

    def _no_time_limits(self, task: DelayTask) -> Settlement:
        """Defer the task, because another worker may be able to keep its time limits."""
        error = (
            f"{NO_TIME_LIMITS}{task.tag}; let a worker with -P prefork serve the queue {task.queue}"
        )
        wait_s = self._wait_s(task)
        due = self._after(wait_s)
        self._events.emit("task.no_time_limits", id=task.id, tag=task.tag, next_try_s=wait_s)
        return _deferred(task, defer_until(error, due), due)

    def _wait_s(self, task: DelayTask) -> float:
        """Return a tenth of the time that the task has been overdue, within bounds."""
        now = self._clock.now()
        overdue_s = (now - task.due).total_seconds()
        return min(max(overdue_s / 10, DEFER_MIN_S), DEFER_MAX_S)

    def _after(self, wait_s: float) -> datetime:
        return self._clock.now() + timedelta(seconds=wait_s)


def _deferred(task: DelayTask, error: str, due: datetime) -> Settlement:
    """Return the settlement that keeps the due time and runs the task again at `due`."""
    return Settlement(task, "give_back", None, error, due, task.due)
