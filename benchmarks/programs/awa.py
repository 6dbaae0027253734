"""awa-pg: the core is in Rust; the worker is `AsyncClient.start`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from awa import AsyncClient, Job

from benchmarks.notes import database_url
from benchmarks.programs import Program, by_due, main, run
from benchmarks.waiting import instant

QUEUE = "note"
#: Concurrent tasks per process, and the poll interval.
WORKERS, EVERY_MS = 100, 100


@dataclass
class AwaNote:
    due: float


class AwaProgram(Program):
    async def prepare(self) -> None:
        self._client = AsyncClient(database_url())
        await self._client.migrate()
        # A new deployment uses the queue storage, and the bulk call requires it.
        await self._client.install_queue_storage()

    async def schedule(self, due: float) -> None:
        await self._client.insert(AwaNote(due), queue=QUEUE, run_at=instant(due))

    async def schedule_many(self, dues: Sequence[float]) -> None:
        calls = [
            self._client.enqueue_many_copy([AwaNote(due)] * count, queue=QUEUE, run_at=instant(due))
            for due, count in by_due(dues)
        ]
        await asyncio.gather(*calls)

    async def work(self) -> None:
        client = AsyncClient(database_url(), max_connections=20)

        @client.task(AwaNote, queue=QUEUE)
        async def note_task(job: Job) -> None:
            await run(job.args.due)

        await client.start(
            [(QUEUE, WORKERS)], poll_interval_ms=EVERY_MS, promote_interval_ms=EVERY_MS
        )
        await asyncio.Event().wait()


if __name__ == "__main__":
    main(AwaProgram())
