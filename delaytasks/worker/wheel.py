"""A hashed timing wheel: each slot is one tick, and has the entries of all rounds.

The costs of a tick, and of adding an entry, do not depend on the number of entries. Nothing is
cancelled or moved here: a task that is cancelled or moved gets another version, and the claim
refuses the entry of the earlier one. A touched row keeps its version. Its entry is early then, and
comes back with the new due time, unless this is far away.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from delaytasks.events import Events
from delaytasks.loops import Loop
from delaytasks.model.clock import Clock, monotonic

E = TypeVar("E")

SLOTS = 8192
TICK_US = 250
#: The average time between two turns. Entries that are due in between are processed together, since
#: each turn costs a claim and a settlement.
TURN_INTERVAL_S = 0.005
#: After a pause, turns that were not used follow each other immediately, so that a single entry is
#: not late: `SAVED_TURNS_S / TURN_INTERVAL_S` turns.
SAVED_TURNS_S = 0.05


class TimingWheel(Generic[E]):
    """Entries by name, each due at a tick. The wheel has no clock: `advance` sets the tick.

    In a wheel of 8,192 slots, tick 10,000 is round 1 of slot 1808. Later entries of the same slot
    belong to later rounds, so that a tick reads only the entries that are due. Not thread-safe,
    unlike `Wheel`.
    """

    def __init__(self, slots: int = SLOTS, now: int = 0) -> None:
        self._slots: list[dict[int, dict[Hashable, E]]] = [{} for _ in range(slots)]
        self._size = slots
        self._ticks: dict[Hashable, int] = {}
        self._now = now

    def __len__(self) -> int:
        return len(self._ticks)

    def add(self, name: Hashable, tick: int, entry: E) -> int:
        """Keep `entry` until `tick`, or until the next tick if `tick` has passed, and return that
        tick.

        An entry of this name that is kept already stays as it is.
        """
        known = self._ticks.get(name)
        if known is not None:
            return known
        tick = max(tick, self._now + 1)
        self._ticks[name] = tick
        self._slots[tick % self._size].setdefault(tick // self._size, {})[name] = entry
        return tick

    def go_back(self, tick: int) -> None:
        """Set the wheel back, as the clock was. Otherwise new entries would wait until the old
        time.
        """
        self._now = min(self._now, tick)

    def advance(self, tick: int) -> list[E]:
        """Remove and return the entries that are due up to `tick`, in the order of their ticks."""
        passed: Iterable[int] = range(self._now + 1, tick + 1)
        if tick - self._now >= self._size:
            # The machine slept: read each entry once, instead of each slot once a round.
            passed = sorted({at for at in self._ticks.values() if at <= tick})
        self._now = tick
        due: list[E] = []
        for at in passed if self._ticks else ():
            kept = self._slots[at % self._size].pop(at // self._size, None)
            if kept is not None:
                for name in kept:
                    del self._ticks[name]
                due.extend(kept.values())
        return due

    def next_tick(self) -> int | None:
        """Return the next entry's tick, at most one round ahead; None if the wheel is empty."""
        if not self._ticks:
            return None
        latest = self._now + self._size
        if len(self._ticks) < self._size // 16:
            # Comparing a few ticks is quicker than reading each slot.
            return min(latest, *self._ticks.values())
        coming = range(self._now + 1, latest)
        return next(
            (at for at in coming if at // self._size in self._slots[at % self._size]), latest
        )


class Wheel(Generic[E]):
    """A timing wheel that several threads use, and the loop that takes what is due from it.

    The loop sleeps until the next entry is due. `on_due` gets the entries.
    """

    def __init__(self, clock: Clock, on_due: Callable[[list[E]], object], events: Events) -> None:
        self._clock = clock
        self._on_due = on_due
        self._lock = threading.Lock()
        self._wheel: TimingWheel[E] = TimingWheel(now=self._tick())
        self._next_tick: int | None = None
        self._is_open = True
        #: The time of the next turn. If it has passed, it has saved turns, up to those of
        #: `SAVED_TURNS_S`.
        self._rests_until = 0.0
        self.loop = Loop("wheel", self._turn, events)

    def __len__(self) -> int:
        return len(self._wheel)

    @property
    def late_s(self) -> float:
        """The time since the next entry should have been taken."""
        tick = self._next_tick
        return 0.0 if tick is None else max(self._clock.now_us() - tick * TICK_US, 0) / 1e6

    def add(self, entries: Iterable[tuple[Hashable, int, E]]) -> bool:
        """Add entries, each as (name, due time in microseconds, entry).

        Return False, and add none of them, after `stop`.
        """
        with self._lock:
            if not self._is_open:
                return False
            self._wheel.go_back(self._tick())
            for name, due_us, entry in entries:
                # Rounded up, since a tick is processed at its beginning, and no entry may be early.
                tick = self._wheel.add(name, -(-due_us // TICK_US), entry)
                if self._next_tick is None or tick < self._next_tick:
                    self._next_tick = tick
                    self.loop.wake()
        return True

    def stop(self) -> list[E]:
        """Wait for the thread, return the entries that the wheel still kept, and add no more."""
        self.loop.stop()
        with self._lock:
            self._is_open = False
            self._next_tick = None  # no entry is late now
            return self._wheel.advance(sys.maxsize)

    def _turn(self) -> float | None:
        rests_s = self._rests_until - monotonic()
        if rests_s > 0:
            return rests_s
        with self._lock:
            due = self._wheel.advance(self._tick())
        if due:
            self._rests_until = (
                max(self._rests_until, monotonic() - SAVED_TURNS_S) + TURN_INTERVAL_S
            )
            self._on_due(due)  # if it fails, the sweep finds the rows
        with self._lock:
            self._next_tick = next_tick = self._wheel.next_tick()
        if next_tick is None:
            return None
        next_in_s = (next_tick * TICK_US - self._clock.now_us()) / 1e6
        return max(next_in_s, self._rests_until - monotonic(), 0)

    def _tick(self) -> int:
        return self._clock.now_us() // TICK_US
