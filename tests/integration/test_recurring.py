"""Recurring schedules with real workers and beats, some of which are killed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

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


@pytest.mark.quick
@pytest.mark.parametrize(("database", "broker"), [("postgresql", "redis")])
def test_a_worker_runs_what_its_code_declares_and_celery_tasks_that_recur(site: Deployment) -> None:
    module = site.folder / "declared_schedules_of_test.py"
    module.write_text(DECLARED.format(file=str(site.file)))
    site.conf["imports"] = ["tests.project", module.stem]
    in_the_worker: Any = SimpleNamespace(name="test.celery_note", apply_async=print)
    site.delays.recurring.set("celery", in_the_worker, {"args": [str(site.file)]}, every="1s")
    site.worker("-Q", f"default,{site.conf['task_default_queue']}", pool="solo")

    def has_run() -> bool:
        declared = sum(run[0] == "declared" for run in site.runs())
        return min(declared, len(site.runs()) - declared) >= 3

    wait_until(has_run, 30, site.logs, every_s=0.1)
    found = {schedule.name: schedule.is_declared for schedule in site.delays.recurring.list()}
    assert found == {"celery": False, "test.declared": True}
    tasks = site.delays.find(tag="celery:test.celery_note", limit=1000)
    rows = {str(task.id) for task in tasks}
    ids = {run[0] for run in site.runs()} - {"declared"}
    assert ids <= rows, "the message has the id of the row"
