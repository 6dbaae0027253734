"""Rules for claimed rows that this process does not run: they have expired, or are deferred."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from delaytasks.core.body import NO_NAME, PLAIN, is_encrypted, name_in, names_of
from delaytasks.core.clock import Clock
from delaytasks.core.events import Events
from delaytasks.core.interfaces import Settlement
from delaytasks.core.settings import Settings
from delaytasks.core.task import DelayTask
from delaytasks.core.text import (
    DEFER_MAX_S,
    DEFER_MIN_S,
    NEWER_BODY,
    NO_KEY,
    NO_PROCESSOR,
    NO_TIME_LIMITS,
    defer_until,
    storable,
)
from delaytasks.processors.registry import ProcessorSpec, Registry

#: The reason of a task that was asked to stop in an earlier run, or before its processor began.
CANCELLED_EARLIER = "cancelled while another run of it, or of its chunk, was under way"
#: The longest reason of a deferral that is stored.
MAX_DEFERRAL_BYTES = 4096


class DeferralRules:
    """`keeps_time_limits` is whether this process can keep the time limits of processors."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        events: Events,
        registry: Registry,
        keeps_time_limits: bool,
        is_asked_to_stop: Callable[[int, int], bool],
    ) -> None:
        self._clock = clock
        self._events = events
        self._registry = registry
        self._keeps_time_limits = keeps_time_limits
        self._is_asked_to_stop = is_asked_to_stop
        self._keys = [name for name in names_of(settings.encryption_keys) if name != PLAIN]
        self._readable = {NO_NAME, *self._keys}

    def settlement(self, processor: ProcessorSpec | None, task: DelayTask) -> Settlement | None:
        """Return the settlement of a task that is not run here now, or None if the task can run."""
        if task.cancel_request is not None or self._is_asked_to_stop(task.id, task.version):
            self._events.emit("task.withdrawn", **task.event_fields, reason=CANCELLED_EARLIER)
            return Settlement(task, "expire", error=CANCELLED_EARLIER)
        if processor is None:  # a deploy may bring it
            known = ", ".join(sorted(processor.tag for processor in self._registry)) or "none"
            why = f"{NO_PROCESSOR}{task.tag} (this worker knows: {known}); is its module imported?"
            return self._defer(task, why, "task.no_processor")
        expires_s = processor.expires_s if task.expires_s is None else task.expires_s
        if expires_s is not None and (expired := self._expired(task, expires_s)) is not None:
            return expired
        if self._lacks_key(task):  # some workers get a new key later than others
            key, known = name_in(task.body_json), ", ".join(self._keys) or "none"
            why = f"{NO_KEY}{key} (this worker has: {known}); add it to delaytasks_encryption_keys"
            return self._defer(task, why, "task.no_key", key=key)
        versions = processor.versions
        if versions is not None and versions.is_newer(task.body_version):
            why = f"{NEWER_BODY}{task.tag} (version {task.body_version}, not {versions.version})"
            return self._defer(task, why, "task.newer_body")
        if processor.has_time_limits and not self._keeps_time_limits:
            why = f"{NO_TIME_LIMITS}{task.tag}; let a worker with -P prefork serve the queue "
            return self._defer(task, why + task.queue, "task.no_time_limits")
        return None

    def _expired(self, task: DelayTask, expires_s: float) -> Settlement | None:
        late_s = (self._clock.now() - task.due).total_seconds()
        if late_s <= expires_s:
            return None
        self._events.emit("task.expired", **task.event_fields, late_s=late_s)
        error = f"expired: {late_s:.3f} s late, and worth running for {expires_s:g} s"
        return Settlement(task, "expire", error=error)

    def _lacks_key(self, task: DelayTask) -> bool:
        """Whether another process may be able to decrypt the body.

        A body without a key's name was changed, and so was one that a key of this process cannot
        decrypt. No process can read them, so their tasks run and fail.
        """
        return is_encrypted(task.body_json) and name_in(task.body_json) not in self._readable

    def _defer(self, task: DelayTask, why: str, event: str, **fields: Any) -> Settlement:
        """Let the task run later on a worker that can run it; it keeps its due time.

        It waits for a tenth of the time that it has been overdue, within bounds.
        """
        overdue_s = (self._clock.now() - task.due).total_seconds()
        wait_s = min(max(overdue_s / 10, DEFER_MIN_S), DEFER_MAX_S)
        self._events.emit(event, **task.event_fields, **fields, next_try_s=wait_s)
        next_try = self._clock.after(wait_s)
        return Settlement(
            task,
            "give_back",
            error=defer_until(storable(why, MAX_DEFERRAL_BYTES), next_try),
            expected_time=next_try,
            due_time=task.due,
        )
