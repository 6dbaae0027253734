"""Delayed tasks do not need Celery's remote control, which obeys every client of the broker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from delaytasks import Status
from delaytasks.runtime import runtime_of
from tests.running import Deployment
from tests.services import RedisServer
from tests.waiting import wait_until


def test_without_remote_control_tasks_run_and_no_message_shuts_a_worker_down(
    tmp_path: Path, postgresql_url: str, start_redis: Callable[[], RedisServer]
) -> None:
    d = Deployment(
        tmp_path, postgresql_url, start_redis().url, {"worker_enable_remote_control": False}
    )
    try:
        worker, delays = d.worker(ready_s=90), d.delays
        # The test acts as an attacker. A worker that accepts commands would stop before it runs the
        # tasks that are scheduled after the command.
        runtime_of(delays).celery.control.shutdown()
        tasks = [d.schedule(delay=0.2) for _ in range(3)]
        wait_until(
            lambda: {delays.get(task).status for task in tasks} == {Status.DONE},
            60,
            "the tasks to be done",
        )
        assert not worker.ended()
        assert "remote shutdown" not in worker.log()
    finally:
        d.close()
