"""Shards that may be down: who asks them, and who is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from delaytasks.core.errors import StoreUnavailableError
from delaytasks.core.events import Events
from delaytasks.worker.database_outages import Outages
from delaytasks.worker.shard_queue import SILENT_S, ShardQueue


class ShardHealth:
    """Thread-safe, by the lock of the dispatcher whose lanes they are."""

    def __init__(
        self,
        lanes: Sequence[ShardQueue],
        lock: threading.RLock,
        events: Events,
        answered: Callable[[], None],
    ) -> None:
        self._lanes = lanes
        self._lock = lock
        self.outages = Outages(events)
        self._answered = answered

    def hear(self, shard: int, question: Callable[[], object]) -> bool:
        """Asks a shard that is in doubt, in the caller's thread; False if it is down. With one shard nobody asks."""
        lane = self._lanes[shard]
        with self._lock:
            if len(self._lanes) == 1 or not lane.is_in_doubt():
                return True
            lane.asked()
        try:
            question()
        except StoreUnavailableError as error:
            with self._lock:
                lane.failed()
            self._tell_down(lane, str(error))
            return False
        with self._lock:
            lane.is_down = False
            lane.answered()
        self.outages.up(shard)
        self._answered()
        return True

    def tell_silent(self) -> None:
        """Shards that owe an answer: whoever asked may be waiting for it still."""
        for lane in self._lanes:
            if lane.is_silent():
                self._tell_down(lane, f"shard {lane.shard} has not answered for {SILENT_S:g} s")

    def info(self) -> dict[int, dict[str, Any]]:
        return {
            lane.shard: {
                "is_up": not lane.is_down,
                "waiting": lane.waiting,
                "chunks": len(lane.in_flight),
            }
            for lane in self._lanes
        }

    def _tell_down(self, lane: ShardQueue, error: str) -> None:
        with self._lock:
            lane.is_down = True
        self.outages.down(lane.shard, error)
