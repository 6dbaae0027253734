"""How far a process has come in a backlog.

What was claimed leaves its place in the index behind, and the database can not clear it away while any older
transaction is open, be it a backup's. To walk past all of that for each chunk would make chunks ever slower, so a chunk
goes on where the last one ended. What is older may come back meanwhile: it is looked for now and then, and before a
level is said to be empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from delaytasks.core.clock import monotonic
from delaytasks.core.task import DelayTask

#: Then it is begun at the beginning again.
AGAIN_S = 5.0


class Backlog:
    def __init__(self) -> None:
        #: By queue and priority: the due time that was reached, and until when to go on there.
        self._reached: dict[tuple[str, int], tuple[datetime | None, float]] = {}

    def since(self, queue: str, priority: int) -> datetime | None:
        """None is the beginning, which no instant is: rows of other programs may be due before the year 1."""
        reached, until = self._reached.get((queue, priority), (None, 0.0))
        return reached if monotonic() < until else None

    def reach(self, queue: str, priority: int, claimed: Sequence[DelayTask], is_full: bool) -> None:
        """By a chunk that took all it could of this level, or there was no more."""
        if not is_full or not claimed:
            self._reached.pop((queue, priority), None)
            return
        until = self._reached.get((queue, priority), (None, 0.0))[1]
        now = monotonic()
        latest = max(task.expected_time for task in claimed)
        self._reached[queue, priority] = latest, until if now < until else now + AGAIN_S
