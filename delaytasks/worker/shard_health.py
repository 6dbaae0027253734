"""Which shards answer. A shard that may be down is asked in a thread that can wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from delaytasks.core.errors import StoreUnavailableError
from delaytasks.core.events import Events
from delaytasks.worker.database_health import DatabaseOutages
from delaytasks.worker.shard_queue import SHARD_ANSWER_S, ShardQueue


class ShardHealth:
    """Thread-safe, by the lock of the dispatcher that owns the shard queues."""

    def __init__(
        self,
        shard_queues: Sequence[ShardQueue],
        lock: threading.RLock,
        events: Events,
        on_answer: Callable[[], None],
    ) -> None:
        self._shard_queues = shard_queues
        self._lock = lock
        self.outages = DatabaseOutages(events)
        self._on_answer = on_answer

    def check(self, shard: int, ask: Callable[[], object]) -> bool:
        """Call `ask` in this thread if it is uncertain whether the shard answers.

        Return False if the shard is down. A single shard is never asked: its chunks find out.
        """
        shard_queue = self._shard_queues[shard]
        with self._lock:
            if len(self._shard_queues) == 1 or not shard_queue.needs_question():
                return True
            shard_queue.mark_asked()
        try:
            ask()
        except StoreUnavailableError as error:
            with self._lock:
                shard_queue.mark_failed()
            self._mark_down(shard_queue, str(error))
            return False
        with self._lock:
            shard_queue.mark_up()
        self.outages.mark_up(shard)
        self._on_answer()
        return True

    def check_answers(self) -> None:
        """Mark the shards that owe an answer; the thread that asked may still be waiting."""
        for shard_queue in self._shard_queues:
            if shard_queue.is_silent():
                error = f"shard {shard_queue.shard} has not answered for {SHARD_ANSWER_S:g} s"
                self._mark_down(shard_queue, error)
        self.outages.check_answers()

    def info(self) -> dict[int, dict[str, Any]]:
        return {
            shard_queue.shard: {
                "is_up": not shard_queue.is_down,
                "waiting": shard_queue.waiting,
                "chunks": len(shard_queue.in_flight),
            }
            for shard_queue in self._shard_queues
        }

    def _mark_down(self, shard_queue: ShardQueue, error: str) -> None:
        with self._lock:
            shard_queue.mark_down()
        self.outages.mark_down(shard_queue.shard, error)
