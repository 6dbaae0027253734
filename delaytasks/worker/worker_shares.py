"""How workers that read the table share the near tasks: each task belongs to one of them.

A task that is late may be run by any of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from delaytasks.core.inputs import ALL_QUEUES
from delaytasks.core.interfaces import Entry
from delaytasks.core.settings import SILENT_SWEEPS
from delaytasks.maintenance.drain_requests import POLLING_PREFIX

_PRIME = 1_000_003


class WorkerShares:
    """The shares as one worker knows them. The share of each worker is as large as its pool."""

    def __init__(self, hostname: str) -> None:
        self._hostname = hostname
        self._workers: Sequence[tuple[str, int, Sequence[str]]] = ()
        #: The number of parts of each queue, and which of them are this worker's.
        self._parts: dict[str, tuple[int, range]] = {}

    def learn(self, workers: Sequence[Mapping[str, Any]], now: datetime, sweep_s: float) -> None:
        """Read the rows of the table of workers."""
        known = [
            (worker["name"], max(worker["concurrency"], 1), worker["queues"])
            for worker in workers
            if worker["pool"].startswith(POLLING_PREFIX)
            and abs((now - worker["seen_at"]).total_seconds()) < SILENT_SWEEPS * sweep_s
        ]
        if known != self._workers:
            self._workers, self._parts = known, {}

    def is_mine(self, entry: Entry) -> bool:
        parts = self._parts.get(entry.queue)
        if parts is None:
            parts = self._parts[entry.queue] = self._parts_of(entry.queue)
        total, mine = parts
        return not mine or entry.id % _PRIME % total in mine

    def _parts_of(self, queue: str) -> tuple[int, range]:
        """Return an empty range as long as this worker has no row, so that it takes every task."""
        total, mine = 0, range(0)
        for hostname, size, queues in self._workers:
            if serves(queues, queue):
                if hostname == self._hostname:
                    mine = range(total, total + size)
                total += size
        return total, mine


def serves(queues: Sequence[str], queue: str) -> bool:
    return ALL_QUEUES in queues or queue in queues
