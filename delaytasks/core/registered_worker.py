"""A worker, as its row in the registry of a database describes it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from delaytasks.core.inputs import ALL_QUEUES


class RegisteredWorker(NamedTuple):
    name: str
    #: Whether it has reported recently. A report from the future was not written by a live worker.
    is_alive: bool
    #: Seconds since its last report.
    age_s: float
    queues: Sequence[str]
    #: The tags for which it has processors; None if the worker has not published its tags.
    tags: frozenset[str] | None
    pool: str
    concurrency: int
    started_at: datetime
    seen_at: datetime
    #: How far the clock of its machine is ahead of the clock of the database.
    clock_offset_s: float

    def serves(self, queue: str) -> bool:
        return ALL_QUEUES in self.queues or queue in self.queues
