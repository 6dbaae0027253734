"""Find the queues that have overdue tasks, at a cost independent of the number of queue names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from delaytasks.core.filters import batches
from delaytasks.core.interfaces import QueuePlace

if TYPE_CHECKING:
    from delaytasks.storage.sweep_queries import SweepQueries

#: Queues of live workers, and other queues, that one call checks. The next call continues after
#: them.
MOST_NAMED, MOST_OTHERS = 1000, 100
#: Queues in one query.
QUEUES_PER_QUERY = 50

#: Called after each step of a sweep, so that the caller can show that the sweep makes progress.
OnStep = Callable[[], None]
#: The priorities that have overdue tasks, by queue. A queue with only a waitlist has priority 0.
OverdueLevels = dict[str, list[int]]


class OverdueQueues:
    """Looks for overdue tasks in a bounded number of queues at a time, in turn."""

    def __init__(self, sweeps: SweepQueries, late_s: float) -> None:
        self._sweeps = sweeps
        self._late_s = late_s
        self._named_after = ""
        self._place = QueuePlace()

    def of(self, queues: Iterable[str], on_step: OnStep = lambda: None) -> OverdueLevels:
        """Return the overdue levels of these queues."""
        late: OverdueLevels = {}
        for some in batches(queues, QUEUES_PER_QUERY):
            for level in self._sweeps.levels_of(some, self._late_s):
                late.setdefault(level.queue, []).append(level.priority)
            on_step()
        return late

    def of_named(self, queues: Collection[str], on_step: OnStep = lambda: None) -> OverdueLevels:
        """Return the overdue levels of the queues that workers name, of at most `MOST_NAMED`."""
        names: Sequence[str] = sorted(queues)
        if len(names) > MOST_NAMED:
            next_names = [name for name in names if name > self._named_after]
            names = [*next_names, *names][:MOST_NAMED]
            self._named_after = names[-1]
        return self.of(names, on_step)

    def of_others(
        self,
        named: Collection[str],
        on_step: OnStep = lambda: None,
        most: int = MOST_OTHERS,
    ) -> OverdueLevels:
        """Return the overdue levels of the next `most` queues of the table, except those named."""
        if most <= 0:
            return {}
        queues, self._place = self._sweeps.next_queues(self._place, most)
        on_step()
        return self.of(sorted(queues.difference(named)), on_step)
