"""Dramatiq on Redis: workers fetch messages from a delay queue and hold them until they are due."""

from __future__ import annotations

import math

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from benchmarks.notes import redis_url, run
from benchmarks.programs import Program, main
from benchmarks.waiting import wall

dramatiq.set_broker(RedisBroker(url=redis_url()))


@dramatiq.actor
def note_task(due: float) -> None:
    run(due)


class DramatiqProgram(Program):
    async def prepare(self) -> None:
        dramatiq.get_broker().flush_all()

    async def schedule(self, due: float) -> None:
        delay_ms = max(math.ceil((due - wall()) * 1000), 0)
        note_task.send_with_options(args=(due,), delay=delay_ms)


if __name__ == "__main__":
    main(DramatiqProgram())
