"""This project with each timer, and bare Celery eta, with the interface of the peers:

`… ours produce SIDE`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import brokers, table
from benchmarks.peers.program import Program, main
from benchmarks.sides import Bare, Ours, OursDirect, OursInRedis, Side
from benchmarks.waiting import wait_until

#: The maximum time between the end of the last processor and its settlement.
SETTLE_S = 30.0
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
        if not isinstance(self._side, Ours):
            return None
        wait_until(lambda: not table.has_unfinished_due(), SETTLE_S, "the last settlement", 0.01)
        return table.last_settled_at()


if __name__ == "__main__":
    main(SideProgram(SIDES[sys.argv[2]]()))
