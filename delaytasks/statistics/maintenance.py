"""What the sweep does for the statistics of a database.

To pack rows means to add them to the row of the next longer period: minutes to an hour that has
their counts as parts, and later hours to a day that has hours as parts.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from delaytasks.core.clock import Clock, from_us, monotonic
from delaytasks.core.settings import Settings
from delaytasks.maintenance.overdue_queues import OnStep
from delaytasks.statistics.gauge_queries import GaugeQueries
from delaytasks.statistics.periods import HOUR, HOUR_OF_MINUTES, MINUTE
from delaytasks.statistics.queries import StatisticsTable
from delaytasks.statistics.worker_counts import MINUTE_US
from delaytasks.storage.store import Store

#: The minutes of an hour are packed when the hour has ended this long ago. Counts that are written
#: later are packed later.
MINUTES_SETTLE = timedelta(minutes=5)
#: An hour keeps its minutes for this time, and is then packed into its day.
MINUTES_KEPT = timedelta(days=2)
#: Days are deleted after this time.
DAYS_KEPT = timedelta(days=366)
#: The most hours, and the most days, that one sweep makes.
PACKS_PER_SWEEP = 3
#: Seconds between two purges.
PURGE_S = 3600.0


class StatisticsMaintenance:
    """Writes gauges once a minute, packs minutes and hours, and deletes old days."""

    def __init__(self, settings: Settings, store: Store, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._table = StatisticsTable(store.database, store.schema)
        self._gauges = GaugeQueries(store.database, store.schema)
        self._purged_at = float("-inf")

    def run(self, on_step: OnStep, sweep_s: float) -> None:
        """Do what is due; `sweep_s` is the duration of the sweep so far."""
        self._write_gauges(sweep_s)
        on_step()
        now = self._clock.now()
        bounds = {
            MINUTE: HOUR_OF_MINUTES.start_of(now - MINUTES_SETTLE),
            HOUR: HOUR_OF_MINUTES.start_of(now - MINUTES_KEPT),
        }
        for period, before in bounds.items():
            for _ in range(PACKS_PER_SWEEP):
                if not self._table.pack(period, before):
                    break
                on_step()
        if monotonic() - self._purged_at >= PURGE_S:
            self._table.purge(now - DAYS_KEPT)
            self._purged_at = monotonic()

    def _write_gauges(self, sweep_s: float) -> None:
        start = from_us(int(self._clock.now_us() // MINUTE_US) * MINUTE_US)
        if self._table.has_gauges(start):
            return
        gauges = self._gauges.count(self._settings.grace_s, self._settings.silent_s)
        self._table.write_gauges(start, replace(gauges, sweep_s=sweep_s))
