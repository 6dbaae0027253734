"""The one place that asks what time it is.

The database's clock decides when a task is due. A `Clock` follows it: it measures the database's time
now and then, and counts on with the machine's monotonic clock, so a host whose wall clock is an hour off,
or is stepped while we run, or that slept for a night, makes no difference.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

from delaytasks.core.forks import reset_in_child

UTC = timezone.utc
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
#: After the database did not answer it is asked again this soon.
RETRY_S = 1.0
#: When the host's two clocks have moved apart by more than this, one of them can not be believed.
JUMP_S = 0.5
#: Asks the database what time it is; True if it is to be tried again like any statement.
Measure = Callable[[bool], datetime]


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


class Base(NamedTuple):
    """What three clocks said at one moment: one value, so that no thread reads half of a new one."""

    database_us: int
    monotonic: float
    wall_ns: int


class Clock:
    """The database's time as far as this process knows it.

    `measure` asks the database, and tries again only if it is told to insist. Without it the host's clock is used.
    Nobody waits for a measurement who can go on with the last one: one thread makes it, in passing. Not even that
    where `refreshes_inline` is off, as in a worker's main process, which calls `refresh_if_due` now and then from a
    thread that may wait for the database.
    """

    def __init__(
        self, measure: Measure | None = None, refresh_s: float = 60.0, refreshes_inline: bool = True
    ) -> None:
        self._measure = measure or (lambda _: from_us(time.time_ns() // 1000))
        self._refresh_s = refresh_s
        self.refreshes_inline = refreshes_inline
        self._lock = threading.Lock()
        self._base: Base | None = None
        self._stale_at = self._rests_until = float("-inf")
        #: When somebody last insisted in vain, and what came of it.
        self._insisted_at = float("-inf")
        self._error: Exception | None = None
        #: Seconds that the host's clock is ahead of the database's, when last measured.
        self.offset_s = 0.0
        reset_in_child(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self.refreshes_inline = True  # the parent's thread is not here

    def now_us(self) -> int:
        """Never fails: as long as nothing could be measured it is the host's time. For what is compared and waited
        for, where a wrong answer costs another look at most."""
        if self.refreshes_inline:
            self.refresh_if_due()
        base = self._base
        if base is None:
            return time.time_ns() // 1000
        return base.database_us + int((time.monotonic() - base.monotonic) * 1e6)

    def now(self) -> datetime:
        return from_us(self.now_us())

    def certain_now(self) -> datetime:
        """For what makes a row due: the database's time, or the error that keeps us from knowing it."""
        if self._is_unknown():
            asked_at = time.monotonic()
            with self._lock:
                if self._is_unknown():
                    if self._error is not None and self._insisted_at > asked_at:
                        raise self._error  # it was asked while we waited: threads would fail one after the other
                    self._insist()
        return self.now()

    def forget(self) -> None:
        """Measure again at the next look, because the last answer was found to be wrong."""
        self._stale_at = float("-inf")

    def refresh_if_due(self) -> None:
        """Measures if the last answer is old. Who finds another thread at it goes on with what is known."""
        if not self._is_due() or not self._lock.acquire(blocking=self._base is None):
            return
        try:
            if self._is_due():
                self._refresh(insists=False)
        except Exception:
            pass  # what was learned before is better than the host's clock, and either is good for a moment
        finally:
            self._lock.release()

    def _is_due(self) -> bool:
        at = time.monotonic()
        return at >= self._rests_until and (at >= self._stale_at or self._is_unknown())

    def _is_unknown(self) -> bool:
        """Never measured; or the host slept, and its monotonic clock with it; or its wall clock was set, which can not
        be told apart."""
        base = self._base
        if base is None:
            return True
        return (
            abs((time.time_ns() - base.wall_ns) / 1e9 - (time.monotonic() - base.monotonic))
            > JUMP_S
        )

    def _insist(self) -> None:
        try:
            self._refresh(insists=True)
        except Exception as error:
            self._error, self._insisted_at = error, time.monotonic()
            raise
        self._error = None

    def _refresh(self, insists: bool) -> None:
        try:
            base = self._ask(insists)
        except BaseException:
            self._rests_until = time.monotonic() + RETRY_S
            raise
        self.offset_s = (base.wall_ns / 1e3 - base.database_us) / 1e6
        self._base = base
        self._stale_at = base.monotonic + self._refresh_s

    def _ask(self, insists: bool) -> Base:
        """The best of three: the shorter the round trip, the less the answer can be wrong."""
        best: tuple[float, Base] | None = None
        for _ in range(3):
            before, wall_before = time.monotonic(), time.time_ns()
            told = to_us(self._measure(insists))
            after, wall_after = time.monotonic(), time.time_ns()
            if best is None or after - before < best[0]:
                best = (
                    after - before,
                    Base(told, (before + after) / 2, (wall_before + wall_after) // 2),
                )
        assert best is not None
        return best[1]


class ManualClock(Clock):
    """A clock that tests set by hand."""

    def __init__(self, start: datetime) -> None:
        super().__init__()
        self._now = start

    def now_us(self) -> int:
        return to_us(self._now)

    def advance(self, seconds: float) -> None:
        self._now += timedelta(seconds=seconds)
