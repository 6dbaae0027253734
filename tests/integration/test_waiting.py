"""Test concurrent rows, coroutines, batches and limits in real workers, in each of the pools."""

from __future__ import annotations

from datetime import timedelta

import pytest

from delaytasks import DelayedTask, Status
from tests.integration.conftest import Deploy
from tests.running import Deployment, combinations
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

POOLS = combinations("sqlite-filesystem-threads postgresql-rabbitmq-solo mysql-redis-prefork")
POOLS += combinations("psycopg-redis-gevent")
in_each_pool = pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
WAITS = ["test.wait", "test.async"]


@pytest.mark.parametrize(("database", "broker", "pool"), POOLS)
def test_waiting_tasks_run_concurrently_in_each_pool(site: Deployment, pool: str) -> None:
    d = site
    d.worker(pool=pool)
    due = d.now() + timedelta(seconds=2)
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
    in_threads = {str(task.id) for task in waiting[::2]}
    runs = [run for run in d.runs("began") if run[0] in in_threads]
    assert all(run[0] == run[3] for run in runs), "each has a request of its own"
    loops = {(run[2], run[3]) for run in d.runs("began") if run[0] not in in_threads}
    assert len(loops) == len({process for process, _ in loops}), "one loop in a process"
    sizes = [int(run[0]) for run in d.runs("together")]
    assert sum(sizes) == 60
    assert max(sizes) <= 40


@in_each_pool
def test_long_concurrent_tasks_keep_their_leases_and_a_worker_that_stops_waits_for_them(
    deploy: Deploy, pool: str
) -> None:
    d = deploy("psycopg" if pool == "gevent" else "postgresql", lease=2)
    worker = d.worker(pool=pool)
    tasks = [d.schedule(tag, 0, body={"seconds": 7}) for tag in WAITS]
    d.wait_for(tasks)
    assert [d.delays.get(task).runs for task in tasks] == [1, 1]
    tasks = [d.schedule(tag, 0, body={"seconds": 1.5}) for tag in WAITS for _ in range(3)]
    wait_until(lambda: len(d.runs("began")) == 8, 10, "them to begin")
    worker.terminate()
    assert [d.status(task) for task in tasks] == [Status.DONE] * 6
    assert len(d.runs("began")) == len(d.runs("ended")) == 8


def test_a_process_at_its_max_tasks_waits_for_its_concurrent_tasks(deploy: Deploy) -> None:
    d = deploy()
    d.worker("--max-tasks-per-child", "1", concurrency=1)
    tasks: list[DelayedTask] = []
    for _ in range(3):
        tasks.append(d.schedule("test.wait", 0, body={"seconds": 1}))
        wait_until(lambda: len(d.runs("began")) == len(tasks), 15, "it to begin")
    d.wait_for(tasks)
    assert {d.delays.get(task).runs for task in tasks} == {1}
    assert len({run[2] for run in d.runs("began")}) == 3


# -- limits of tags ------------------------------------------------------------------------------


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
