"""Test limits of tags on real workers.

All workers together never exceed a limit, and they use its full capacity.
"""

from __future__ import annotations

import pytest

from tests.integration.conftest import Deploy
from tests.running import Deployment

pytestmark = pytest.mark.slow


def most_at_once(d: Deployment) -> int:
    running = most = 0
    for run in d.runs():
        running += 1 if run[1] == "began" else -1
        most = max(most, running)
    return most


@pytest.mark.quick
def test_the_next_task_starts_immediately_and_not_at_the_next_sweep(deploy: Deploy) -> None:
    d = deploy(sweep=60, _self_sweep_s=120, horizon=120)  # longer than the test
    d.delays.policies.set(tag="test.sleep", concurrency=1)
    d.worker(pool="threads", concurrency=4)
    tasks = [d.schedule("test.sleep", 1, body={"seconds": 0.01}) for _ in range(60)]
    d.wait_for(tasks, deadline_s=40)
    assert most_at_once(d) == 1
