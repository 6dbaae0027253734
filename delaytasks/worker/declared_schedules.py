"""Makes the table follow the recurring schedules that the code of this worker declares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delaytasks.core.clock import monotonic

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from delaytasks.core.events import Events
    from delaytasks.processors.registry import Registry
    from delaytasks.recurrence.operations import RecurringOperations
    from delaytasks.routing.shard import Shard

#: How often a worker with declarations compares them with the table.
FOLLOW_S = 60.0


class DeclaredSchedules:
    """Loads the package of recurring schedules only if code declares or has declared one."""

    def __init__(
        self,
        shards: Sequence[Shard],
        registry: Registry,
        recurring: Callable[[], RecurringOperations],
        celery_tasks: Container[str],
        events: Events,
    ) -> None:
        """`recurring` imports the package with its first call."""
        self._shards = shards
        self._registry = registry
        self._recurring = recurring
        self._celery_tasks = celery_tasks
        self._events = events
        self._followed_at = float("-inf")

    @property
    def is_due(self) -> bool:
        return monotonic() - self._followed_at >= FOLLOW_S

    def follow(self) -> None:
        is_first = self._followed_at < 0
        if self._registry.schedules or (is_first and self._are_stored()):
            from delaytasks.recurrence.declarations import follow

            follow(self._recurring(), self._registry, self._celery_tasks, self._events)
        self._followed_at = monotonic()

    def _are_stored(self) -> bool:
        return any(shard.store.due_schedules.has_declared() for shard in self._shards)
