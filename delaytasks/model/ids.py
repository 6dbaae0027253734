"""Task ids. The producer makes them, so that they are known before the insert.

An id has 63 bits: 41 for milliseconds since 2020, 5 for the shard, and 17 for a counter with a
random start. Ids of other programs or of a database default are small numbers, which are valid too.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from datetime import datetime

from delaytasks.model.clock import from_us, reset_in_child, to_us
from delaytasks.model.inputs import check_integer

EPOCH_MS = 1_577_836_800_000  # 2020-01-01
SHARD_BITS = 5
COUNTER_BITS = 17
MAX_SHARDS = 1 << SHARD_BITS
MAX_ID = 2**63 - 1
#: Smaller ids were made elsewhere, because ours would be from January 2020.
_FIRST_ID = 1 << 52
_COUNTER_MASK = (1 << COUNTER_BITS) - 1


class IdMaker:
    """Makes ids. Thread-safe; a forked child starts its counter at a new random number."""

    def __init__(self, wall_ms: Callable[[], int], shard: int = 0) -> None:
        self._wall_ms = wall_ms
        self._shard = shard << COUNTER_BITS
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._counter = itertools.count(random.SystemRandom().getrandbits(COUNTER_BITS))

    def __call__(self) -> int:
        elapsed = self._wall_ms() - EPOCH_MS
        return (
            elapsed << (SHARD_BITS + COUNTER_BITS)
            | self._shard
            | next(self._counter) & _COUNTER_MASK
        )


def shard_of(id: int) -> int:
    """Return the shard that an id names; 0 for the small ids that databases make."""
    return 0 if id < _FIRST_ID else id >> COUNTER_BITS & MAX_SHARDS - 1


def first_id(instant: datetime) -> int:
    """Return the smallest id that can be made in the millisecond of `instant`."""
    return (to_us(instant) // 1000 - EPOCH_MS) << (SHARD_BITS + COUNTER_BITS)


def made_at(id: int) -> datetime:
    """Return when one of our ids was made."""
    return from_us(((id >> (SHARD_BITS + COUNTER_BITS)) + EPOCH_MS) * 1000)


def check_id(value: object, argument: str = "id") -> int:
    """Convert an integer or its decimal text to a task id, or raise `InvalidInputError`."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 19:
        value = int(value)
    return check_integer(value, argument, 1, MAX_ID, f"{argument} is an integer from 1 to 2^63 - 1")
