"""A hashed timing wheel: slots of one tick each, and in each slot the entries of every round.

Adding, cancelling and moving an entry costs the same however many are held, and so does a tick.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterable
from heapq import nsmallest
from itertools import chain, islice
from typing import Generic, TypeVar

from delaytasks.core.clock import Clock, monotonic
from delaytasks.core.events import Events
from delaytasks.core.loop import Loop

E = TypeVar("E")

SLOTS = 8192
TICK_US = 250
#: What falls due one after the other is brought out together, once in so long: each turn costs a claim and a settling.
GATHER_S = 0.005
#: Not so after a rest: what falls due now and then comes out at once. So long a rest allows `LONE_S / GATHER_S` turns.
LONE_S = 0.05


class TimingWheel(Generic[E]):
    """Entries by name, each due at a tick. It has no clock: `advance` says what tick it is.

    Tick 10,000 of a wheel of 8,192 slots is round 1 of slot 1808. What is due later in the same slot belongs to later
    rounds and is not looked at, so a tick finds all that is due, and nothing else, in one place. Not safe for threads:
    `WheelThread` is.
    """

    def __init__(self, slots: int = SLOTS, now: int = 0) -> None:
        self._slots: list[dict[int, dict[Hashable, E]]] = [{} for _ in range(slots)]
        self._size = slots
        self._ticks: dict[Hashable, int] = {}
        self._now = now

    def __len__(self) -> int:
        return len(self._ticks)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._ticks

    def add(self, name: Hashable, tick: int, entry: E) -> int:
        """Holds `entry` until `tick`; one that is over already comes out at the next. Moves it if it is held."""
        if name in self._ticks:
            self.cancel(name)
        if tick <= self._now:
            tick = self._now + 1
        self._ticks[name] = tick
        rounds, round = self._slots[tick % self._size], tick // self._size
        held = rounds.get(round)
        if held is None:
            rounds[round] = {name: entry}
        else:
            held[name] = entry
        return tick

    def go_back(self, tick: int) -> None:
        """When the clock did: else what is added now would wait until it is again as late as it was."""
        self._now = min(self._now, tick)

    def cancel(self, name: Hashable) -> E | None:
        """The entry, if it was held."""
        tick = self._ticks.pop(name, None)
        if tick is None:
            return None
        rounds, round = self._slots[tick % self._size], tick // self._size
        held = rounds[round]
        entry = held.pop(name)
        if not held:
            del rounds[round]
        return entry

    def advance(self, tick: int) -> list[E]:
        """All entries due up to `tick`, in the order of their ticks."""
        passed: Iterable[int] = range(self._now + 1, tick + 1)
        if (
            tick - self._now >= self._size
        ):  # the machine slept: each slot is looked into once, not once a round
            passed = sorted(at for at in self._held_ticks() if at <= tick)
        self._now = tick
        due: list[E] = []
        for at in passed if self._ticks else ():
            held = self._slots[at % self._size].pop(at // self._size, None)
            if held is not None:
                for name in held:
                    del self._ticks[name]
                due.extend(held.values())
        return due

    def next_tick(self) -> int | None:
        """When to look again: the next entry's tick, at most one turn of the wheel ahead; None when empty."""
        if not self._ticks:
            return None
        latest = self._now + self._size
        if (
            len(self._ticks) < self._size // 16
        ):  # to compare so few is quicker than to look into each slot
            return min(latest, *self._ticks.values())
        coming = range(self._now + 1, latest)
        return next(
            (at for at in coming if at // self._size in self._slots[at % self._size]), latest
        )

    def soonest(self, count: int) -> list[E]:
        """The first `count` entries in the order of their ticks, which stay held."""
        ticks = sorted(set(nsmallest(count, self._ticks.values())))
        found = [self._slots[at % self._size][at // self._size].values() for at in ticks]
        return list(islice(chain.from_iterable(found), count))

    def take_all(self) -> list[E]:
        entries = [
            entry for rounds in self._slots for held in rounds.values() for entry in held.values()
        ]
        for rounds in self._slots:
            rounds.clear()
        self._ticks.clear()
        return entries

    def _held_ticks(self) -> Iterable[int]:
        return (
            round * self._size + slot for slot, rounds in enumerate(self._slots) for round in rounds
        )


class WheelThread(Generic[E]):
    """Turns a wheel: one loop that rests until the next entry is due, and for good when none is held."""

    def __init__(
        self,
        clock: Clock,
        on_due: Callable[[list[E]], None],
        events: Events,
        stuck_s: float = math.inf,
    ) -> None:
        self._clock = clock
        self._on_due = on_due
        self._lock = threading.Lock()
        self._wheel: TimingWheel[E] = TimingWheel(now=self._tick())
        self._wakes_at: int | None = None
        #: It may turn again then. As far as that is past, turns are saved up: those of `LONE_S` at most.
        self._rests_until = 0.0
        #: What it holds outlives a thread of it that dies.
        self.loop = Loop("wheel", self._turn, events, stuck_s)

    def __len__(self) -> int:
        return len(self._wheel)

    @property
    def late_s(self) -> float:
        """How long the next entry has waited in vain."""
        wakes_at = self._wakes_at
        return 0.0 if wakes_at is None else max(self._clock.now_us() - wakes_at * TICK_US, 0) / 1e6

    def stop(self) -> list[E]:
        """Waits for the thread, and returns what is still held."""
        self.loop.stop()
        with self._lock:
            self._wakes_at = None  # nothing is late any more
            return self._wheel.take_all()

    def add(self, entries: Iterable[tuple[Hashable, int, E]]) -> None:
        """(name, due in microseconds, entry) each."""
        with self._lock:
            self._wheel.go_back(self._tick())
            for name, due_us, entry in entries:
                # Rounded up: a tick comes out when it has begun, and that must not be before the due time.
                tick = self._wheel.add(name, -(-due_us // TICK_US), entry)
                if self._wakes_at is None or tick < self._wakes_at:
                    self._wakes_at = tick
                    self.loop.wake()

    def soonest(self, count: int) -> list[E]:
        """The first `count` entries in the order of their due times, which stay held."""
        with self._lock:
            return self._wheel.soonest(count)

    def _tick(self) -> int:
        return self._clock.now_us() // TICK_US

    def _turn(self) -> float | None:
        rests_s = self._rests_until - monotonic()
        if rests_s > 0:
            return rests_s
        with self._lock:
            due = self._wheel.advance(self._tick())
        if due:
            self._rests_until = max(self._rests_until, monotonic() - LONE_S) + GATHER_S
            self._on_due(due)  # what it fails with, or is stuck in, is found by the sweep
        with self._lock:
            self._wakes_at = self._wheel.next_tick()
            if self._wakes_at is None:
                return None
            return max(
                (self._wakes_at * TICK_US - self._clock.now_us()) / 1e6,
                self._rests_until - monotonic(),
                0,
            )
