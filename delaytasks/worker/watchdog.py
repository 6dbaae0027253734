"""Looks after the loops of a worker's main process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from delaytasks.core.clock import monotonic
from delaytasks.core.events import Events
from delaytasks.core.loop import Loop

LOOK_S = 1.0
#: A look that comes so late says that the whole process stood still, and nothing about a single loop.
STOOD_STILL_S = 3 * LOOK_S


class Watchdog:
    """Once a second it restarts what is dead or stuck. It waits for nothing itself, neither database nor broker.

    Its own loop is looked at by the desk's watch, which it looks at: it would take both to die within a second.
    """

    def __init__(self, events: Events, loops: Iterable[Loop]) -> None:
        self._events = events
        self.loop = Loop("watchdog", self.look, events, stuck_s=10 * LOOK_S)
        self.loops = [*loops, self.loop]
        self._looked_at = monotonic()

    def start(self) -> None:
        for loop in self.loops:
            loop.start()

    def look(self) -> float:
        now = monotonic()
        stood_still, self._looked_at = now - self._looked_at > STOOD_STILL_S, now
        if not stood_still:
            for loop in self.loops:
                self._events.attempt("watchdog", loop.name, loop.look)
        return LOOK_S

    def info(self) -> dict[str, Any]:
        """By the name of each loop."""
        return {loop.name: loop.info() for loop in self.loops}
