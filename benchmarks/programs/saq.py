"""SAQ on Redis: it polls for due tasks once a second."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from saq import Queue

from benchmarks.notes import redis_url
from benchmarks.programs import CONCURRENT_CALLS, Program, main, run

queue = Queue.from_url(redis_url())


async def note(context: dict[str, Any], *, due: float) -> None:
    await run(due)


settings = {"queue": queue, "functions": [note], "concurrency": 10}


class SaqProgram(Program):
    chunk = CONCURRENT_CALLS

    async def prepare(self) -> None:
        await queue.connect()

    async def schedule(self, due: float) -> None:
        await queue.enqueue("note", due=due, scheduled=due, ttl=-1)

    async def schedule_many(self, dues: Sequence[float]) -> None:
        await asyncio.gather(*map(self.schedule, dues))


if __name__ == "__main__":
    main(SaqProgram())
