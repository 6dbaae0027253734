"""Test how workers stop.

A worker finishes its running rows and immediately returns its held rows; the leases of a killed
worker expire.
"""

from __future__ import annotations

import signal
import time
from datetime import timedelta

import pytest

from delaytasks import DelayedTask, NewTask, Status
from tests.conformance.test_timers import ALONE
from tests.integration.conftest import Deploy
from tests.running import Deployment, Process
from tests.waiting import SLACK_S, wait_until

pytestmark = pytest.mark.slow


def asleep(d: Deployment, seconds: float) -> DelayedTask:
    """Schedule a task that runs for `seconds` seconds, and wait until it has begun."""
    task = d.schedule("test.sleep", body={"seconds": seconds})
    wait_until(lambda: [run[0] for run in d.runs("began")] == [str(task.id)], 20, d.logs)
    return task


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_after_sigterm_a_worker_ends_its_task_and_returns_others(deploy: Deploy, pool: str) -> None:
    """The worker itself returns its rows: leases are long, and no sweep runs during the test."""
    d = deploy(**ALONE, lease=60)
    d.sweep()
    worker = d.worker(pool=pool, concurrency=1)
    d.wait_for([d.schedule()])
    due = d.now() + timedelta(seconds=0.3)
    # The worker claims these rows as one chunk, whose first row takes four seconds.
    behind: list[DelayedTask] = []
    new = [NewTask("test.sleep", {"file": str(d.file), "seconds": 4}, at=due, priority=9)]
    new += [NewTask("test.note", {"file": str(d.file)}, at=due) for _ in range(5)]
    d.delays.schedule_many(new, on_batch=behind.extend)
    long = behind.pop(0)
    held = [d.schedule(delay=8) for _ in range(5)]
    wait_until(lambda: d.runs("began"), 20, d.logs)
    worker.signal(signal.SIGTERM)
    wait_until(lambda: {*map(d.status, behind)} == {Status.NOT_COMPLETE}, 3, "the rest to return")
    assert d.status(long) is Status.RUNNING
    wait_until(worker.ended, 20, f"the worker to end\n{worker.log()}")
    done = d.delays.get(long)
    assert (done.status, done.runs, done.lapses) == (Status.DONE, 1, 0)
    d.worker()
    d.wait_for([*behind, *held], deadline_s=25)
    assert {d.delays.get(task).runs for task in [*behind, *held]} == {1}


@pytest.mark.parametrize("exits", [False, True], ids=["returns", "exits"])
def test_a_child_of_a_processor_does_not_go_on_as_a_process_of_the_pool(
    deploy: Deploy, exits: bool
) -> None:
    """Otherwise it would run the rest of the chunk, and the worker could not stop."""
    d = deploy(**ALONE)
    due, rows = d.now() + timedelta(seconds=3), list[DelayedTask]()
    body = {"file": str(d.file), "exits": exits}
    new = [NewTask("test.fork", body, at=due, priority=9)]
    new += [NewTask("test.note", {"file": str(d.file)}, at=due) for _ in range(5)]
    d.delays.schedule_many(new, on_batch=rows.extend)
    worker = d.worker(concurrency=1)
    d.wait_for(rows)
    wait_until(
        lambda: f"task {rows[0].id} (tag 'test.fork') forked" in worker.log(), 10, "the line"
    )
    assert len(d.runs("began")) == 2, "in both processes"
    assert sorted(int(run[0]) for run in d.runs() if run[1] != "began") == [
        row.id for row in rows[1:]
    ]
    worker.signal(signal.SIGTERM)
    wait_until(worker.ended, 20, f"the worker to end\n{worker.log()}")


def quit_or_kill(worker: Process, number: signal.Signals) -> None:
    if number is signal.SIGKILL:
        worker.kill()
        return
    worker.signal(number)
    wait_until(worker.ended, 20, f"the worker to end\n{worker.log()}")


@pytest.mark.parametrize(
    ("pool", "number"),
    [
        ("prefork", signal.SIGQUIT), ("prefork", signal.SIGKILL), ("threads", signal.SIGKILL),
        ("solo", signal.SIGKILL),
    ],
    ids=["prefork-QUIT", "prefork-KILL", "threads-KILL", "solo-KILL"],
)  # fmt: skip
def test_killed_workers_tasks_run_again(deploy: Deploy, pool: str, number: signal.Signals) -> None:
    d = deploy(lease=2)
    for _ in range(2):
        d.worker(pool=pool, concurrency=2)
    task = asleep(d, 60)
    # The only process of a solo worker sleeps, so that it would run none of these.
    held = [d.schedule(delay=1.5 + n / 20) for n in range(30 if pool != "solo" else 0)]
    worker = d.at_work(task)
    began = time.monotonic()
    quit_or_kill(worker, number)
    wait_until(lambda: len(d.runs("began")) == 2, 30, d.logs)
    assert time.monotonic() - began < d.r2_s() + SLACK_S
    again = d.delays.get(task)
    assert (again.runs, again.lapses) == (2, 1)
    d.wait_for(held)
    assert max(d.lateness_s(), default=0) < d.r1_s() + SLACK_S
    noted = [run[0] for run in d.runs() if run[1].isdigit()]
    assert len(noted) == len(set(noted)) == len(held)


def test_tasks_of_a_killed_worker_run_again_before_their_leases_end(deploy: Deploy) -> None:
    d = deploy("postgresql", lease=300)
    for _ in range(2):
        d.worker(concurrency=1)
    task = asleep(d, 60)
    d.at_work(task).kill()
    wait_until(lambda: len(d.runs("began")) == 2, 15 + d.r1_s() + SLACK_S, d.logs)
    again = d.delays.get(task)
    assert (again.runs, again.lapses) == (2, 1)


def test_celerys_soft_shutdown_waits_for_running_tasks(deploy: Deploy) -> None:
    d = deploy(conf={"worker_soft_shutdown_timeout": 6}, lease=60)
    worker = d.worker(concurrency=1)
    task, held = asleep(d, 4), d.schedule(delay=3)
    quit_or_kill(worker, signal.SIGQUIT)
    assert "soft shutdown, running tasks have 6 seconds" in worker.log()
    done = d.delays.get(task)
    assert (done.status, done.runs) == (Status.DONE, 1), worker.log()
    assert d.status(held) is Status.NOT_COMPLETE, "nothing new begins meanwhile"
