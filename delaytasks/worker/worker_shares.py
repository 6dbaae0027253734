"""Which of the workers that look for near tasks takes which: all look, and each task is one worker's, as long as it
has the time. What is late is everybody's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from delaytasks.core.inputs import ALL_QUEUES
from delaytasks.core.interfaces import Entry
from delaytasks.maintenance.sweeper import DIRECT, SILENT_SWEEPS

_PRIME = 1_000_003


class Members:
    """As one of them knows them. Each one's part is as large as its pool."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._known: Sequence[tuple[str, int, Sequence[str]]] = ()
        #: By queues: how many parts there are, and which of them are ours.
        self._parts: dict[str, tuple[int, range]] = {}

    def learn(self, workers: Sequence[Mapping[str, Any]], now: datetime, sweep_s: float) -> None:
        """`workers` are those of the table."""
        known = [
            (worker["name"], max(worker["concurrency"], 1), worker["queues"])
            for worker in workers
            if worker["pool"].startswith(DIRECT)
            and abs((now - worker["seen_at"]).total_seconds()) < SILENT_SWEEPS * sweep_s
        ]
        if known != self._known:
            self._known, self._parts = known, {}

    def is_mine(self, entry: Entry) -> bool:
        parts = self._parts.get(entry.queue)
        if parts is None:
            parts = self._parts[entry.queue] = self._count(entry.queue)
        total, mine = parts
        return not mine or entry.id % _PRIME % total in mine

    def _count(self, queue: str) -> tuple[int, range]:
        """All is ours as long as nobody knows us."""
        total, mine = 0, range(0)
        for name, size, queues in self._known:
            if serves(queues, queue):
                if name == self._me:
                    mine = range(total, total + size)
                total += size
        return total, mine


def serves(queues: Sequence[str], queue: str) -> bool:
    return ALL_QUEUES in queues or queue in queues
