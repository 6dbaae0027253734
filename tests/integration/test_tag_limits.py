"""Test limits of tags on real workers.

All workers together never exceed a limit, and they use its full capacity.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from delaytasks import DelayedTask, Status
from delaytasks.runtime import runtime_of
from tests.integration.conftest import Deploy
from tests.running import Deployment
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

#: These intervals are longer than the tests, so no sweep takes part.
NO_SWEEP: dict[str, Any] = {"sweep": 60, "_self_sweep_s": 120, "horizon": 120}


def schedule(
    d: Deployment, count: int, seconds: float = 0.05, delay: float = 2, **options: Any
) -> list[DelayedTask]:
    body = {"seconds": seconds}
    return [d.schedule("test.sleep", delay, body=body, **options) for _ in range(count)]


def most_at_once(d: Deployment) -> int:
    running = most = 0
    for run in d.runs():
        running += 1 if run[1] == "began" else -1
        most = max(most, running)
    return most


def test_one_process_with_concurrent_tasks_uses_all_slots(deploy: Deploy) -> None:
    d = deploy(**NO_SWEEP)
    d.delays.policies.set(tag="test.wait", concurrency=10)
    d.worker(pool="prefork", concurrency=1)
    tasks = [d.schedule("test.wait", 2, body={"seconds": 0.2}) for _ in range(80)]
    d.wait_for(tasks, deadline_s=20)
    assert 8 <= most_at_once(d) <= 10


@pytest.mark.quick
def test_the_next_task_starts_immediately_and_not_at_the_next_sweep(deploy: Deploy) -> None:
    d = deploy(**NO_SWEEP)
    d.delays.policies.set(tag="test.sleep", concurrency=1)
    d.worker(pool="threads", concurrency=4)
    tasks = schedule(d, 60, seconds=0.01, delay=1)
    d.wait_for(tasks, deadline_s=40)
    assert most_at_once(d) == 1


def test_another_worker_runs_the_waitlist_that_a_stopped_worker_leaves(deploy: Deploy) -> None:
    d = deploy(**NO_SWEEP)
    d.delays.policies.set(tag="test.sleep", concurrency=1)
    first = d.worker(pool="threads", concurrency=2)
    second = d.worker("-Q", d.settings["namespace"] + ".mail", pool="threads", concurrency=2)
    tasks = schedule(d, 80, seconds=0.1, delay=1)
    wait_until(lambda: len(d.runs()) > 10, 15, "some of them to run")
    runtime = runtime_of(d.delays)
    queue, control = runtime.publisher.queue("default").name, runtime.celery.control
    assert control.add_consumer(queue, destination=[d.node(1)], reply=True, timeout=10, limit=1)
    # The second worker must learn that it serves the queue. It has not found a row on the waitlist.
    time.sleep(2)
    first.terminate()
    assert any(d.status(task) is Status.HELD for task in tasks)
    assert not second.ended()
    d.wait_for(tasks, deadline_s=20)
    assert most_at_once(d) == 1
