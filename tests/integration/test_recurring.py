"""Recurring schedules with real workers and beats, some of which are killed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from delaytasks import DelayedTask
from tests.running import Deployment
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
