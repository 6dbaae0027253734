"""A clock that a test sets by hand."""

from __future__ import annotations

from datetime import datetime, timedelta

from delaytasks.core.clock import Clock, to_us


class ManualClock(Clock):
    def __init__(self, start: datetime) -> None:
        super().__init__()
        self._now = start

    def now_us(self) -> int:
        return to_us(self._now)

    def advance(self, seconds: float) -> None:
        self._now += timedelta(seconds=seconds)
