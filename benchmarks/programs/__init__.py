"""The producer of a system: `python -m benchmarks.programs.NAME produce` reads orders from stdin.

Programs of other systems run in an environment of their own, so this module uses only the standard
library. `bullmq.mjs` is the equivalent in JavaScript. If a system has no command for its worker,
its program is also the worker: `… work`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from benchmarks.notes import compute, computes, note, note_begin, takes_s
from benchmarks.waiting import wall


class Program(ABC):
    """The operations of a system: coroutines, since many systems have only these."""

    #: The maximum of tasks per call of `schedule_many`; None for no limit.
    chunk: int | None = 1000

    async def prepare(self) -> None:  # noqa: B027
        """Create tables and open connections. The database, Redis and queues are empty."""

    @abstractmethod
    async def schedule(self, due: float) -> None:
        """Schedule one task in one call."""

    async def schedule_many(self, dues: Sequence[float]) -> None:
        """Schedule many tasks in the fastest way that the system's documentation shows."""
        for due in dues:
            await self.schedule(due)

    async def work(self) -> None:
        """Run a worker, if the system has no command for it."""
        raise NotImplementedError


async def run(due: float) -> None:
    """Run the task in a worker with an event loop. A task that computes blocks the loop."""
    began = wall()
    seconds = takes_s()
    if seconds:
        note_begin()
        if computes():
            compute(seconds)
        else:
            await asyncio.sleep(seconds)
    note(due, began)


class Producer:
    """Executes the orders, and answers each with the number of tasks and the duration."""

    def __init__(self, program: Program) -> None:
        self._program = program

    async def schedule(
        self, count: int, first: float, last: float, limit_s: float
    ) -> dict[str, Any]:
        """Schedule single tasks, due evenly from first to last, and stop at the time limit."""
        return await self._in_steps(1, count, first, last, limit_s)

    async def schedule_many(
        self, count: int, first: float, last: float, limit_s: float
    ) -> dict[str, Any]:
        return await self._in_steps(self._program.chunk or count, count, first, last, limit_s)

    async def _in_steps(
        self, step: int, count: int, first: float, last: float, limit_s: float
    ) -> dict[str, Any]:
        apart = (last - first) / max(count - 1, 1)
        dues = [first + number * apart for number in range(count)]
        began, made = wall(), 0
        while made < count and wall() - began <= limit_s:
            batch = dues[made : made + step]
            await self._schedule(batch)
            made += len(batch)
        return {"tasks": made, "took_s": wall() - began}

    async def steady(
        self, rate: int, batch: int, delays: Sequence[float], limit_s: float
    ) -> dict[str, Any]:
        """Schedule batches at a rate, and stop at the time limit."""
        began, made = wall(), 0
        while made < len(delays) and wall() - began < limit_s:
            await asyncio.sleep(max(began + made / rate - wall(), 0))
            now = wall()
            await self._schedule([now + delay for delay in delays[made : made + batch]])
            made += batch
        return {"tasks": made, "took_s": wall() - began}

    async def _schedule(self, dues: Sequence[float]) -> None:
        if len(dues) == 1:
            await self._program.schedule(dues[0])
        else:
            await self._program.schedule_many(dues)

    async def obey(self) -> None:
        await self._program.prepare()
        _say("ready")
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            order = json.loads(line)
            number = order.pop("number")
            answer = await getattr(self, order.pop("verb"))(**order)
            _say(f"answer {number} {json.dumps(answer)}")


def _say(line: str) -> None:
    # The answer has its own line, whatever the system's library has printed.
    print(f"\n{line}", flush=True)


def main(program: Program) -> None:
    asyncio.run(Producer(program).obey() if sys.argv[1] == "produce" else program.work())
