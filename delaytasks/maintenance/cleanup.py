"""Deletes old finished rows and audit entries, and warns before the last table partition ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delaytasks.core.clock import Clock, monotonic
from delaytasks.core.events import Events
from delaytasks.core.settings import Settings
from delaytasks.maintenance.overdue_queues import OnStep

if TYPE_CHECKING:
    from delaytasks.storage.sweep_queries import SweepQueries

#: Rows that one statement purges, and statements in one sweep. Other transactions wait for the
#: locks of a statement only briefly.
PURGE_ROWS, PURGE_STEPS = 500, 20
#: Seconds between two checks of the table's partitions.
PARTITIONS_S = 3600.0
#: Seconds before the end of the last partition at which the log warns.
WARN_BEFORE_S = 2 * 86400.0


class Cleanup:
    def __init__(
        self, settings: Settings, sweeps: SweepQueries, clock: Clock, events: Events
    ) -> None:
        self._age_s = settings.purge_after_s
        self._sweeps = sweeps
        self._clock = clock
        self._events = events
        self._partitions_checked_at = float("-inf")

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

    def check_partitions(self) -> None:
        """Warn before the last partition of the table ends.

        The sweep does not make partitions itself, because its role may not change tables.
        """
        if monotonic() < self._partitions_checked_at + PARTITIONS_S:
            return
        self._partitions_checked_at = monotonic()
        end = self._sweeps.partitions_end()
        if end is not None and (end - self._clock.now()).total_seconds() < WARN_BEFORE_S:
            remedy = "run: delaytasks db partitions maintain"
            self._events.emit("partitions.ending", until=end.isoformat(), remedy=remedy)
