"""Makes the table follow the recurring schedules that the code of this worker declares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delaytasks.core.clock import monotonic

if TYPE_CHECKING:
    from delaytasks.wiring import Wiring

#: How often a worker with declarations compares them with the table.
FOLLOW_S = 60.0


class DeclaredSchedules:
    """Loads the package of recurring schedules only if code declares or has declared one."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._followed_at = float("-inf")

    @property
    def is_due(self) -> bool:
        return monotonic() - self._followed_at >= FOLLOW_S

    def follow(self) -> None:
        is_first, declared = self._followed_at < 0, self._wiring.registry.schedules
        if declared or (is_first and self._are_stored()):
            from delaytasks.recurrence.declarations import follow

            wiring = self._wiring
            follow(wiring.recurring(), wiring.registry, wiring.celery.tasks, wiring.events)
        self._followed_at = monotonic()

    def _are_stored(self) -> bool:
        return any(shard.store.due_schedules.has_declared() for shard in self._wiring.shards)
