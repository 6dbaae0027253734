"""How far a process has claimed the rows of each queue and priority.

A claimed row leaves a dead entry in the index. The database cannot remove it while an older
transaction is open, such as a backup's. Walking past all dead entries would slow down every chunk,
so a chunk continues where the last one ended. Rows with older due times may come back meanwhile:
the index is searched from its beginning now and then, and before a level is reported as empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from delaytasks.core.clock import monotonic
from delaytasks.core.task import DelayTask

#: After this time a search starts at the beginning of the index again.
RESTART_S = 5.0


class Backlog:
    def __init__(self) -> None:
        #: The due time that was reached in each queue and priority, and until when searches start
        #: at it.
        self._reached: dict[tuple[str, int], tuple[datetime | None, float]] = {}

    def since(self, queue: str, priority: int) -> datetime | None:
        """Return where to start; None is the beginning, since other programs' rows may be due
        before the year 1."""
        reached, until = self._reached.get((queue, priority), (None, 0.0))
        return reached if monotonic() < until else None

    def reach(self, queue: str, priority: int, claimed: Sequence[DelayTask], is_full: bool) -> None:
        """Record the rows of a chunk. `is_full` is False if the level had no more rows."""
        if not is_full or not claimed:
            self._reached.pop((queue, priority), None)
            return
        until = self._reached.get((queue, priority), (None, 0.0))[1]
        now = monotonic()
        latest = max(task.expected_time for task in claimed)
        self._reached[queue, priority] = latest, until if now < until else now + RESTART_S
