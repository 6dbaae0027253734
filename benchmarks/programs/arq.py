"""arq: a worker polls for due tasks, and fetches up to five times `max_jobs` per poll."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from arq import create_pool, func
from arq.connections import RedisSettings

from benchmarks.notes import redis_url
from benchmarks.programs import CONCURRENT_CALLS, Program, main, run
from benchmarks.waiting import instant


async def note_task(context: dict[Any, Any], due: float) -> None:
    await run(due)


class WorkerSettings:
    functions = [func(note_task, name="note")]
    redis_settings = RedisSettings.from_dsn(redis_url())
    max_jobs = 100
    poll_delay = 0.1
    keep_result = 0


class ArqProgram(Program):
    chunk = CONCURRENT_CALLS

    async def prepare(self) -> None:
        self._pool = await create_pool(WorkerSettings.redis_settings)

    async def schedule(self, due: float) -> None:
        await self._pool.enqueue_job("note", due, _defer_until=instant(due))

    async def schedule_many(self, dues: Sequence[float]) -> None:
        await asyncio.gather(*map(self.schedule, dues))


if __name__ == "__main__":
    main(ArqProgram())
