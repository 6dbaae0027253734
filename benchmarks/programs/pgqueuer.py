"""PgQueuer: the worker is `PgQueuer.run` with asyncpg and uvloop, as in its own benchmark."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from benchmarks.notes import database_url, is_one_at_a_time
from benchmarks.programs import Program, main, run
from benchmarks.waiting import wall

NAME = "note"
#: Its documentation recommends batches larger than 10 for short jobs.
BATCH = 200
#: Its default, for a process that runs one job at a time: the other jobs of a batch wait there.
SMALL_BATCH = 10


class PgQueuerProgram(Program):
    chunk = 10_000

    async def prepare(self) -> None:
        self._queries = Queries(AsyncpgDriver(await asyncpg.connect(database_url())))
        await self._queries.install()
        await self._queries.optimize_autovacuum()

    async def schedule(self, due: float) -> None:
        await self._queries.enqueue(NAME, repr(due).encode(), execute_after=_delay(due))

    async def schedule_many(self, dues: Sequence[float]) -> None:
        count = len(dues)
        payloads: list[bytes | None] = [repr(due).encode() for due in dues]
        await self._queries.enqueue(
            [NAME] * count, payloads, [0] * count, [_delay(due) for due in dues]
        )

    async def work(self) -> None:
        pgq = PgQueuer.from_asyncpg_connection(await asyncpg.connect(database_url()))

        @pgq.entrypoint(NAME)
        async def note_task(job: Job) -> None:
            assert job.payload is not None
            async with turn:
                await run(float(job.payload))

        turn = asyncio.Semaphore(1) if is_one_at_a_time() else nullcontext()
        await pgq.run(batch_size=SMALL_BATCH if is_one_at_a_time() else BATCH)


def _delay(due: float) -> timedelta:
    """Convert to a delay, since it does not accept due times."""
    return timedelta(seconds=due - wall())


if __name__ == "__main__":
    import sys

    import uvloop

    if sys.argv[1] == "work":
        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    main(PgQueuerProgram())
