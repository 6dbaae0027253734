"""How far a process has claimed the rows of each queue and priority.

A claimed row leaves a dead entry in the index. The database cannot remove it while an older
transaction is open, such as a backup's. Walking past all dead entries would slow down every chunk,
so a chunk continues where the last one ended. Rows with older due times may come back meanwhile:
the index is searched from its beginning now and then, and before a level is reported as empty.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from delaytasks.core.clock import monotonic
from delaytasks.core.interfaces import Claimed

#: After this time a search starts at the beginning of the index again.
RESTART_S = 5.0
#: Claims up to a number of rows whose due time is this one or later; None is the beginning, since
#: other programs' rows may be due before the year 1.
ClaimFrom = Callable[[datetime | None, int], Claimed]


class Backlog:
    def __init__(self) -> None:
        #: The due time that was reached in each queue and priority, and until when searches start
        #: at it.
        self._reached: dict[tuple[str, int], tuple[datetime | None, float]] = {}

    def claim(self, queue: str, priority: int, limit: int, claim: ClaimFrom) -> Claimed:
        """Claim up to `limit` due rows of a queue and priority from where the last claim ended."""
        level = queue, priority
        reached, until = self._reached.get(level, (None, 0.0))
        now = monotonic()
        due_from = reached if now < until else None
        claimed = claim(due_from, limit)
        if due_from is not None and len(claimed) < limit:
            claimed = Claimed([*claim(None, limit - len(claimed)), *claimed])
        if claimed and len(claimed) >= limit:
            latest = max(task.expected_time for task in claimed)
            self._reached[level] = latest, until if now < until else now + RESTART_S
        else:
            self._reached.pop(level, None)
        return claimed
