"""Memory that the main process of a worker writes, and that the processes of its pool read."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from delaytasks.model.workers import LastRenewal


class Renewals:
    """The last renewal of the leases.

    The times are those of the monotonic clock, which all processes of a host share. Each number is
    written as a whole.

    Usually a renewal is answered less than one lease after the previous one was requested, and no
    lease has ended in between. A main process that was frozen may renew too late:

        previous renewal                                   this renewal
            asked_at          lost_if_claimed_before   asked_at   answered_at
        -------|------------------------|-----------------|------------|------> time
                                        |<---------- lease_s --------->|

    The lease of a row that was claimed before `lost_if_claimed_before` had then ended before the
    renewal was answered, and another worker may have recovered the row.
    """

    def __init__(self) -> None:
        self._asked_at = memoryview(mmap.mmap(-1, 8)).cast("d")
        self._lost_if_claimed_before = memoryview(mmap.mmap(-1, 8)).cast("d")

    def record(self, asked_at: float, answered_at: float, lease_s: float) -> None:
        """Record a renewal that succeeded."""
        one_lease_ago = answered_at - lease_s
        if self._asked_at[0] < one_lease_ago:
            self._lost_if_claimed_before[0] = one_lease_ago
        self._asked_at[0] = asked_at  # written last, since `last` reads it first

    def last(self) -> LastRenewal:
        """Return the last renewal that succeeded."""
        asked_at = self._asked_at[0]
        return LastRenewal(asked_at, self._lost_if_claimed_before[0])


class OthersWait:
    """Whether tasks wait in the main process for a process that continues with a backlog."""

    def __init__(self) -> None:
        self._flag = mmap.mmap(-1, 1)

    def record(self, is_so: bool) -> None:
        self._flag[0] = is_so

    def is_so(self) -> bool:
        return bool(self._flag[0])


#: The most rows of a worker that are asked to stop at the same time.
MOST_ROWS = 1000


class RequestedRuns:
    """The runs of this worker that were asked to stop, by id and version.

    Each number is written as a whole, and the count last.
    """

    def __init__(self) -> None:
        self._memory = memoryview(mmap.mmap(-1, 8 * (1 + 2 * MOST_ROWS))).cast("q")

    def record(self, rows: Sequence[tuple[int, int]]) -> None:
        """Replace the rows."""
        memory = self._memory
        memory[0] = 0
        for number, row in enumerate(rows[:MOST_ROWS]):
            memory[1 + 2 * number], memory[2 + 2 * number] = row
        memory[0] = min(len(rows), MOST_ROWS)

    def has(self, id: int, version: int) -> bool:
        """Return whether this run was asked to stop."""
        memory = self._memory
        if not memory[0]:  # as nearly always
            return False
        return any(
            memory[at] == id and memory[at + 1] == version for at in range(1, 1 + 2 * memory[0], 2)
        )
