"""SAQ on Redis: a job's time is a whole second; the next one is taken here, since a task must not be early."""

from __future__ import annotations

import math
from typing import Any

from saq import Queue

from benchmarks.peers.program import Program, main, run
from benchmarks.where import redis_url

queue = Queue.from_url(redis_url())


async def note(context: dict[str, Any], *, due: float) -> None:
    await run(due)


settings = {"queue": queue, "functions": [note], "concurrency": 10}


class SaqProgram(Program):
    async def prepare(self) -> None:
        await queue.connect()

    async def schedule(self, due: float) -> None:
        await queue.enqueue("note", due=due, scheduled=math.ceil(due), ttl=-1)


if __name__ == "__main__":
    main(SaqProgram())
