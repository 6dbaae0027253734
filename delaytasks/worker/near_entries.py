"""The entries of tasks that are due soon, which the worker keeps until they are due."""

from __future__ import annotations

from collections.abc import Sequence

from delaytasks.core.clock import Clock
from delaytasks.core.events import Events
from delaytasks.core.interfaces import Entry, by_shard
from delaytasks.core.settings import Settings
from delaytasks.timers.timing_wheel import SharedWheel

#: Producers and workers may have different horizons for a while.
HORIZON_TOLERANCE_S = 600.0


class NearEntries:
    """Keeps the entries of all shards in one timing wheel."""

    def __init__(self, settings: Settings, clocks: Sequence[Clock], events: Events) -> None:
        self._horizon_s = settings.horizon_s
        self._clocks = clocks
        self._events = events
        #: The wheel follows the clock of the first shard's database.
        self.wheel: SharedWheel[Entry] = SharedWheel(clocks[0])

    def hold(self, entries: Sequence[Entry]) -> list[Entry]:
        """Keep the entries until they are due; return those that are due now.

        After the wheel has closed, all entries are returned. Any thread may call this.
        """
        due: list[Entry] = []
        for shard, some in by_shard(entries, len(self._clocks)).items():
            due += self._hold_of_shard(shard, some)
        return due

    def _hold_of_shard(self, shard: int, entries: Sequence[Entry]) -> list[Entry]:
        now = self._clocks[shard].now_us()
        if self._horizon_s is not None:
            # No timer arms what is due later: such a message is forged, or very old.
            latest = now + int((2 * self._horizon_s + HORIZON_TOLERANCE_S) * 1e6)
            if any(entry.due_us > latest for entry in entries):
                error = ValueError("an entry is far beyond the horizon")
                self._events.refuse("run", error)
                entries = [entry for entry in entries if entry.due_us <= latest]
        early = [entry for entry in entries if entry.due_us > now]
        if early:
            ahead_us = self._clocks[0].now_us() - now if shard else 0
            named = [((entry.id, entry.version), entry.due_us + ahead_us, entry) for entry in early]
            if not self.wheel.add(named):
                return list(entries)
        return [entry for entry in entries if entry.due_us <= now]
