"""Test concurrent rows, coroutines and batches in real workers, in each of the pools."""

from __future__ import annotations

from datetime import timedelta

import pytest

from delaytasks import DelayedTask, Status
from delaytasks.runtime import runtime_of
from tests.integration.conftest import Deploy
from tests.running import Deployment, combination
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

POOLS = [
    combination("postgresql", "redis", "prefork"),
    combination("postgresql", "redis", "threads"),
    combination("postgresql", "rabbitmq", "solo"),
    combination("mysql", "redis", "prefork"),
    combination("sqlite", "filesystem", "prefork"),
    combination("sqlite", "filesystem", "threads", is_quick=True),
    combination("sqlite", "filesystem", "solo"),
    combination("psycopg", "redis", "gevent"),
    combination("mysql", "rabbitmq", "gevent"),
]
in_each_pool = pytest.mark.parametrize(
    ("database", "pool"),
    [
        ("postgresql", "prefork"),
        ("postgresql", "threads"),
        ("postgresql", "solo"),
        ("psycopg", "gevent"),
    ],
)
WAITS = ["test.wait", "test.async"]


def began(d: Deployment) -> list[list[str]]:
    return [run for run in d.runs() if run[1] == "began"]


def ended(d: Deployment) -> list[list[str]]:
    return [run for run in d.runs() if run[1] == "ended"]


@pytest.mark.parametrize(("database", "broker", "pool"), POOLS)
def test_waiting_tasks_run_concurrently_in_each_pool(
    deploy: Deploy, database: str, broker: str, pool: str
) -> None:
    d = deploy(database, broker)
    d.worker(pool=pool)
    due = runtime_of(d.delays).clock.now() + timedelta(seconds=2)
    body = {"file": str(d.file), "seconds": 1}
    waiting = [d.delays.schedule_delay(WAITS[n % 2], body, at=due) for n in range(40)]
    together = [
        d.delays.schedule_delay("test.batch", {"file": str(d.file), "number": n}, at=due)
        for n in range(60)
    ]
    d.wait_for(waiting)
    d.wait_for(together[::2])
    d.wait_for(together[1::2], Status.FAILED)
    ends = [d.delays.get(task) for task in waiting]
    took = max(task.update_time for task in ends if task.update_time) - due
    assert took < timedelta(seconds=10), "one after another they would take 40 s, or 20 s by two"
    assert {task.runs for task in ends} == {1}
    runs = [run for run in began(d) if int(run[0]) in {task.id for task in waiting[::2]}]
    assert all(run[0] == run[3] for run in runs), "each has a request of its own"
    loops = {
        (run[2], run[3]) for run in began(d) if int(run[0]) in {task.id for task in waiting[1::2]}
    }
    assert len(loops) == len({process for process, _ in loops}), "one loop in a process"
    sizes = [int(run[0]) for run in d.runs() if run[1] == "together"]
    assert sum(sizes) == 60
    assert max(sizes) <= 40


@in_each_pool
@pytest.mark.parametrize("tag", WAITS)
def test_a_worker_that_stops_waits_for_its_concurrent_tasks(
    deploy: Deploy, database: str, pool: str, tag: str
) -> None:
    d = deploy(database)
    worker = d.worker(pool=pool)
    tasks = [d.schedule(tag, 0, body={"seconds": 3}) for _ in range(5)]
    wait_until(lambda: len(began(d)) == 5, 10, "them to begin")
    worker.terminate()
    assert [d.status(task) for task in tasks] == [Status.DONE] * 5
    assert len(ended(d)) == 5


@in_each_pool
def test_the_leases_of_long_concurrent_tasks_are_renewed(
    deploy: Deploy, database: str, pool: str
) -> None:
    d = deploy(database, lease=2)
    d.worker(pool=pool)
    tasks = [d.schedule(tag, 0, body={"seconds": 7}) for tag in WAITS]
    d.wait_for(tasks)
    assert [d.delays.get(task).runs for task in tasks] == [1, 1]
    assert len(began(d)) == len(ended(d)) == 2


def test_a_process_at_its_max_tasks_waits_for_its_concurrent_tasks(deploy: Deploy) -> None:
    d = deploy()
    d.worker("--max-tasks-per-child", "1", concurrency=1)
    tasks: list[DelayedTask] = []
    for _ in range(3):
        tasks.append(d.schedule("test.wait", 0, body={"seconds": 1}))
        wait_until(lambda: len(began(d)) == len(tasks), 15, "it to begin")
    d.wait_for(tasks)
    assert {d.delays.get(task).runs for task in tasks} == {1}
    assert len({run[2] for run in began(d)}) == 3
