"""Counts what a process has run, and learns how long the tasks of each tag take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from delaytasks.core.task import DelayTask
from delaytasks.core.workers import LEARNING


class SizeSample(NamedTuple):
    """What the size of the next chunk is learned from."""

    rows: int
    seconds: float


@dataclass(slots=True)
class Tally:
    """Counts the rows of one or several chunks."""

    claimed: int = 0
    #: The rows that ended, and the time that the process spent on them.
    ran: int = 0
    seconds: float = 0.0
    #: The rows that were given back, and what has to be added to `seconds` for the size of the next
    #: chunk: the expected time of these rows, without what rows took beyond a time budget each.
    returned: int = 0
    correction_s: float = 0.0
    #: The rows that the next chunk should have, for processors that start several rows together.
    wanted: int = 0
    #: The started rows of such processors, and all started rows.
    wanting: int = 0
    started: int = 0

    def start(self, rows: int, wanted: int = 0) -> None:
        self.started += rows
        if wanted:
            self.wanted, self.wanting = max(self.wanted, wanted), self.wanting + rows

    def add(self, ran: int, seconds: float) -> None:
        self.ran += ran
        self.seconds += seconds

    def correct(self, returned: int, seconds: float) -> None:
        self.returned += returned
        self.correction_s += seconds

    @property
    def sample(self) -> SizeSample:
        """Return how long which number of rows takes, in a chunk that quick and slow rows share."""
        return SizeSample(self.ran + self.returned, self.seconds + self.correction_s)

    @property
    def wanted_next(self) -> int:
        """The least number of rows for the next chunk, if most rows are of such processors."""
        return self.wanted if 2 * self.wanting >= self.started else 0


class TagCosts:
    """Estimates the time of a row from past rows of its tag. A tag without any counts as quick."""

    def __init__(self, time_budget_s: float) -> None:
        self._time_budget_s = time_budget_s
        self._row_s: dict[str, float] = {}

    def learn(self, tag: str, rows: int, seconds: float) -> float:
        """Learn from rows that ran one after another or as a batch.

        Return the seconds beyond one time budget for each row, which do not count for the size of
        the next chunk: a chunk has at most one such row that runs, and quicker rows run before it.
        """
        row_s = seconds / rows
        known = self._row_s.get(tag, row_s)
        self._row_s[tag] = known + LEARNING * (row_s - known)
        return max(seconds - rows * self._time_budget_s, 0.0)

    def counted(self, tasks: Sequence[DelayTask]) -> tuple[int, float]:
        """Return how many of these rows have known tags, and the time that counts for them."""
        if not tasks:  # as nearly always
            return 0, 0.0
        known = [self._row_s[task.tag] for task in tasks if task.tag in self._row_s]
        return len(known), sum(min(row_s, self._time_budget_s) for row_s in known)

    def quick_first(self, tasks: Sequence[DelayTask]) -> Sequence[DelayTask]:
        """Return the rows of a chunk in the order in which to run them.

        If they will probably not all run within the time budget, the rows of quick tags come first
        within each priority, so that slow rows are given back and not the quick ones behind them.
        Otherwise, and within a tag, the order is kept.
        """
        if len({task.tag for task in tasks}) == 1 or self.expected_s(tasks) < self._time_budget_s:
            return tasks
        costs = self._row_s
        return sorted(tasks, key=lambda task: (-task.priority, costs.get(task.tag, 0.0)))

    def expected_s(self, tasks: Sequence[DelayTask]) -> float:
        """Return how long a chunk of these rows takes. No row starts after the time budget."""
        total_s = 0.0
        for task in tasks:
            total_s += self._row_s.get(task.tag, 0.0)
            if total_s >= self._time_budget_s:
                break
        return total_s
