"""Memory that the main process of a worker writes, and that the processes of its pool read."""

from __future__ import annotations

import mmap

from delaytasks.core.ids import MAX_SHARDS


class Renewals:
    """When the leases of each shard were renewed last, and which leases ended before that.

    The times are those of the monotonic clock, which all processes of a host share. Each number is
    written as a whole.
    """

    def __init__(self) -> None:
        self._asked_at = memoryview(mmap.mmap(-1, 8 * MAX_SHARDS)).cast("d")
        self._ended_before = memoryview(mmap.mmap(-1, 8 * MAX_SHARDS)).cast("d")

    def record(self, shard: int, asked_at: float, lease_ago: float) -> None:
        """Record a renewal that succeeded and was requested at `asked_at`.

        `lease_ago` is the time one lease before the answer. If the previous renewal was requested
        before it, the leases of that renewal had ended when this one succeeded.
        """
        if self._asked_at[shard] < lease_ago:
            self._ended_before[shard] = lease_ago
        self._asked_at[shard] = asked_at

    def last(self, shard: int) -> tuple[float, float]:
        """Return when the last renewal was requested.

        The second number is the time before which a lease must have begun to have ended without a
        renewal.
        """
        asked_at = self._asked_at[shard]  # read first, since it is written last
        return asked_at, self._ended_before[shard]


class OthersWait:
    """Whether tasks wait in the main process for a process that continues with a backlog."""

    def __init__(self) -> None:
        self._flag = mmap.mmap(-1, 1)

    def record(self, is_so: bool) -> None:
        self._flag[0] = is_so

    def is_so(self) -> bool:
        return bool(self._flag[0])
