"""APScheduler 3 on PostgreSQL: the scheduler runs in the process that adds jobs.

No other process can share its store.
"""

from __future__ import annotations

from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.background import BackgroundScheduler

from benchmarks.notes import database_url, run
from benchmarks.programs import Program, main
from benchmarks.waiting import instant

TASK = "benchmarks.programs.apscheduler:note_task"
THREADS = 20


def note_task(due: float) -> None:
    run(due)


class ApschedulerProgram(Program):
    async def prepare(self) -> None:
        url = database_url().replace("postgresql://", "postgresql+psycopg2://", 1)
        self._scheduler = BackgroundScheduler(
            timezone="UTC",
            jobstores={"default": SQLAlchemyJobStore(url=url)},
            executors={"default": ThreadPoolExecutor(THREADS)},
            job_defaults={
                "misfire_grace_time": None
            },  # by default, it drops jobs that are late by more than a second
        )
        self._scheduler.start(paused=True)

    async def schedule(self, due: float) -> None:
        self._scheduler.add_job(TASK, "date", run_date=instant(due), args=(due,))

    async def serve(self) -> None:
        self._scheduler.resume()


if __name__ == "__main__":
    main(ApschedulerProgram())
