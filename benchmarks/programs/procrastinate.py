"""Procrastinate: the worker is its own command.

It polls, since only immediate jobs are notified.
"""

from __future__ import annotations

from collections.abc import Sequence

from procrastinate import App, PsycopgConnector

from benchmarks.notes import database_url
from benchmarks.programs import Program, main, run
from benchmarks.waiting import instant

app = App(connector=PsycopgConnector(conninfo=database_url()))


@app.task(name="note")
async def note_task(due: float) -> None:
    await run(due)


class ProcrastinateProgram(Program):
    async def prepare(self) -> None:
        await app.open_async()
        await app.schema_manager.apply_schema_async()

    async def schedule(self, due: float) -> None:
        await note_task.configure(schedule_at=instant(due)).defer_async(due=due)

    async def schedule_many(self, dues: Sequence[float]) -> None:
        # The same as `batch_defer_async`, which has one due time for all jobs.
        jobs = [note_task.configure(schedule_at=instant(due)).make_new_job(due=due) for due in dues]
        await app.job_manager.batch_defer_jobs_async(jobs)


if __name__ == "__main__":
    main(ProcrastinateProgram())
