"""What a task costs in processor time, in the workers, in Redis and in the database's server."""

from __future__ import annotations

import math
from typing import NamedTuple

from benchmarks import machine, redis_server, table
from benchmarks.sides import Side

NAN = float("nan")
#: What a database's server is called; the work of SQLite is done by the workers.
_SERVERS = {"postgresql": ("postgres",), "mysql": ("mariadbd", "mysqld")}


class Cost(NamedTuple):
    """For each task; not a number where it can not be had."""

    worker_ms: float
    redis_ms: float
    database_ms: float

    @property
    def all_ms(self) -> float:
        return sum(ms for ms in self if not math.isnan(ms))

    def __str__(self) -> str:
        return f"worker {self.worker_ms:.2f} ms, Redis {self.redis_ms:.3f} ms, database {self.database_ms:.2f} ms"


class Meter:
    """Begins to count when it is made."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._began = self._spent_s()

    def cost(self, tasks: int) -> Cost:
        return Cost(
            *(
                (now - then) / tasks * 1000
                for now, then in zip(self._spent_s(), self._began, strict=True)
            )
        )

    def _spent_s(self) -> tuple[float, float, float]:
        worker_s = self._side.cpu_s()
        found = map(machine.usage_of, _SERVERS.get(table.backend(), ()))
        server = next((usage for usage in found if usage is not None), None)
        return (
            NAN if worker_s is None else worker_s,
            redis_server.cpu_s() if redis_server.is_up() else NAN,
            NAN if server is None else server.cpu_s,
        )
