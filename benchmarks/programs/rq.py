"""RQ: a worker pool, one of whose workers moves due jobs once a second."""

from __future__ import annotations

from collections.abc import Sequence

from redis import Redis
from rq import Queue

from benchmarks.notes import redis_url, run
from benchmarks.programs import Program, main
from benchmarks.waiting import instant

#: A name, since the worker imports this module under it.
TASK = "benchmarks.programs.rq.note_task"


def note_task(due: float) -> None:
    run(due)


class RqProgram(Program):
    async def prepare(self) -> None:
        self._redis = Redis.from_url(redis_url())
        self._queue = Queue(connection=self._redis)

    async def schedule(self, due: float) -> None:
        self._queue.enqueue_at(instant(due), TASK, due, result_ttl=0)

    async def schedule_many(self, dues: Sequence[float]) -> None:
        with self._redis.pipeline() as pipeline:
            for due in dues:
                self._queue.enqueue_at(instant(due), TASK, due, result_ttl=0, pipeline=pipeline)
            pipeline.execute()


if __name__ == "__main__":
    main(RqProgram())
