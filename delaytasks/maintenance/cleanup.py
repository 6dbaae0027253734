"""Deletes old finished rows and audit entries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delaytasks.core.events import Events
from delaytasks.core.settings import Settings
from delaytasks.maintenance.overdue_queues import OnStep

if TYPE_CHECKING:
    from delaytasks.storage.sweep_queries import SweepQueries

#: Rows that one statement purges, and statements in one sweep. Other transactions wait for the
#: locks of a statement only briefly.
PURGE_ROWS, PURGE_STEPS = 500, 20


class Cleanup:
    def __init__(self, settings: Settings, sweeps: SweepQueries, events: Events) -> None:
        self._age_s = settings.purge_after_s
        self._sweeps = sweeps
        self._events = events

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
