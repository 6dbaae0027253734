"""A worker's coroutines see Celery's current task, and lazy results fail their tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from delaytasks import Status
from tests.integration.test_worker import Deploy, deploy
from tests.waiting import SLACK_S

pytestmark = pytest.mark.slow

__all__ = ["deploy"]
PROJECT = """
import asyncio
from celery import current_task
from delaytasks import processor
from tests.project import note

@processor("coroutine.retry")
async def ask(body, task):
    await asyncio.sleep(0.01)
    note(body, task.id, task.attempts, current_task.name, current_task.request.id)
    if task.attempts < 3:
        raise current_task.retry(countdown=0)

@processor("lazy.result")
def lazy(body, task):
    return (note(body, each) for each in "abc")
"""


@pytest.mark.parametrize("pool", ["prefork", pytest.param("threads", marks=pytest.mark.quick)])
def test_a_coroutine_retries_as_a_celery_task_does(
    deploy: Deploy, tmp_path: Path, pool: str
) -> None:
    (tmp_path / "coroutines.py").write_text(PROJECT)
    d = deploy("sqlite", "filesystem")
    d.conf["imports"] = ["coroutines"]
    d.worker(pool=pool)
    tasks = [d.schedule("coroutine.retry") for _ in range(5)]
    lazy = d.schedule("lazy.result")
    d.wait_for(tasks, deadline_s=10 + SLACK_S)
    d.wait_for([lazy], Status.FAILED, deadline_s=10 + SLACK_S)
    assert "returned an object of type generator" in (d.delays.get(lazy).error or "")
    assert sorted(d.runs()) == sorted(
        [str(task.id), str(attempt), "coroutine.retry", str(task.id)]
        for task in tasks
        for attempt in (1, 2, 3)
    )
