"""Test workers on the `redis` timer: real processes on a real Redis server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from delaytasks import DelayedTask, NewTask
from delaytasks.core.clock import to_us
from delaytasks.runtime import runtime_of
from tests.conformance.test_timers import FAULT_SLACK_S, R1_S, ran_once
from tests.running import Deployment
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

Deploy = Callable[..., Deployment]


@pytest.fixture
def deploy(
    request: pytest.FixtureRequest, tmp_path: Path, postgresql_url: str, redis_url: str
) -> Iterator[Deploy]:
    made: list[Deployment] = []

    def make(broker: str = "redis", **settings: Any) -> Deployment:
        broker_url = request.getfixturevalue(f"{broker}_url")
        options = {"timer": redis_url, **settings}
        made.append(Deployment(tmp_path, postgresql_url, broker_url, **options))
        return made[-1]

    yield make
    for deployment in made:
        deployment.close()


@pytest.mark.parametrize(
    "pool", ["prefork", pytest.param("threads", marks=pytest.mark.quick), "solo"]
)
def test_tasks_run_on_time_and_once(deploy: Deploy, pool: str) -> None:
    # These intervals are longer than the test, so only the timer dispatches the tasks.
    d = deploy(sweep=60, _self_sweep_s=120, horizon=120, _grace_s=30)
    worker = d.worker(pool=pool)
    tasks = [d.schedule(delay=1 + n / 50) for n in range(50)] + [d.schedule("test.mail", 0.5)]
    cancelled = d.schedule(delay=1)
    assert d.delays.cancel(cancelled)
    d.wait_for(tasks)
    assert sorted(int(run[0]) for run in d.runs()) == sorted(task.id for task in tasks)
    for task in tasks:
        done = d.delays.get(task)
        assert done.execution_time is not None
        assert to_us(done.execution_time) >= to_us(task.expected_time)
    worker.terminate()


def test_tasks_moved_in_bulk_leave_redis_and_run_at_their_new_times(deploy: Deploy) -> None:
    d = deploy(sweep=60, _self_sweep_s=120, horizon=120, _grace_s=30)
    timer = runtime_of(d.delays).redis_timer
    assert timer is not None
    gone = [d.schedule("test.mail", 60) for _ in range(700)]
    moved = [d.schedule(delay=60) for _ in range(20)]
    assert runtime_of(d.delays).flush()
    assert timer.counts(["default"]) == {"default": (720, 0)}
    assert d.delays.bulk.cancel(tag="test.mail").changed == len(gone)
    assert timer.counts(["default"]) == {"default": (20, 0)}
    d.worker()
    assert d.delays.bulk.reschedule(0.5, tag="test.note").changed == len(moved)
    d.wait_for(moved)
    assert sorted(int(run[0]) for run in d.runs()) == sorted(task.id for task in moved)
    wait_until(lambda: timer.counts(["default"]) == {"default": (0, 0)}, 10, "Redis to be empty")


@pytest.mark.parametrize("step", ["taken", "handed on", "deleted"])
def test_entries_that_a_killed_redis_poller_had_taken_run_on_time_elsewhere(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    # With small chunks, one worker does not take all tasks.
    d = deploy(_chunk_max=10)
    monkeypatch.setenv("DELAYTASKS_TEST_KILL", step)
    mortal = d.worker()
    monkeypatch.delenv("DELAYTASKS_TEST_KILL")
    d.worker()
    tasks: list[DelayedTask] = []
    due = runtime_of(d.delays).clock.now() + timedelta(seconds=0.5)
    d.delays.schedule_many(
        [NewTask("test.note", {"file": str(d.file)}, at=due)] * 300, on_batch=tasks.extend
    )
    wait_until(mortal.ended, 10, "the worker to be killed")
    d.wait_for(tasks, deadline_s=R1_S + FAULT_SLACK_S)
    assert sorted(int(run[0]) for run in d.runs()) == sorted(task.id for task in tasks), "each once"
    timer = runtime_of(d.delays).redis_timer
    assert timer is not None
    wait_until(lambda: timer.counts(["default"]) == {"default": (0, 0)}, 10, "Redis to be empty")
    if step != "deleted":
        answers = (
            runtime_of(d.delays).celery.control.inspect(timeout=5, destination=[d.node(1)]).stats()
        )
        assert answers[d.node(1)]["delaytasks"]["events"]["entry.returned"] >= 5


# -- A deployment changes its timer while tasks are pending ---------------------------------------

# No task is lost, and no task runs twice.


@pytest.fixture(params=["eta", "redis"])
def d(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    postgresql_url: str,
    rabbitmq_url: str,
    redis_url: str,
) -> Iterator[Deployment]:
    timer = redis_url if request.param == "redis" else "eta"
    deployment = Deployment(tmp_path, postgresql_url, rabbitmq_url, timer=timer)
    yield deployment
    deployment.close()


def test_switching_the_timer_loses_and_repeats_nothing(d: Deployment, redis_url: str) -> None:
    old_worker, old_producer = d.worker(), d.delays
    tasks = [d.schedule(delay=n / 5) for n in range(20)]
    ran_once(d, tasks[:2])

    d.settings["timer"] = redis_url if d.settings["timer"] == "eta" else "eta"
    d.worker()
    # Workers of both timers run.
    tasks += [d.schedule(delay=n / 5) for n in range(10)]
    old_worker.terminate()
    # The producer still uses the old timer.
    tasks += [d.schedule(delay=n / 5) for n in range(10)]
    d.delays = d.producer()
    tasks += [d.schedule(delay=n / 5) for n in range(10)]
    ran_once(d, tasks, deadline_s=4 + R1_S + FAULT_SLACK_S)
    old_producer.close()
