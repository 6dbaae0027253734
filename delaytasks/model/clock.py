"""Reads the time for all others, and makes the ids of tasks, which contain it.

The database's clock decides when a task is due. A `Clock` follows it: it measures the database's
time once in a while, and continues with the machine's monotonic clock in between. A wall clock that
is wrong, that is set, or that stands still while the host sleeps therefore makes no difference.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple

# -- forks ----------------------------------------------------------------------------------------

# Reset objects in forked children, which must not use sockets, locks and threads of the parent.


_watched: weakref.WeakSet[Any] = weakref.WeakSet()


def fork_safe(thing: Any) -> None:
    """Call `thing.after_fork()` now, and in every child that is forked while `thing` exists."""
    thing.after_fork()
    _watched.add(thing)


def _reset_all() -> None:
    for thing in list(_watched):
        thing.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)


UTC = timezone.utc
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
EARLIEST, LATEST = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
AN_HOUR = timedelta(hours=1)
_MICROSECOND = timedelta(microseconds=1)
#: Seconds after which a measurement is old.
REFRESH_S = 60.0
#: Seconds after which the clock asks a database again that did not answer.
MEASURE_RETRY_S = 1.0
#: Clock tolerance: if the wall clock and the monotonic clock of the host have moved apart by more
#: seconds than this, one of them is wrong, and the clock measures again.
JUMP_S = 0.5
#: Returns the database's time. With True, a failed statement is tried again.
Measure = Callable[[bool], datetime]


#: Linux's monotonic clock that also counts the time while the host is suspended; None elsewhere.
_BOOTTIME: int | None = getattr(time, "CLOCK_BOOTTIME", None)


def monotonic() -> float:
    """Return the seconds of a clock that is never set.

    While a host is suspended, its leases end by the database's clock. Therefore this clock goes on,
    and afterwards the worker finds itself as if it had been frozen. `Clock` uses `time.monotonic`,
    which stands still meanwhile: compared with the wall clock, it shows that the host slept.
    """
    return time.monotonic() if _BOOTTIME is None else time.clock_gettime(_BOOTTIME)


def wall_ms() -> int:
    """Return milliseconds since 1970 by the host's clock, for ids and file names only."""
    return time.time_ns() // 1_000_000


#: When this process first imported delaytasks, by the host's clock: tests refuse older tasks.
STARTED_MS = wall_ms()


def to_us(instant: datetime) -> int:
    """Return microseconds since 1970."""
    return (instant - EPOCH) // _MICROSECOND


def hour_of(at: datetime) -> datetime:
    """Return the beginning of the hour of an instant."""
    return at.replace(minute=0, second=0, microsecond=0)


def from_us(microseconds: int) -> datetime:
    return EPOCH + _MICROSECOND * microseconds  # takes half of the time of timedelta(microseconds=)


