"""The clock of a test: the time of the host, moved forward as the test asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Protocol

from delaytasks.core.clock import Clock, Measure, from_us, to_us, wall_ms


class MovesTime(Protocol):
    """The object with which freezegun or time-machine moves the time of the whole process."""

    def move_to(self, target_datetime: datetime) -> object: ...


class SettableTime:
    """The time of one tester.

    It continues with the host's clock, which freezegun and time-machine replace. It is in whole
    milliseconds, because SQLite's clock has no more.
    """

    def __init__(self) -> None:
        self._offset_us = 0
        self._mover: MovesTime | None = None

    def now_us(self) -> int:
        return wall_ms() * 1000 + self._offset_us

    def now(self) -> datetime:
        return from_us(self.now_us())

    def move_with(self, mover: MovesTime | None) -> None:
        self._mover = mover

    def move_to(self, instant: datetime) -> None:
        """Continue at `instant`, rounded up to a millisecond so that what is due then is due."""
        target_us = -(-to_us(instant) // 1000) * 1000
        if self._mover is not None:
            self._offset_us = 0
            self._mover.move_to(from_us(target_us))
        self._offset_us = target_us - wall_ms() * 1000

    @contextmanager
    def moved_to(self, instant: datetime) -> Iterator[None]:
        """Let the time be later for a moment; the time of freezegun or time-machine stays."""
        before = self._offset_us
        self._offset_us = -(-to_us(instant) // 1000) * 1000 - wall_ms() * 1000
        try:
            yield
        finally:
            self._offset_us = before


class SettableClock(Clock):
    """The `Clock` of producers and runners, which reads the time of a tester."""

    def __init__(self, time: SettableTime, measure: Measure | None = None) -> None:
        super().__init__(measure)
        self._time = time

    def now_us(self) -> int:
        return self._time.now_us()

    def certain_now(self) -> datetime:
        return self._time.now()

    def refresh_if_due(self) -> None:
        """Do nothing: the test's time needs no measurement."""

    @property
    def is_due(self) -> bool:
        return False
