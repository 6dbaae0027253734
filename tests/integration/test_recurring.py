"""Recurring schedules with real workers and beats, some of which are killed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from delaytasks import DelayedTask, Status
from tests.running import Deployment, combination
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

DECLARED = """
from delaytasks import current_delays, processor
from tests.project import note

@current_delays().recurring(every="1s", body={{"file": {file!r}}})
@processor("test.declared")
def declared(body):
    note(body, "declared")
"""


@pytest.fixture
def site(
    request: pytest.FixtureRequest, database: str, broker: str, tmp_path: Path
) -> Iterator[Deployment]:
    url = "memory://" if broker == "direct" else request.getfixturevalue(broker)
    settings: dict[str, Any] = {"timer": "direct"} if broker == "direct" else {}
    database_url = f"sqlite:///{tmp_path / 'test.sqlite3'}"
    if database != "sqlite":
        database_url = request.getfixturevalue(database)
    made = Deployment(tmp_path, database_url, url, **settings)
    yield made
    made.close()


def tasks_of(site: Deployment, tag: str = "test.note") -> list[DelayedTask]:
    return list(site.delays.find(tag=tag, limit=1000).tasks)


@pytest.mark.parametrize(
    ("database", "broker"),
    [
        combination("postgresql_url", "redis_url"),
        combination("mysql_url", "rabbitmq_url"),
        combination("sqlite", "redis_url"),
        combination("postgresql_url", "direct"),
    ],
)
def test_each_occurrence_runs_once_on_time_while_workers_and_beats_are_killed(
    site: Deployment,
) -> None:
    first = [site.worker(pool="threads")]
    site.worker(pool="threads")
    if site.settings.get("timer") != "direct":
        first.append(site.beat())
        site.beat()
    site.delays.recurring.set("each second", "test.note", {"file": str(site.file)}, every="1s")
    wait_until(lambda: len(site.runs()) >= 5, 30, lambda: f"five runs\n{site.logs()}", every_s=0.1)
    for process in first:
        process.kill()
    wait_until(lambda: len(site.runs()) >= 15, 30, lambda: f"15 runs\n{site.logs()}", every_s=0.1)
    site.delays.recurring.pause("each second")
    done = [task for task in tasks_of(site) if task.status is not Status.CANCELLED]
    site.wait_for(done)
    assert [task.expected_time for task in done] == [
        done[0].expected_time + timedelta(seconds=n) for n in range(len(done))
    ]
    runs = Counter(run[0] for run in site.runs())
    assert all(runs[str(task.id)] <= task.runs for task in done), "the killed worker's only"
    assert not site.early()
    on_time = [run for run in site.runs() if int(run[1]) < 500_000]
    assert len(on_time) > len(site.runs()) / 2, site.runs()


@pytest.mark.quick
def test_a_worker_stores_and_runs_the_schedules_that_its_code_declares(
    postgresql_url: str, redis_url: str, tmp_path: Path
) -> None:
    conf = {"imports": ["tests.project", "declared_schedules_of_test"]}
    site = Deployment(tmp_path, postgresql_url, redis_url, conf)
    module = tmp_path / "declared_schedules_of_test.py"
    module.write_text(DECLARED.format(file=str(site.file)))
    try:
        worker = site.worker(pool="solo")
        wait_until(
            lambda: len(site.runs()) >= 3, 30, lambda: f"three runs\n{site.logs()}", every_s=0.1
        )
        [schedule] = site.delays.recurring.list()
        assert schedule.is_declared
        worker.terminate()
    finally:
        site.close()


@pytest.mark.quick
def test_a_celery_task_recurs(postgresql_url: str, redis_url: str, tmp_path: Path) -> None:
    site = Deployment(tmp_path, postgresql_url, redis_url)
    site.delays.recurring.set(
        "celery", _Named("test.celery_note"), {"args": [str(site.file)]}, every="1s"
    )
    try:
        site.worker("-Q", f"default,{site.conf['task_default_queue']}", pool="solo")
        wait_until(
            lambda: len(site.runs()) >= 3, 30, lambda: f"three runs\n{site.logs()}", every_s=0.1
        )
        rows = {str(task.id) for task in tasks_of(site, "celery:test.celery_note")}
        assert {run[0] for run in site.runs()} <= rows, "the message has the id of the row"
    finally:
        site.close()


class _Named:
    """A Celery task that only the worker has."""

    def __init__(self, name: str) -> None:
        self.name = name

    def apply_async(self) -> None: ...
