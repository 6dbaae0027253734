"""Waits for conditions, never for a guess."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone


class BenchError(Exception):
    """A measurement that can not be trusted, or did not come to its end; the text says why."""


class TooSlowError(BenchError):
    """The machine could not schedule the tasks before they were due: a longer lead may do."""


def wait_until(
    is_so: Callable[[], object], deadline_s: float, what: str, every_s: float = 0.05
) -> None:
    ends = time.monotonic() + deadline_s
    while not is_so():
        if time.monotonic() > ends:
            raise BenchError(f"waited {deadline_s:.0f} s for {what}")
        time.sleep(every_s)


def wall() -> float:
    """Seconds since 1970, as the tasks note them."""
    return time.time_ns() / 1e9


def instant(at: float) -> datetime:
    return datetime.fromtimestamp(at, timezone.utc)


def sleep_until(instant: float) -> None:
    time.sleep(max(instant - wall(), 0))
