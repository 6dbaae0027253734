"""Deletes old finished rows, audit entries and statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from delaytasks.core.clock import monotonic
from delaytasks.core.events import Events
from delaytasks.core.settings import Settings
from delaytasks.maintenance.overdue_queues import OnStep

if TYPE_CHECKING:
    from delaytasks.storage.sweep_queries import SweepQueries

#: Rows that one statement purges, and statements in one sweep. Other transactions wait for the
#: locks of a statement only briefly.
PURGE_ROWS, PURGE_STEPS = 500, 20
#: The time between two purges of the statistics by one process.
STATISTICS_S = 3600.0


class Cleanup:
    def __init__(
        self,
        settings: Settings,
        sweeps: SweepQueries,
        events: Events,
        purge_statistics: Callable[[], object] | None,
    ) -> None:
        self._age_s = settings.purge_after_s
        self._sweeps = sweeps
        self._events = events
        self._purge_statistics = purge_statistics
        self._purged_at = float("-inf")

    def purge_finished(self, on_step: OnStep) -> None:
        if self._age_s is None:
            return
        for _ in range(PURGE_STEPS):
            on_step()
            purged = self._sweeps.purge(self._age_s, PURGE_ROWS)
            if purged:
                self._events.emit("task.purged", count=purged)
            if purged < PURGE_ROWS:
                return

    def purge_audit(self) -> None:
        if self._age_s is not None:
            self._sweeps.purge_audit(self._age_s)

    def purge_statistics(self) -> None:
        now = monotonic()
        if self._purge_statistics is not None and now - self._purged_at >= STATISTICS_S:
            self._purged_at = now
            self._purge_statistics()
