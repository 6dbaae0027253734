"""Limits how many requests each API key may make."""

from __future__ import annotations

import threading
from collections.abc import Callable

from delaytasks.core.clock import monotonic


class RequestLimit:
    """A token bucket for each API key, in the memory of this process.

    Parameters
    ----------
    per_s
        The requests of a key in a second. After a pause, a key may make as many at the same time.
    """

    def __init__(self, per_s: float, clock: Callable[[], float] = monotonic) -> None:
        self._per_s = per_s
        self._most = max(per_s, 1.0)
        self._clock = clock
        self._lock = threading.Lock()
        #: The tokens of each key, and the time at which they were counted.
        self._buckets: dict[str, tuple[float, float]] = {}

    def wait_s(self, name: str) -> float:
        """Take a token. Return 0, or the seconds until there is one."""
        with self._lock:
            now = self._clock()
            tokens, counted_at = self._buckets.get(name, (self._most, now))
            tokens = min(tokens + (now - counted_at) * self._per_s, self._most)
            is_allowed = tokens >= 1
            self._buckets[name] = (tokens - is_allowed, now)
            return 0.0 if is_allowed else (1 - tokens) / self._per_s
