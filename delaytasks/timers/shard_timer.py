"""The timer as one of several shards uses it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from delaytasks.core.ids import shard_of
from delaytasks.core.interfaces import Entry, Timer


class ShardTimer:
    """Arms the entries whose ids contain the number of this shard.

    Workers find the shard of an entry by its id. The ids of rows that other programs wrote may
    contain another number: these rows wait for a drain message, which names the shard.
    """

    def __init__(self, timer: Timer, shard: int) -> None:
        self._timer = timer
        self._shard = shard

    @property
    def is_up(self) -> bool:
        return self._timer.is_up

    def arm(self, entries: Iterable[Entry]) -> bool:
        return self._timer.arm([entry for entry in entries if shard_of(entry.id) == self._shard])

    def disarm(self, entries: Iterable[Entry]) -> None:
        self._timer.disarm(entries)

    def request_drain(
        self, queue: str, priorities: Sequence[int], messages: int, expires_s: float, shard: int = 0
    ) -> bool:
        return self._timer.request_drain(queue, priorities, messages, expires_s, self._shard)
