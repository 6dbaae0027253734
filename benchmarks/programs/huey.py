"""huey on Redis: its scheduler moves due tasks once a second, the shortest interval it allows."""

from __future__ import annotations

from huey import RedisHuey

from benchmarks.notes import redis_url, run
from benchmarks.programs import Program, main
from benchmarks.waiting import instant

huey = RedisHuey("bench", url=redis_url(), results=False)


@huey.task(name="note")
def note_task(due: float) -> None:
    run(due)


class HueyProgram(Program):
    async def prepare(self) -> None:
        huey.pending_count()

    async def schedule(self, due: float) -> None:
        note_task.schedule((due,), eta=instant(due))


if __name__ == "__main__":
    # A task is named by its module, which has to be the one that the consumer imports.
    from benchmarks.programs import huey as same

    main(same.HueyProgram())
