"""The entries of tasks that are due soon, which the worker keeps until they are due."""

from __future__ import annotations

from collections.abc import Sequence

from delaytasks.core.clock import Clock
from delaytasks.core.events import Events
from delaytasks.core.interfaces import Entry
from delaytasks.core.settings import Settings
from delaytasks.timers.timing_wheel import SharedWheel

#: Producers and workers may have different horizons for a while.
HORIZON_TOLERANCE_S = 600.0


class NearEntries:
    """Keeps the entries in a timing wheel."""

    def __init__(self, settings: Settings, clock: Clock, events: Events) -> None:
        self._horizon_s = settings.horizon_s
        self._clock = clock
        self._events = events
        self.wheel: SharedWheel[Entry] = SharedWheel(clock)

    def hold(self, entries: Sequence[Entry]) -> list[Entry]:
        """Keep the entries until they are due; return those that are due now.

        After the wheel has closed, all entries are returned. Any thread may call this.
        """
        now = self._clock.now_us()
        if self._horizon_s is not None:
            # No timer arms what is due later: such a message is forged, or very old.
            latest = now + int((2 * self._horizon_s + HORIZON_TOLERANCE_S) * 1e6)
            if any(entry.due_us > latest for entry in entries):
                error = ValueError("an entry is far beyond the horizon")
                self._events.refuse("run", error)
                entries = [entry for entry in entries if entry.due_us <= latest]
        early = [entry for entry in entries if entry.due_us > now]
        if early:
            named = [((entry.id, entry.version), entry.due_us, entry) for entry in early]
            if not self.wheel.add(named):
                return list(entries)
        return [entry for entry in entries if entry.due_us <= now]
