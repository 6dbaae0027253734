"""Values that are sampled while a case runs: queued messages and memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from benchmarks import brokers
from benchmarks.sides import Ours

LOOK_S = 0.1


@dataclass
class Memory:
    """Memory in megabytes."""

    values: list[float] = field(default_factory=list)

    @property
    def start(self) -> float:
        return self.values[0]

    @property
    def peak(self) -> float:
        return max(self.values)

    def __str__(self) -> str:
        return (
            f"{self.start:.0f} at the start, {self.peak:.0f} at most, {self.values[-1]:.0f} at "
            "the end"
        )


@dataclass
class Samples:
    """Samples of a worker and its broker; no values if they cannot be measured."""

    queued: list[int] = field(default_factory=lambda: [0])
    worker: Memory = field(default_factory=Memory)
    broker: Memory = field(default_factory=Memory)

    def forget_memory(self) -> None:
        """Discard the first samples, which measure the start of the process."""
        self.worker, self.broker = Memory(), Memory()


@contextmanager
def sampling(side: Ours) -> Iterator[Samples]:
    samples, is_over = Samples(), threading.Event()

    def look() -> None:
        queue = brokers.queue_name(side.timer)
        with brokers.counting(queue) as count:
            while not is_over.wait(LOOK_S):
                samples.queued.append(count())
                for memory, value in (
                    (samples.worker, side.rss_mb()),
                    (samples.broker, brokers.memory_mb()),
                ):
                    if value is not None:
                        memory.values.append(value)

    thread = threading.Thread(target=look, name="bench-samples", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        is_over.set()
        thread.join()
