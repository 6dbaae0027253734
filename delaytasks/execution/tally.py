"""Counts what a process has run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


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
