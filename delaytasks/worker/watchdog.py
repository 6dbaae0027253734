"""Restarts the loops of a worker's main process that are dead or stuck."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from delaytasks.core.clock import monotonic
from delaytasks.core.events import Events
from delaytasks.core.loop import Loop

#: How often the watchdog checks the loops.
WATCHDOG_S = 1.0
#: A check that comes this much later shows that the whole process was suspended. It proves nothing
#: about a single loop.
SUSPENDED_S = 3 * WATCHDOG_S


class Watchdog:
    """Checks all loops once a second. It waits for neither the database nor the broker.

    The watch loop of the worker runtime calls `check` too, so that the two restart each other. Both
    would have to die within a second.
    """

    def __init__(self, events: Events, loops: Iterable[Loop]) -> None:
        self._events = events
        self.loop = Loop("watchdog", self.check, events, stuck_s=10 * WATCHDOG_S)
        self.loops = [*loops, self.loop]
        self._checked_at = monotonic()

    def start(self) -> None:
        for loop in self.loops:
            loop.start()

    def check(self) -> float:
        now = monotonic()
        was_suspended, self._checked_at = now - self._checked_at > SUSPENDED_S, now
        if not was_suspended:
            for loop in self.loops:
                self._events.attempt("watchdog", loop.name, loop.look)
        return WATCHDOG_S

    def info(self) -> dict[str, Any]:
        """Return the state of each loop by its name."""
        return {loop.name: loop.info() for loop in self.loops}
