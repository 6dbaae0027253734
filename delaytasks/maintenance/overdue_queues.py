"""Finds the queues that have overdue tasks, at a cost that does not grow with the number of queue names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from delaytasks.core.interfaces import QueuePlace

if TYPE_CHECKING:
    from delaytasks.storage.sweep_queries import SweepQueries

#: Queues that workers name, and all other queues, that one look asks about. The next look goes on behind them.
MOST_NAMED, MOST_OTHERS = 1000, 100
#: Queues in one call of the store: after each call the caller's loop shows that it goes on.
STEP = 50

Beat = Callable[[], None]
#: Maps each queue to the priorities that have overdue tasks. A queue that only has a waitlist has priority 0.
Late = dict[str, list[int]]


class OverdueQueues:
    """Looks for overdue tasks. Each queue has its turn, and no number of queues makes a look long."""

    def __init__(self, sweeps: SweepQueries, late_s: float) -> None:
        self._sweeps = sweeps
        self._late_s = late_s
        self._named_after = ""
        self._place = QueuePlace()

    def of(self, queues: Iterable[str], beat: Beat = lambda: None) -> Late:
        """Return what is overdue in these queues."""
        late: Late = {}
        remaining = iter(queues)
        while some := list(islice(remaining, STEP)):
            for level in self._sweeps.levels_of(some, self._late_s):
                late.setdefault(level.queue, []).append(level.priority)
            beat()
        return late

    def of_named(self, queues: Collection[str], beat: Beat = lambda: None) -> Late:
        """Return what is overdue in queues that workers name: in all of them, or in the next `MOST_NAMED`."""
        names: Sequence[str] = sorted(queues)
        if len(names) > MOST_NAMED:
            behind = [name for name in names if name > self._named_after]
            names = [*behind, *names][:MOST_NAMED]
            self._named_after = names[-1]
        return self.of(names, beat)

    def of_others(
        self, named: Collection[str], beat: Beat = lambda: None, most: int = MOST_OTHERS
    ) -> Late:
        """Return what is overdue in the next queues of the table that are not among those named."""
        if most <= 0:
            return {}
        queues, self._place = self._sweeps.next_queues(self._place, most)
        beat()
        return self.of(sorted(queues.difference(named)), beat)
