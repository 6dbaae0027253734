"""When leases were renewed last: told by a worker's main process, and seen by those of its pool."""

from __future__ import annotations

import mmap

from delaytasks.core.ids import MAX_SHARDS


class Renewals:
    """In memory that children share which are forked later, and by the monotonic clock, which the whole host shares.
    Each shard's number is written as a whole."""

    def __init__(self) -> None:
        self._at = memoryview(mmap.mmap(-1, 8 * MAX_SHARDS)).cast("d")
        self._at[:] = memoryview(bytearray(8 * MAX_SHARDS)).cast("d")

    def tell(self, shard: int, asked_at: float) -> None:
        """A renewal came through that was asked for then."""
        self._at[shard] = asked_at

    def last(self, shard: int) -> float:
        return self._at[shard]
