"""Statistics of real workers are exact after a normal stop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from delaytasks import DelayedTask, Status
from delaytasks.statistics.reading import RunTotals
from tests.running import Deployment, combination

pytestmark = pytest.mark.slow


@pytest.fixture
def site(
    request: pytest.FixtureRequest, database: str, broker: str, tmp_path: Path
) -> Iterator[Deployment]:
    url = "memory://" if broker == "direct" else request.getfixturevalue(broker)
    settings: dict[str, Any] = {"timer": "direct"} if broker == "direct" else {}
    made = Deployment(tmp_path, request.getfixturevalue(database), url, **settings)
    yield made
    made.close()


def schedule_quiet(site: Deployment, count: int) -> list[DelayedTask]:
    tasks: list[DelayedTask] = []
    new: list[tuple[str, Any, Any]] = [("test.quiet", {}, number % 2) for number in range(count)]
    assert site.delays.schedule_many(new, on_batch=tasks.extend) == count
    return tasks


def totals(site: Deployment) -> dict[str, RunTotals]:
    return site.delays.statistics.totals(since="2h")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("database", "broker", "pool"),
    [
        combination("postgresql_url", "redis_url", "prefork", is_quick=True),
        combination("mysql_url", "rabbitmq_url", "threads"),
        combination("mysql_url", "redis_url", "prefork"),
        combination("postgresql_url", "rabbitmq_url", "solo"),
        combination("postgresql_url", "direct", "drain"),
    ],
)
def test_workers_that_stop_have_counted_every_run_once(site: Deployment, pool: str) -> None:
    if pool == "drain":
        workers = [site.drainer(), site.drainer()]
    else:
        workers = [site.worker(pool=pool), site.worker(pool=pool)]
    quiet = schedule_quiet(site, 300)
    waits = [site.schedule("test.wait", body={"seconds": 0.3}) for _ in range(20)]
    fails = [site.schedule("test.fail") for _ in range(10)]
    site.wait_for([*quiet, *waits])
    site.wait_for(fails, Status.FAILED)
    for worker in workers:
        worker.terminate()
    found = totals(site)
    assert {tag: (one.started, one.done, one.failed) for tag, one in found.items()} == {
        "test.quiet": (300, 300, 0),
        "test.wait": (20, 20, 0),
        "test.fail": (10, 0, 10),
    }
    assert found["test.wait"].duration_s > 20 * 0.3
    [group] = site.delays.statistics.failures()
    assert (group.tag, group.runs) == ("test.fail", 10)
    assert sum(group.hours.values()) == 10
    grouped = site.delays.find(**group.filters, status="FAILED", limit=100)
    assert {task.id for task in grouped} == {task.id for task in fails}
