"""Statistics of real workers are exact after a normal stop."""

from __future__ import annotations

from typing import Any

import pytest

from delaytasks import DelayedTask, Status
from tests.running import Deployment, combinations

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("database", "broker", "pool"),
    combinations(
        "postgresql-redis-prefork mysql-rabbitmq-threads postgresql-rabbitmq-solo "
        "postgresql-direct-drain"
    ),
)
def test_workers_that_stop_have_counted_every_run_once(site: Deployment, pool: str) -> None:
    workers = [site.drainer() if pool == "drain" else site.worker(pool=pool) for _ in range(2)]
    quiet: list[DelayedTask] = []
    new: list[Any] = [("test.quiet", {}, number % 2) for number in range(300)]
    site.delays.schedule_many(new, on_batch=quiet.extend)
    waits = [site.schedule("test.wait", body={"seconds": 0.3}) for _ in range(20)]
    fails = [site.schedule("test.fail") for _ in range(10)]
    site.wait_for([*quiet, *waits])
    site.wait_for(fails, Status.FAILED)
    for worker in workers:
        worker.terminate()
    found = site.delays.statistics.totals(since="2h")
    counts = {tag: (one.started, one.done, one.failed) for tag, one in found.items()}
    wanted = {"test.quiet": (300, 300, 0), "test.wait": (20, 20, 0), "test.fail": (10, 0, 10)}
    assert counts == wanted
    assert found["test.wait"].duration_s > 20 * 0.3
    [group] = site.delays.statistics.failures()
    assert (group.tag, group.runs) == ("test.fail", 10)
    assert sum(group.hours.values()) == 10
    grouped = site.delays.find(**group.filters, status="FAILED", limit=100)
    assert {task.id for task in grouped} == {task.id for task in fails}
