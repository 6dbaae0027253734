"""The CPU time of a task in the workers, in Redis and in the database server."""

from __future__ import annotations

import math
from typing import NamedTuple

from benchmarks import machine, redis_server, table
from benchmarks.sides import Side

NAN = float("nan")
#: The program names of database servers. SQLite's work is part of the workers.
_SERVERS = {"postgresql": ("postgres",), "mysql": ("mariadbd", "mysqld")}


class Cost(NamedTuple):
    """CPU time per task; NaN if it cannot be measured."""

    worker_ms: float
    redis_ms: float
    database_ms: float

    @property
    def all_ms(self) -> float:
        return sum(ms for ms in self if not math.isnan(ms))

    def __str__(self) -> str:
        return (
            f"worker {self.worker_ms:.2f} ms, Redis {self.redis_ms:.3f} ms, database "
            f"{self.database_ms:.2f} ms"
        )


class Meter:
    """Measures from its creation on."""

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
