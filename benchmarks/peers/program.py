"""The common part of the programs: `python -m benchmarks.peers.programs.NAME produce`.

A program reads its work from stdin. It runs in the environment of the peers, so this module uses
only the standard library. `programs/bullmq.mjs` is the equivalent in JavaScript.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.notes import compute, note, note_begin
from benchmarks.settings import computes, takes_s
from benchmarks.waiting import wall

#: Concurrent calls, for systems with an event loop and without a bulk call.
CONCURRENT_CALLS = 20


class Program(ABC):
    """The operations of a system.

    They are coroutines, since many systems have only these; those of other systems do not wait.
    """

    #: The maximum of tasks per call of `schedule_many`; None for no limit.
    chunk: int | None = 1000

    @abstractmethod
    async def prepare(self) -> None:
        """Create tables and open connections. The database, Redis and queues are empty."""

    @abstractmethod
    async def schedule(self, due: float) -> None:
        """Schedule one task in one call."""

    async def schedule_many(self, dues: Sequence[float]) -> None:
        """Schedule many tasks in the fastest way that the system's documentation shows."""
        for due in dues:
            await self.schedule(due)

    async def serve(self) -> None:
        """Begin to run tasks in this process, if the system has no workers."""
        raise NotImplementedError

    async def ended_at(self) -> float | None:
        """Return the time when the last task was settled, or None if only its start is known."""
        return None

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


def by_due(dues: Sequence[float]) -> Iterator[tuple[float, int]]:
    """Group tasks by due time, for systems whose bulk call has one due time."""
    for due, same in itertools.groupby(dues):
        yield due, sum(1 for _ in same)


class ProgramProducer:
    """Executes the commands from stdin, and prints the number of tasks and the duration."""

    def __init__(self, program: Program) -> None:
        self._program = program

    async def schedule(
        self, count: int, first: float, last: float, limit_s: float
    ) -> dict[str, Any]:
        """Schedule single tasks, due evenly from first to last, and stop at the time limit."""
        began, made = time.monotonic(), 0
        for due in spread(count, first, last):
            await self._program.schedule(due)
            made += 1
            if time.monotonic() - began > limit_s:
                break
        return {"tasks": made, "took_s": time.monotonic() - began}

    async def schedule_many(
        self, count: int, first: float, last: float, limit_s: float
    ) -> dict[str, Any]:
        began, made = time.monotonic(), 0
        dues = list(spread(count, first, last))
        step = self._program.chunk or count
        for start in range(0, count, step):
            batch = dues[start : start + step]
            await self._program.schedule_many(batch)
            made += len(batch)
            if time.monotonic() - began > limit_s:
                break
        return {"tasks": made, "took_s": time.monotonic() - began}

    async def steady(
        self, rate: int, batch: int, delays: Sequence[float], limit_s: float
    ) -> dict[str, Any]:
        """Schedule batches at a rate, and stop at the time limit."""
        began, made = wall(), 0
        while made < len(delays) and wall() - began < limit_s:
            await asyncio.sleep(max(began + made / rate - wall(), 0))
            now = wall()
            dues = [now + delay for delay in delays[made : made + batch]]
            await (
                self._program.schedule(dues[0]) if batch == 1 else self._program.schedule_many(dues)
            )
            made += batch
        return {"tasks": made, "took_s": wall() - began}

    async def serve(self) -> dict[str, Any]:
        await self._program.serve()
        return {}

    async def ended_at(self) -> dict[str, Any]:
        return {"at": await self._program.ended_at()}

    async def obey(self) -> None:
        await self._program.prepare()
        _say("ready")
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            order = json.loads(line)
            number = order.pop("number")
            answer = await getattr(self, order.pop("verb"))(**order)
            _say(f"answer {number} {json.dumps(answer)}")


def spread(count: int, first: float, last: float) -> Iterator[float]:
    step = (last - first) / max(count - 1, 1)
    return (first + number * step for number in range(count))


def _say(line: str) -> None:
    # The answer has its own line, whatever the system's library has printed.
    print(f"\n{line}", flush=True)


def main(program: Program) -> None:
    asyncio.run(ProgramProducer(program).obey() if sys.argv[1] == "produce" else program.work())
