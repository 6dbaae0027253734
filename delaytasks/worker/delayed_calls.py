"""Timers that fill the pool again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import inf

from delaytasks.core.clock import monotonic


class Later:
    """Calls `pump` after a while, by way of `soon`, which brings the call to the thread that may use the pool."""

    def __init__(
        self, soon: Callable[[Callable[[], None]], None], pump: Callable[[], None]
    ) -> None:
        self._soon = soon
        self._pump = pump
        self._pumps_at = -inf

    def after(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._soon, (self._pump,))
        timer.daemon = True
        timer.start()

    def within(self, seconds: float) -> None:
        """Calls `pump` after that time unless an earlier call of `within` has yet to do so; never for infinity."""
        if seconds < inf and monotonic() >= self._pumps_at:
            self._pumps_at = monotonic() + seconds
            self.after(seconds)
