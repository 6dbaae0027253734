"""The stage of the sweep for statistics."""

from __future__ import annotations

from collections.abc import Callable

from delaytasks.core.clock import monotonic
from delaytasks.maintenance.overdue_queues import OnStep

#: The time between two turns of the stage in one process. Another process may take its turn, too.
STATISTICS_S = 20.0
#: Gets the duration of the sweep so far, in seconds.
Maintain = Callable[[OnStep, float], None]


class StatisticsStage:
    """Counts gauges, and rolls old minutes up. `load` imports the package of statistics."""

    def __init__(self, load: Callable[[], Maintain]) -> None:
        self._load = load
        self._turned_at = float("-inf")

    def run(self, on_step: OnStep, began: float) -> None:
        """Do what is due. The sweep began at `began`, by the monotonic clock."""
        now = monotonic()
        if now - self._turned_at >= STATISTICS_S:
            self._turned_at = now
            self._load()(on_step, now - began)
