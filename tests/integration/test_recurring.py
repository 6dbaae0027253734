"""Recurring schedules with real workers and beats, some of which are killed."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from delaytasks import DelayedTask, Status
from tests.running import Deployment, combinations
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


def tasks_of(site: Deployment, tag: str = "test.note") -> list[DelayedTask]:
    return list(site.delays.find(tag=tag, limit=1000).tasks)


def wait_for_runs(site: Deployment, count: int, is_declared: bool = False) -> None:
    def has_run() -> bool:
        return sum((run[0] == "declared") == is_declared for run in site.runs()) >= count

    wait_until(has_run, 30, lambda: f"{count} runs\n{site.logs()}", every_s=0.1)


@pytest.mark.parametrize(
    ("database", "broker"),
    combinations("postgresql-redis mysql-rabbitmq sqlite-redis postgresql-direct"),
)
def test_each_occurrence_runs_once_on_time_while_processes_are_killed(site: Deployment) -> None:
    first = [site.worker(pool="threads")]
    site.worker(pool="threads")
    if site.settings.get("timer") != "direct":
        first.append(site.beat())
        site.beat()
    site.delays.recurring.set("each second", "test.note", {"file": str(site.file)}, every="1s")
    wait_for_runs(site, 5)
    for process in first:
        process.kill()
    wait_for_runs(site, 15)
    site.delays.recurring.pause("each second")
    done = [task for task in tasks_of(site) if task.status is not Status.CANCELLED]
    site.wait_for(done)
    first_at = done[0].expected_time
    wanted = [first_at + timedelta(seconds=n) for n in range(len(done))]
    assert [task.expected_time for task in done] == wanted
    runs = Counter(run[0] for run in site.runs())
    assert all(runs[str(task.id)] <= task.runs for task in done), "the killed worker's only"
    assert not site.early()
    late_s = site.lateness_s()
    assert sorted(late_s)[len(late_s) // 2] < 0.5, late_s


@pytest.mark.quick
@pytest.mark.parametrize(("database", "broker"), [("postgresql", "redis")])
def test_a_worker_runs_what_its_code_declares_and_celery_tasks_that_recur(site: Deployment) -> None:
    module = site.folder / "declared_schedules_of_test.py"
    module.write_text(DECLARED.format(file=str(site.file)))
    site.conf["imports"] = ["tests.project", module.stem]
    in_the_worker: Any = SimpleNamespace(name="test.celery_note", apply_async=print)
    site.delays.recurring.set("celery", in_the_worker, {"args": [str(site.file)]}, every="1s")
    site.worker("-Q", f"default,{site.conf['task_default_queue']}", pool="solo")
    wait_for_runs(site, 3)
    wait_for_runs(site, 3, is_declared=True)
    found = {schedule.name: schedule.is_declared for schedule in site.delays.recurring.list()}
    assert found == {"celery": False, "test.declared": True}
    rows = {str(task.id) for task in tasks_of(site, "celery:test.celery_note")}
    ids = {run[0] for run in site.runs()} - {"declared"}
    assert ids <= rows, "the message has the id of the row"
