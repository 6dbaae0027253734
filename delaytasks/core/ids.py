"""Task ids: made by the producer, so that they are known before the insert.

63 bits: 41 of milliseconds since 2020, 5 of shard, 17 of a counter that starts at random.
Ids from elsewhere (a database default, an older program) are small numbers and just as good.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from datetime import datetime

from delaytasks.core.clock import from_us, to_us
from delaytasks.core.errors import InvalidIdError
from delaytasks.core.forks import reset_in_child
from delaytasks.core.text import shown

EPOCH_MS = 1_577_836_800_000  # 2020-01-01
SHARD_BITS = 5
COUNTER_BITS = 17
MAX_SHARDS = 1 << SHARD_BITS
MAX_ID = 2**63 - 1
#: We have made none below: of January 2020.
_FIRST_ID = 1 << 52
_COUNTER_MASK = (1 << COUNTER_BITS) - 1


class IdMaker:
    """Thread-safe; a forked child starts its counter anew, so parent and child do not walk in step."""

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
    """What the id says. Ids from elsewhere say nothing true; of the small ones, as databases make them, the first
    shard is as good a guess as any."""
    return 0 if id < _FIRST_ID else id >> COUNTER_BITS & MAX_SHARDS - 1


def first_id(instant: datetime) -> int:
    """The least id that is made in that millisecond."""
    return (to_us(instant) // 1000 - EPOCH_MS) << (SHARD_BITS + COUNTER_BITS)


def made_at(id: int) -> datetime:
    """When an id of ours was made."""
    return from_us(((id >> (SHARD_BITS + COUNTER_BITS)) + EPOCH_MS) * 1000)


def check_id(value: object) -> int:
    """`value` as a task id, from an integer or its decimal text."""
    if (
        isinstance(value, str)
        and value.isascii()
        and value.isdigit()
        and len(value) <= len(str(MAX_ID))
    ):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_ID:
        raise InvalidIdError(f"a task id is an integer from 1 to 2^63 - 1, not {shown(value)}")
    return int(value)  # a plain one: drivers write subclasses (enums) as they say themselves
