"""What a task costs in processor time, in the workers and in Redis."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks import redis_server
from benchmarks.sides import Side

NAN = float("nan")


class Cost(NamedTuple):
    """For each task; not a number where it can not be had."""

    worker_ms: float
    redis_ms: float

    def __str__(self) -> str:
        return f"worker {self.worker_ms:.2f} ms, Redis {self.redis_ms:.3f} ms"


class Meter:
    """Begins to count when it is made."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._began = self._spent_s()

    def cost(self, tasks: int) -> Cost:
        return Cost(*((now - then) / tasks * 1000 for now, then in zip(self._spent_s(), self._began, strict=True)))

    def _spent_s(self) -> tuple[float, float]:
        worker_s = self._side.cpu_s()
        return NAN if worker_s is None else worker_s, redis_server.cpu_s() if redis_server.is_up() else NAN
