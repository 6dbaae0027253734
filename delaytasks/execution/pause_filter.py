"""Holds the claimed rows of paused tags and queues before they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from delaytasks.core.errors import StoreError
from delaytasks.core.events import Events
from delaytasks.core.interfaces import Settlement
from delaytasks.core.task import DelayTask
from delaytasks.execution.policy_cache import PolicyCache

if TYPE_CHECKING:
    from delaytasks.storage.paused_rows import PausedRows


class PauseFilter:
    def __init__(self, policies: PolicyCache, paused_rows: PausedRows, events: Events) -> None:
        self._policies = policies
        self._paused_rows = paused_rows
        self._events = events

    def hold_paused(
        self, tasks: Sequence[DelayTask]
    ) -> tuple[Sequence[DelayTask], Sequence[Settlement]]:
        """Hold the paused tasks.

        Return the tasks to run, and settlements of paused tasks that could not be held.
        """
        policies = self._policies.current()
        if not policies.has_pauses:
            return tasks, ()
        paused = [task for task in tasks if policies.pauses(task.tag, task.queue)]
        if not paused:
            return tasks, ()
        try:
            held = self._paused_rows.hold_claimed(paused)
        except StoreError as error:
            self._events.emit("chunk.failed", error=str(error), cause=error)
            allowed = [task for task in tasks if not policies.pauses(task.tag, task.queue)]
            return allowed, [Settlement(task, "give_back") for task in paused]
        if held:
            self._events.emit("task.held", count=len(held))
        # A paused task that was not held has been resumed since the policies were read, so it runs.
        return [task for task in tasks if task.id not in held], ()
