"""This project, its durable Celery tasks, and bare Celery eta: `… produce NAME`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.programs import Program, main
from benchmarks.waiting import instant


class OursProgram(Program):
    chunk = None

    def __init__(self) -> None:
        from benchmarks import ours

        self._delays, self._tag, self._task = ours.delays, ours.TAG, ours.note_celery_task

    async def prepare(self) -> None:
        from delaytasks.runtime import runtime_of

        runtime_of(self._delays).clock.now()

    async def schedule(self, due: float) -> None:
        self._delays.schedule_delay(self._tag, {"due": due}, at=instant(due))

    async def schedule_many(self, dues: Sequence[float]) -> None:
        self._delays.schedule_many((self._tag, {"due": due}, instant(due)) for due in dues)


class DurableEtaProgram(OursProgram):
    """Celery tasks whose messages wait as rows; many are written in one transaction."""

    async def schedule(self, due: float) -> None:
        self._task.apply_async((due,), eta=instant(due))

    async def schedule_many(self, dues: Sequence[float]) -> None:
        from benchmarks.rows import Rows

        delays = self._delays
        with Rows(delays).session() as session, session.begin(), delays.transaction(session):
            for due in dues:
                await self.schedule(due)


class CeleryProgram(Program):
    def __init__(self) -> None:
        from benchmarks import bare

        self._app, self._task = bare.app, bare.note_task

    async def prepare(self) -> None:
        with self._app.pool.acquire() as connection:
            connection.ensure_connection(max_retries=1)

    async def schedule(self, due: float) -> None:
        self._task.apply_async((due,), eta=instant(due))


PROGRAMS = {"ours": OursProgram, "durable_eta": DurableEtaProgram, "celery": CeleryProgram}

if __name__ == "__main__":
    main(PROGRAMS[sys.argv[2]]())
