"""Workers that are killed while they publish the messages of rows lose none."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from delaytasks import Status
from tests.integration.durable_eta.conftest import COMBINATIONS, begin, end, url_of
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
COUNT = 600
KILLS = 3


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_each_task_runs_although_the_workers_that_publish_are_killed(
    combination: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    database, broker = combination.split("-")
    broker_url, redis_url = (request.getfixturevalue(f"{name}_url") for name in (broker, "redis"))
    database_url = url_of(database, tmp_path, request)
    project = begin(tmp_path, database_url, broker_url, redis_url, task_ignore_result=True)
    try:
        note, file = project.task("note"), project.deployment.file
        queue = f"{project.deployment.settings['namespace']}.default"
        due = datetime.now(timezone.utc) + timedelta(seconds=8)
        for number in range(COUNT):
            note.apply_async((str(file), str(number)), eta=due)
        project.start_worker("-Q", project.app.conf.task_default_queue)
        publisher = project.start_worker("-Q", queue)

        def count(status: Status) -> int:
            return sum(row.status is status for row in project.rows("note"))

        for kill in range(1, KILLS + 1):
            aim = COUNT * kill // (KILLS + 1)
            wait_until(lambda: count(Status.DONE) >= aim, 60, "messages to be published")  # noqa: B023
            publisher.kill()
            publisher = project.start_worker("-Q", queue)

        wait_until(lambda: count(Status.DONE) == COUNT, 60, "each row to be DONE")
        wait_until(
            lambda: set(file.read_text().split()) == {str(number) for number in range(COUNT)},
            60,
            lambda: f"each task to run: {len(set(file.read_text().split()))} of {COUNT} have run",
        )
    finally:
        end(project)
