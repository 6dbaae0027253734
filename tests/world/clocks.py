"""A clock that follows a database, a timing wheel, and the wrong clocks that they meet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

from delaytasks.events import Events
from delaytasks.model import clock as clock_module
from delaytasks.model.clock import Clock, from_us, to_us
from delaytasks.worker.wheel import TICK_US, Wheel

__all__ = ["TICK_US", "Clock", "Collector", "Database", "Host", "SetClock", "from_us"]

NOON = datetime(2026, 1, 2, 12, tzinfo=timezone.utc)
START_US = to_us(datetime(2030, 1, 1, tzinfo=timezone.utc))


class Host:
    """The two clocks of a machine. The wall clock may be wrong and may be set."""

    def __init__(self, monkeypatch: Any) -> None:
        self.at = 1000.0
        self.wall = 1_700_000_000.0
        self.askers: set[int] = set()
        monkeypatch.setattr(clock_module, "time", self)

    def monotonic(self) -> float:
        self.askers.add(threading.get_ident())
        return self.at

    def time_ns(self) -> int:
        return int(self.wall * 1e9)

    def advance(self, seconds: float) -> None:
        self.at += seconds
        self.wall += seconds

    @property
    def right(self) -> datetime:
        """The time of the database."""
        return NOON + timedelta(seconds=self.at - 1000)


class Database:
    """A database with a correct clock, whose answers take some time."""

    def __init__(self, host: Host) -> None:
        self.host, self.asked, self.is_up = host, 0, True
        self.meanwhile: Callable[[], object] = lambda: None
        self.trips = [0.0]
        # The database's clock gained this time while the host slept.
        self.ahead_s = 0.0

    def clock(self, refreshes_inline: bool = True) -> Clock:
        """Return a clock that asks this database every 60 seconds."""
        clock = Clock(self._now)
        clock.refreshes_inline = refreshes_inline
        return clock

    def _now(self, insists: bool = False) -> datetime:
        self.asked += 1
        self.meanwhile()
        if not self.is_up:
            raise ConnectionError("down")
        trip = self.trips[self.asked % len(self.trips)]
        self.host.advance(trip / 2)
        told = self.host.right + timedelta(seconds=self.ahead_s)
        self.host.advance(trip / 2)
        return told


class SetClock(Clock):
    """A clock that a test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.us = START_US

    def now_us(self) -> int:
        return self.us


class Collector:
    """A timing wheel with its thread, and the names of the entries that have become due."""

    def __init__(self, clock: Clock) -> None:
        self.names: list[str] = []
        self._clock = clock
        self._wheel: Wheel[str] = Wheel(clock, self.names.extend, Events())
        self.close = self._wheel.stop
        self._wheel.loop.start()

    def add(self, name: str, in_us: int) -> int:
        due_us = self._clock.now_us() + in_us
        self._wheel.add([(name, due_us, name)])
        return due_us

    @property
    def sleeps(self) -> bool:
        """Whether the thread sleeps until the next entry is due."""
        return self._wheel._next_tick is not None
