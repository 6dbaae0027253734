"""Test how workers stop.

A worker finishes its running rows and immediately returns its held rows; the leases of a killed
worker expire.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest

from chaos.pids import children_of, is_alive
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


def chunk(d: Deployment, *first: NewTask) -> list[DelayedTask]:
    """Schedule tasks that a worker claims as one chunk, which five quick ones follow."""
    due, made = d.now() + timedelta(seconds=1), list[DelayedTask]()
    new = [
        one._replace(at=due, priority=9, body={"file": str(d.file), **one.body}) for one in first
    ]
    new += [NewTask("test.note", {"file": str(d.file)}, at=due) for _ in range(5)]
    d.delays.schedule_many(new, on_batch=made.extend)
    return made


def stop(worker: Process, number: signal.Signals = signal.SIGTERM) -> None:
    worker.signal(number)
    wait_until(worker.ended, 20, lambda: f"the worker to end\n{worker.log()}")


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_after_sigterm_a_worker_ends_its_task_and_returns_others(deploy: Deploy, pool: str) -> None:
    """The worker itself returns its rows: leases are long, and no sweep runs during the test."""
    d = deploy(**ALONE, lease=60)
    d.sweep()
    worker = d.worker(pool=pool, concurrency=1)
    d.wait_for([d.schedule()])
    long, *behind = chunk(d, NewTask("test.sleep", {"seconds": 4}))
    held = [d.schedule(delay=8) for _ in range(5)]
    wait_until(lambda: d.runs("began"), 20, d.logs)
    worker.signal(signal.SIGTERM)
    wait_until(lambda: {*map(d.status, behind)} == {Status.NOT_COMPLETE}, 3, "the rest to return")
    assert d.status(long) is Status.RUNNING
    # A worker that stops on Redis has already requested one more message, which must not be lost.
    later = [d.schedule() for _ in range(5)]
    wait_until(worker.ended, 20, f"the worker to end\n{worker.log()}")
    done = d.delays.get(long)
    assert (done.status, done.runs, done.lapses) == (Status.DONE, 1, 0)
    d.worker()
    others = [*behind, *held, *later]
    d.wait_for(others, deadline_s=25)
    assert {d.delays.get(task).runs for task in others} == {1}


def test_a_child_of_a_processor_does_not_go_on_as_a_process_of_the_pool(deploy: Deploy) -> None:
    """Otherwise it would run the rest of the chunk, and the worker could not stop."""
    d = deploy(**ALONE)
    forks = [NewTask("test.fork", {"exits": exits}) for exits in (False, True)]
    worker, rows = d.worker(concurrency=1), chunk(d, *forks)
    d.wait_for(rows)
    for row in rows[:2]:
        worker.wait_for(f"task {row.id} (tag 'test.fork') forked", 10)
    assert len(d.runs("began")) == 4, "each in both processes"
    noted = sorted(int(run[0]) for run in d.runs() if run[1] != "began")
    assert noted == [row.id for row in rows[2:]]
    stop(worker)


@pytest.mark.parametrize(
    ("pool", "number", "lease"),
    [
        ("prefork", signal.SIGQUIT, 2), ("prefork", signal.SIGKILL, 300),
        ("threads", signal.SIGKILL, 2), ("solo", signal.SIGKILL, 2),
    ],
)  # fmt: skip
def test_killed_workers_tasks_run_again(
    deploy: Deploy, pool: str, number: signal.Signals, lease: int
) -> None:
    """Those of a prefork worker run again before their leases end, if it is silent for 15 s."""
    d = deploy(lease=lease)
    for _ in range(2):
        d.worker(pool=pool, concurrency=2)
    task = asleep(d, 60)
    # The only process of a solo worker sleeps, so that it would run none of these.
    held = [d.schedule(delay=1.5 + n / 20) for n in range(30 if pool != "solo" else 0)]
    worker, began = d.at_work(task), time.monotonic()
    if number is signal.SIGKILL:
        worker.kill()
    else:
        stop(worker, number)
    wait_until(lambda: len(d.runs("began")) == 2, 30, d.logs)
    assert time.monotonic() - began < min(d.r2_s(), 15 + d.r1_s()) + SLACK_S
    again = d.delays.get(task)
    assert (again.runs, again.lapses) == (2, 1)
    d.wait_for(held)
    assert max(d.lateness_s(), default=0) < d.r1_s() + SLACK_S
    noted = [run[0] for run in d.runs() if run[1].isdigit()]
    assert len(noted) == len(set(noted)) == len(held)


def test_a_worker_that_quits_immediately_returns_its_entries_to_the_broker(deploy: Deploy) -> None:
    d = deploy(**ALONE)
    first = d.worker(concurrency=1)
    asleep(d, 8)
    held = [d.schedule(delay=4) for _ in range(10)]
    d.worker()
    first.signal(signal.SIGQUIT)
    d.wait_for(held, deadline_s=8)
    assert max(d.lateness_s()) < 2


def test_celerys_soft_shutdown_waits_for_running_tasks(deploy: Deploy) -> None:
    d = deploy(conf={"worker_soft_shutdown_timeout": 6}, lease=60)
    worker = d.worker(concurrency=1)
    task, held = asleep(d, 4), d.schedule(delay=3)
    stop(worker, signal.SIGQUIT)
    assert "soft shutdown, running tasks have 6 seconds" in worker.log()
    done = d.delays.get(task)
    assert (done.status, done.runs) == (Status.DONE, 1), worker.log()
    assert d.status(held) is Status.NOT_COMPLETE, "nothing new begins meanwhile"


def test_processes_of_a_killed_main_process_end_their_rows_and_exit(deploy: Deploy) -> None:
    d = deploy("postgresql", lease=60)
    worker, endless = d.worker(), d.schedule("test.wait", body={"seconds": 40})
    wait_until(lambda: len(d.runs()) == 1, 10, "the task to begin")
    d.wait_for([d.schedule("test.note") for _ in range(4)])  # the chunk of the task has ended
    short = d.schedule("test.sleep", body={"seconds": 3})
    wait_until(lambda: len(d.runs("began")) == 2, 10, "the other task to begin")
    children = children_of(worker.pid)
    assert len(children) >= 2
    os.kill(worker.pid, signal.SIGKILL)  # not its group
    d.wait_for([short], deadline_s=8)
    wait_until(lambda: not any(map(is_alive, children)), 7.5 + SLACK_S, "the processes to exit")
    assert d.delays.get(short).runs == 1
    assert d.status(endless) is Status.RUNNING


def test_a_stopping_worker_gets_the_report_of_an_unconfirmed_chunk(deploy: Deploy) -> None:
    """Celery makes the pool forget the chunk.

    Billiard's process then waits 30 seconds for a process that reads its result.
    """
    d = deploy()
    worker = d.worker(concurrency=1)
    d.wait_for([d.schedule()])
    wait_until(lambda: not d.stats().get("chunks", True), 10, "its process to have said so")
    process = int(d.runs()[0][2])
    os.kill(process, signal.SIGSTOP)
    task = d.schedule()
    wait_until(lambda: d.stats().get("chunks"), 10, "its chunk to be sent")
    d.schedule(delay=8)
    wait_until(lambda: d.stats().get("held"), 7, "a task to be held")
    worker.signal(signal.SIGTERM)
    worker.wait_for("sent back 1 near tasks", 10)
    os.kill(process, signal.SIGCONT)
    wait_until(worker.ended, 10, "it to end")
    assert (worker.status, d.status(task)) == (0, Status.DONE)
