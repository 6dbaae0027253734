"""Between claim and run: which of the claimed rows the policies let begin."""

from __future__ import annotations

from collections.abc import Sequence

from delaytasks.core.errors import StoreError
from delaytasks.core.events import Events
from delaytasks.core.interfaces import HoldStore, Settlement
from delaytasks.core.task import DelayTask
from delaytasks.execution.policy_cache import PolicyCache


class Admission:
    def __init__(self, policies: PolicyCache, holds: HoldStore, events: Events) -> None:
        self.policies = policies
        self._holds = holds
        self._events = events

    def admit(self, tasks: Sequence[DelayTask]) -> tuple[Sequence[DelayTask], Sequence[Settlement]]:
        """Those that may run, and the ends of those that may not. What is paused is HELD from now on."""
        policies = self.policies.current()
        if not policies.has_pauses:
            return tasks, ()
        paused = [task for task in tasks if policies.pauses(task.tag, task.queue)]
        if not paused:
            return tasks, ()
        try:
            held = self._holds.hold_claimed(paused)
        except StoreError as error:
            self._events.emit("chunk.failed", error=str(error), cause=error)
            allowed = [task for task in tasks if not policies.pauses(task.tag, task.queue)]
            return allowed, [Settlement(task, "give_back") for task in paused]
        if held:
            self._events.emit("task.held", count=len(held))
        # What is not held was resumed a moment ago.
        return [task for task in tasks if task.id not in held], ()
