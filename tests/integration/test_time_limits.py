"""Real workers end running rows: each at its time limit, or if its cancellation is requested."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from delaytasks import DelayedTask, Status
from tests.integration.conftest import Deploy
from tests.running import Deployment
from tests.waiting import SLACK_S, wait_until

pytestmark = pytest.mark.slow

#: Celery's own limits are for a whole chunk, and have no effect on delayed tasks.
CONF: dict[str, Any] = {"imports": ["tests.project", "tests.limits_project"]}
CONF |= {"task_time_limit": 1.0, "task_soft_time_limit": 0.5}
#: The hard limit of the processor that has one.
LIMIT_S = 1
#: The policies and the number of the requests are read once a second.
HEARD_S = 2


@pytest.fixture
def deploy(deploy: Deploy) -> Callable[..., Deployment]:
    # The processors specify this queue, but the test does not import them.
    return partial(deploy, conf=CONF, queues={"limits.*": "limits"})


def runs_of(d: Deployment, task: DelayedTask) -> list[str]:
    return [run[1] for run in d.runs() if run[0] == str(task.id)]


@pytest.mark.quick
def test_a_soft_limit_retries_and_fails_a_task_and_a_hard_one_frees_its_process(
    deploy: Deploy,
) -> None:
    d = deploy("sqlite")
    d.worker(concurrency=1)
    again = d.schedule("limits.soft", body={"seconds": [20, 0]})
    never = d.schedule("limits.soft", body={"seconds": 20})
    unlimited = d.schedule("limits.none", body={"seconds": 3})
    cleans = d.schedule("limits.caught", body={"seconds": 20})
    d.wait_for([again, unlimited, cleans])
    d.wait_for([never], Status.FAILED)
    assert runs_of(d, again) == ["began", "began", "ended"]
    assert runs_of(d, never) == ["began", "began"]
    assert runs_of(d, unlimited) == ["began", "ended"]
    assert runs_of(d, cleans) == ["began", "cleaned"]
    assert [attempt.number for attempt in d.delays.get(again, attempts=True).attempts] == [1]
    row = d.delays.get(never, attempts=True)
    for error in (row.error, *(attempt.error for attempt in row.attempts)):
        assert "time.sleep(seconds)" in (error or "")
        assert "SoftTimeLimitExceeded(0.5,)" in (error or "")

    stuck = d.schedule("limits.hard", body={"seconds": [60, 0]})
    wait_until(lambda: runs_of(d, stuck), 10, "it to begin")
    behind = d.schedule("limits.none")
    d.wait_for([behind], deadline_s=4)
    d.wait_for([stuck], deadline_s=15)


@pytest.mark.parametrize("holds_gil", [False, True], ids=["sleeps", "holds the GIL"])
def test_a_hard_limit_ends_only_its_process(deploy: Deploy, holds_gil: bool) -> None:
    d = deploy(max_lost_leases=3)
    due, file = d.now() + timedelta(seconds=4), str(d.file)

    def all_due(tag: str, count: int, **more: Any) -> list[DelayedTask]:
        body = {"file": file, **more}
        return [d.delays.schedule_delay(tag, body, at=due) for _ in range(count)]

    neighbours = all_due("limits.none", 20) + all_due("limits.hard", 5)
    [stuck] = all_due("limits.hard", 1, seconds=60, holds_gil=holds_gil)
    [recovers] = all_due("limits.hard", 1, seconds=[60, 0])
    neighbours += all_due("limits.none", 20)
    worker = d.worker()
    d.wait_for([*neighbours, recovers], deadline_s=40)
    d.wait_for([stuck], Status.FAILED, deadline_s=60)

    ran = Counter(run[0] for run in d.runs() if run[1] == "began")
    assert {ran[str(task.id)] for task in neighbours} == {1}, "nothing that was over runs again"
    found = [d.delays.get(task) for task in neighbours]
    assert {task.lapses for task in found if task.tag == "limits.none"} == {0}
    # With the GIL held, a row may wait behind the stuck row, and no thread can return it.
    if not holds_gil:
        assert {(task.lapses, task.runs) for task in found} == {(0, 1)}
        assert runs_of(d, recovers) == ["began", "began", "ended"]
    assert runs_of(d, stuck) == ["began"] * 3
    left = d.delays.get(stuck, attempts=True)
    assert (left.lapses, len(left.attempts)) == (3, 3)
    assert (left.error or "").startswith("gave up: the worker died or lost its lease 3 times")
    for error in (left.error, *(attempt.error for attempt in left.attempts)):
        assert "its time limit of 1 s was over" in (error or "")
    times = [attempt.began or attempt.ended for attempt in left.attempts]
    for began, after in itertools.pairwise([*times, left.attempts[-1].ended]):
        assert (after - began).total_seconds() < LIMIT_S + d.r2_s() + SLACK_S
    for words in ("task.timed_out", "Timeout (0:00:01)!", "tests/project.py"):
        assert words in worker.log()


def test_a_pool_without_time_limits_refuses_to_serve_their_queue(deploy: Deploy) -> None:
    d = deploy()
    refused = d.command("worker", "-P", "threads", "-n", "refused", "--without-gossip").log()
    problem = "the tag 'limits.caught' has time limits, which the pool 'thread' cannot keep"
    remedy = "start this worker with -P prefork, or let it serve (-Q) other queues than 'limits'"
    assert f"{problem}: {remedy}" in refused
    d.worker("-Q", d.settings["namespace"] + ".default", pool="threads")
    d.wait_for([d.schedule()])


@pytest.mark.parametrize(("database", "pool"), [("mysql", "prefork"), ("sqlite", "threads")])
def test_a_cancelled_run_stops_and_is_not_retried(deploy: Deploy, database: str, pool: str) -> None:
    # A lease is renewed after a third of it: the request must not wait for that.
    d = deploy(database, conf={}, lease=30)
    d.worker(pool=pool)

    def begun(tag: str) -> DelayedTask:
        task = d.schedule(tag)
        wait_until(lambda: runs_of(d, task) == ["began"], 20, f"{tag} to run")
        return task

    for tag in ("cancel.checks", "cancel.threads", "cancel.coroutine"):
        task, other = begun(tag), begun(tag)
        assert d.delays.cancel(task, running=True).is_requested
        d.wait_for([task], Status.CANCELLED, HEARD_S + SLACK_S)
        assert d.status(other) is Status.RUNNING
        d.delays.cancel(other, running=True)
        d.wait_for([other], Status.CANCELLED)
