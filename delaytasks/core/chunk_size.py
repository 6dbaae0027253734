"""The number of rows of a chunk."""

from __future__ import annotations

#: Rows of the first chunk, before the speed of the processors is known.
FIRST_SIZE = 10
#: Rows that a process gets before that, so that it stays busy until the first chunks are measured.
FIRST_PREFETCH = 100
#: The weight of the last chunk in the estimate, if it was as small as the first; a larger chunk
#: weighs more.
LEARNING = 0.3
#: The most full chunks in one time budget, since claims and settlements take time as well.
MOST_CHUNKS = 5


class ChunkSize:
    """Estimates from past chunks how many rows fit the time budget."""

    def __init__(self, time_budget_s: float, most: int, first: int = FIRST_SIZE) -> None:
        self._time_budget_s = time_budget_s
        self._most = most
        self._first = first
        self._row_s: float | None = None
        self._wanted = 0

    def learn(self, ran: int, seconds: float, wanted: int = 0) -> None:
        """Learn from a chunk.

        `wanted` is the number of rows that its processors can start simultaneously.
        """
        if ran or wanted:
            self._wanted = min(wanted, self._most)
        if ran:
            row_s = seconds / ran
            known = row_s if self._row_s is None else self._row_s
            self._row_s = known + (1 - (1 - LEARNING) ** max(ran / FIRST_SIZE, 1)) * (row_s - known)

    @property
    def rows(self) -> int:
        return min(self.in_time, self._most)

    @property
    def in_time(self) -> int:
        """The rows that one process runs in a time budget, in several chunks if they are short."""
        fitting = (
            self._first if self._row_s is None else self._time_budget_s / max(self._row_s, 1e-6)
        )
        return int(min(max(fitting, self._wanted, 1), self._most * MOST_CHUNKS))

    @property
    def prefetch(self) -> int:
        """The rows that a process should have at hand."""
        if self._row_s is not None:
            return self.in_time
        return max(self.in_time, min(FIRST_PREFETCH, self._most * MOST_CHUNKS))

    @property
    def least(self) -> int:
        """The rows that stay together although other processes may be idle."""
        return max(self._wanted, 1)

    @property
    def is_limited_by_time(self) -> bool:
        """Whether rows take so long that the time budget limits a chunk, not its largest size."""
        return self._row_s is not None and self.in_time < self._most

    @property
    def fits(self) -> bool:
        """Whether one row fits the time budget; assumed until the first row has run."""
        return self._row_s is None or self._row_s < self._time_budget_s
