"""The one place that asks what time it is.

The database's clock decides when a task is due. A `Clock` follows it: it measures the database's time
now and then, and counts on with the machine's monotonic clock, so a host whose wall clock is an hour off,
or is stepped while we run, makes no difference.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone

from delaytasks.core.forks import reset_in_child

UTC = timezone.utc
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
#: After the database did not answer it is asked again this soon.
RETRY_S = 1.0


def monotonic() -> float:
    return time.monotonic()


def wall_ms() -> int:
    """Milliseconds since 1970 by this host's clock: for ids and file names, never for deadlines."""
    return time.time_ns() // 1_000_000


def to_us(instant: datetime) -> int:
    """Microseconds since 1970."""
    return (instant - _EPOCH) // _MICROSECOND


def from_us(microseconds: int) -> datetime:
    return _EPOCH + timedelta(microseconds=microseconds)


class Clock:
    """The database's time as far as this process knows it.

    `measure` asks the database once. Without it, or while it fails, the host's own clock is used.
    """

    def __init__(self, measure: Callable[[], datetime] | None = None, refresh_s: float = 60.0) -> None:
        self._measure = measure
        self._refresh_s = refresh_s
        self._lock = threading.Lock()
        #: The database's time and ours at one moment: one value, so that no thread reads half of a new one.
        self._base = (0, -1e9)
        self._measured_at = -1e9
        #: Seconds that the host's clock is ahead of the database's, when last measured.
        self.offset_s = 0.0
        reset_in_child(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def now_us(self) -> int:
        at = time.monotonic()
        if at - self._measured_at > self._refresh_s:
            self._refresh()
            at = time.monotonic()
        base_us, base_at = self._base
        return base_us + int((at - base_at) * 1e6)

    def now(self) -> datetime:
        return from_us(self.now_us())

    def forget(self) -> None:
        """Measure again at the next look, because the last answer was found to be wrong."""
        self._measured_at = -1e9

    def _refresh(self) -> None:
        with self._lock:
            if time.monotonic() - self._measured_at <= self._refresh_s:
                return
            base_us, base_at = time.time_ns() // 1000, time.monotonic()
            measured_at = base_at
            if self._measure is not None:
                try:
                    base_us, base_at = self._ask(self._measure)
                except Exception:
                    # The database is away: what was learned before is better than the host's wall clock, and either
                    # is good for a moment only.
                    measured_at -= self._refresh_s - RETRY_S
                    if self._base[0]:
                        base_us, base_at = self._base
            self.offset_s = (time.time_ns() / 1e3 - (base_us + (time.monotonic() - base_at) * 1e6)) / 1e6
            self._base = base_us, base_at
            self._measured_at = measured_at

    @staticmethod
    def _ask(measure: Callable[[], datetime]) -> tuple[int, float]:
        """The best of three: the shorter the round trip, the less the answer can be wrong."""
        best: tuple[float, int, float] | None = None
        for _ in range(3):
            before = time.monotonic()
            told = to_us(measure())
            after = time.monotonic()
            if best is None or after - before < best[0]:
                best = (after - before, told, (before + after) / 2)
        assert best is not None
        return best[1], best[2]


class ManualClock(Clock):
    """A clock that tests set by hand."""

    def __init__(self, start: datetime) -> None:
        super().__init__()
        self._now = start

    def now_us(self) -> int:
        return to_us(self._now)

    def advance(self, seconds: float) -> None:
        self._now += timedelta(seconds=seconds)
