"""APScheduler 3 on PostgreSQL: a scheduler in the process that adds the jobs, since no others can share its store."""

from __future__ import annotations

from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.background import BackgroundScheduler

from benchmarks.notes import run
from benchmarks.peers.program import Program, main
from benchmarks.waiting import instant
from benchmarks.where import database_url

TASK = "benchmarks.peers.programs.apscheduler:note_task"
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
            },  # its default leaves out what is late by more than a second
        )
        self._scheduler.start(paused=True)

    async def schedule(self, due: float) -> None:
        self._scheduler.add_job(TASK, "date", run_date=instant(due), args=(due,))

    async def serve(self) -> None:
        self._scheduler.resume()


if __name__ == "__main__":
    main(ApschedulerProgram())