def json_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields as JSON values: their instants as ISO 8601 texts."""
    return {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in fields.items()
    }


class Base(NamedTuple):
    """The times of three clocks at one moment, in one value that threads read atomically."""

    database_us: int
    monotonic_s: float
    wall_ns: int


class Clock:
    """The database's time as far as this process knows it.

    If the last measurement is old, one thread measures; the others continue with it.

    Parameters
    ----------
    measure
        Asks the database for its time. Without it, the host's clock is used.
    """

    def __init__(self, measure: Measure | None = None) -> None:
        self._measure = measure or (lambda _: from_us(time.time_ns() // 1000))
        self._base: Base | None = None
        self._stale_at = self._rests_until = float("-inf")
        #: Seconds by which the host's clock was ahead of the database's at the last measurement.
        self.offset_s = 0.0
        fork_safe(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        #: Whether a call of `now` measures if the last measurement is old. A worker's main process
        #: must not wait for the database, and calls `refresh_if_due` in another thread instead. A
        #: forked child does not have this thread.
        self.refreshes_inline = True

    def now_us(self) -> int:
        """Return the time in microseconds; the host's time until a measurement succeeds.

        It never fails. Use it for comparisons and waits, where a wrong time costs one more check.
        """
        if self.refreshes_inline:
            self.refresh_if_due()
        base = self._base
        if base is None:
            return time.time_ns() // 1000
        return base.database_us + int((time.monotonic() - base.monotonic_s) * 1e6)

    def now(self) -> datetime:
        return from_us(self.now_us())

    def after(self, seconds: float) -> datetime:
        return self.now() + timedelta(seconds=seconds)

    def certain_now(self) -> datetime:
        """Return the database's time, or raise the error that prevents measuring it.

        Use it for the due times of rows.
        """
        if self._is_unknown():
            # Without the lock: while the database is away, threads must not wait one by one.
            self._refresh(insists=True)
        return self.now()

    @property
    def is_due(self) -> bool:
        """Whether the next call asks the database for its time."""
        return self._is_due() or self._is_unknown()

    def forget(self) -> None:
        """Have the next call measure again, because the last measurement was wrong."""
        self._stale_at = float("-inf")

    def refresh_if_due(self) -> None:
        """Measure if the last measurement is old, unless another thread is measuring."""
        if not self._is_due() or not self._lock.acquire(blocking=self._base is None):
            return
        try:
            if self._is_due():
                self._refresh(insists=False)
        except Exception:
            pass  # the last measurement, or else the host's clock, is used for MEASURE_RETRY_S
        finally:
            self._lock.release()

    def _is_due(self) -> bool:
        at = time.monotonic()
        return at >= self._rests_until and (at >= self._stale_at or self._is_unknown())

    def _is_unknown(self) -> bool:
        """Return whether the clock never measured, or the host slept, or its wall clock was set."""
        base = self._base
        if base is None:
            return True
        elapsed_s = time.monotonic() - base.monotonic_s
        return abs((time.time_ns() - base.wall_ns) / 1e9 - elapsed_s) > JUMP_S

    def _refresh(self, insists: bool) -> None:
        try:
            base = self._ask(insists)
        except BaseException:
            self._rests_until = time.monotonic() + MEASURE_RETRY_S
            raise
        self.offset_s = (base.wall_ns / 1e3 - base.database_us) / 1e6
        self._base = base
        self._stale_at = base.monotonic_s + REFRESH_S

    def _ask(self, insists: bool) -> Base:
        """Measure three times; the answer with the shortest round trip is the most exact one."""
        answers: list[tuple[float, Base]] = []
        for _ in range(3):
            before, wall_before = time.monotonic(), time.time_ns()
            database_us = to_us(self._measure(insists))
            after, wall_after = time.monotonic(), time.time_ns()
            middle = Base(database_us, (before + after) / 2, (wall_before + wall_after) // 2)
            answers.append((after - before, middle))
        return min(answers)[1]


# -- task ids -------------------------------------------------------------------------------------

# The producer makes them, so that they are known before the insert. An id has 63 bits: 41 for
# milliseconds since 2020, 5 for the shard, and 17 for a counter with a random start. Ids of other
# programs or of a database default are small numbers, which are valid too.


EPOCH_MS = 1_577_836_800_000  # 2020-01-01
SHARD_BITS = 5
COUNTER_BITS = 17
MAX_SHARDS = 1 << SHARD_BITS
MAX_ID = 2**63 - 1
#: Smaller ids were made elsewhere, because ours would be from January 2020.
_FIRST_ID = 1 << 52
_COUNTER_MASK = (1 << COUNTER_BITS) - 1


class IdMaker:
    """Makes ids. Thread-safe; a forked child starts its counter at a new random number."""

    def __init__(self, wall_ms: Callable[[], int], shard: int = 0) -> None:
        self._wall_ms = wall_ms
        self._shard = shard << COUNTER_BITS
        fork_safe(self)

    def after_fork(self) -> None:
        self._counter = itertools.count(random.SystemRandom().getrandbits(COUNTER_BITS))

    def __call__(self) -> int:
        elapsed = self._wall_ms() - EPOCH_MS
        return (
            elapsed << (SHARD_BITS + COUNTER_BITS)
            | self._shard
            | next(self._counter) & _COUNTER_MASK
        )


def shard_of(id: int) -> int:
    """Return the shard that an id names; 0 for the small ids that databases make."""
    return 0 if id < _FIRST_ID else id >> COUNTER_BITS & MAX_SHARDS - 1


def made_at(id: int) -> datetime:
    """Return when one of our ids was made."""
    return from_us(((id >> (SHARD_BITS + COUNTER_BITS)) + EPOCH_MS) * 1000)
