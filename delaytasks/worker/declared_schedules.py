"""Makes the table follow the recurring schedules that the code of this worker declares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delaytasks.core.clock import monotonic

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime

#: How often a worker with declarations compares them with the table.
FOLLOW_S = 60.0


class DeclaredSchedules:
    """Loads the package of recurring schedules only if code declares or has declared one."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._followed_at = float("-inf")

    @property
    def is_due(self) -> bool:
        return monotonic() - self._followed_at >= FOLLOW_S

    def follow(self) -> None:
        is_first = self._followed_at < 0
        if self._runtime.registry.schedules or (is_first and self._are_stored()):
            from delaytasks.recurrence.recurring import follow

            follow(self._runtime)
        self._followed_at = monotonic()

    def _are_stored(self) -> bool:
        return self._runtime.store.due_schedules.has_declared()
