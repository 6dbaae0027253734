"""Which databases do not answer: logged once when that begins and once when it ends, however many ask meanwhile."""

from __future__ import annotations

import threading

from delaytasks.core.clock import monotonic
from delaytasks.core.events import Events

#: A database that owes an answer for so long counts as away.
SILENT_S = 5.0


class Outages:
    """Of a worker's main process; thread-safe."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._lock = threading.Lock()
        #: By shard, when it was found to be away, and when a question was asked that has no answer yet.
        self._down_since: dict[int, float] = {}
        self._asked_at: dict[int, float] = {}

    def asked(self, shard: int) -> None:
        with self._lock:
            self._asked_at.setdefault(shard, monotonic())

    def down(self, shard: int, error: object) -> None:
        with self._lock:
            self._asked_at.pop(shard, None)
            is_new = self._down_since.setdefault(shard, now := monotonic()) == now
        if is_new:
            self._events.emit("store.down", error=str(error), shard=shard)

    def up(self, shard: int) -> None:
        with self._lock:
            self._asked_at.pop(shard, None)
            since = self._down_since.pop(shard, None)
        if since is not None:
            self._events.emit("store.up", shard=shard, away_s=round(monotonic() - since, 1))

    def look(self) -> None:
        """Whoever asked may still be waiting."""
        silent_since = monotonic() - SILENT_S
        for shard, asked_at in list(self._asked_at.items()):
            if asked_at < silent_since:
                self.down(shard, f"no answer for {SILENT_S:g} s")
