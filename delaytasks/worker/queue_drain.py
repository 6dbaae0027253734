"""The drain of one queue: its overdue rows are claimed from the table, chunk after chunk."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from delaytasks.core.clock import monotonic

#: A drain chunk that takes longer is held up by a slow task, so that other processes drain the
#: same queue as well. The bound is several time budgets, so that a quick chunk on a busy machine
#: does not count as held up.
HELD_UP_S = 0.25


class DrainChunk(NamedTuple):
    """A chunk of a drain that a process works on."""

    sent_at: float
    #: How many times the drain had been started by then.
    starts: int


@dataclass
class QueueDrain:
    """A queue that is drained by one chunk at first, and by all processes once it proves deep.

    A chunk that a slow task holds up says nothing about the queue. Meanwhile as many other
    processes look at the queue as there are chunks held up. This finds all processes that are
    needed soon, and it costs few claims if the queue is empty.
    """

    priorities: set[int]
    #: The chunks that processes work on, by number.
    chunks: dict[int, DrainChunk] = field(default_factory=dict)
    is_deep: bool = False
    #: How many times the drain was started. A chunk that was sent before the last start may have
    #: read the table too early.
    starts: int = 0

    def wants_chunk(self) -> bool:
        """Whether the pool should get another chunk of this drain now."""
        began_after = monotonic() - HELD_UP_S
        quick = sum(chunk.sent_at > began_after for chunk in self.chunks.values())
        return self.is_deep or quick < max(len(self.chunks) - quick, 1)

    def begin_chunk(self, number: int) -> None:
        self.chunks[number] = DrainChunk(monotonic(), self.starts)

    def extra_chunk_in_s(self) -> float:
        """Return in how many seconds the next one of its chunks counts as held up."""
        now = monotonic()
        waits = (chunk.sent_at + HELD_UP_S - now for chunk in self.chunks.values())
        return min((wait_s for wait_s in waits if wait_s >= 0), default=inf)
