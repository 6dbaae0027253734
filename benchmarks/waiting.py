"""Wait for conditions with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone


class BenchError(Exception):
    """The measurement is unreliable or incomplete; the text has the reason."""


def wait_until(
    is_so: Callable[[], object], deadline_s: float, what: str, every_s: float = 0.05
) -> None:
    ends = time.monotonic() + deadline_s
    while not is_so():
        if time.monotonic() > ends:
            raise BenchError(f"waited {deadline_s:.0f} s for {what}")
        time.sleep(every_s)


def wall() -> float:
    """Return the seconds since 1970, as in the notes of tasks."""
    return time.time_ns() / 1e9


def instant(at: float) -> datetime:
    return datetime.fromtimestamp(at, timezone.utc)


def sleep_until(at: float) -> None:
    time.sleep(max(at - wall(), 0))
