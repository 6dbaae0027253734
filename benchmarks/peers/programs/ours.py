"""This project with each timer, and bare Celery eta, with the interface of the peers:

`… ours produce SIDE`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import brokers, table
from benchmarks.peers.program import Program, main
from benchmarks.sides import Bare, Ours, OursDirect, OursInRedis, Side

SIDES = {made.name: made for made in (Ours, OursInRedis, OursDirect, Bare)}


class SideProgram(Program):
    chunk = None

    def __init__(self, side: Side) -> None:
        self._side = side

    async def prepare(self) -> None:
        if isinstance(self._side, Ours):
            table.make()
        brokers.clear()
        self._side.connect()

    async def schedule(self, due: float) -> None:
        self._side.schedule(due)

    async def schedule_many(self, dues: Sequence[float]) -> None:
        self._side.schedule_many(dues)

    async def ended_at(self) -> float | None:
        return table.last_settled_at() if isinstance(self._side, Ours) else None


if __name__ == "__main__":
    main(SideProgram(SIDES[sys.argv[2]]()))
