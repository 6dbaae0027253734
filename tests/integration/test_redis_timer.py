"""Test workers on the `redis` timer: real processes on a real Redis server."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from delaytasks import DelayedTask, NewTask
from delaytasks.runtime import runtime_of
from tests.conformance.test_timers import FAULT_SLACK_S, R1_S, ran_once
from tests.integration.conftest import Deploy
from tests.running import Deployment, quick
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

#: These intervals are longer than the tests, so only the timer dispatches the tasks.
SLOW: dict[str, Any] = {"sweep": 60, "_self_sweep_s": 120, "horizon": 120, "_grace_s": 30}


def is_empty(d: Deployment, held: int = 0) -> bool:
    """Return whether Redis has only this many entries."""
    timer = runtime_of(d.delays).redis_timer
    assert timer is not None
    return timer.counts(["default"]) == {"default": (held, 0)}


@pytest.mark.parametrize("pool", [quick("threads"), "solo"])
def test_tasks_run_on_time_and_once_in_other_pools(deploy: Deploy, pool: str) -> None:
    """The timers of `tests/conformance/test_timers.py` run in the pool `prefork`."""
    d = deploy(timer="redis", **SLOW)
    worker = d.worker(pool=pool)
    tasks = [d.schedule(delay=1 + n / 50) for n in range(50)] + [d.schedule("test.mail", 0.5)]
    ran_once(d, tasks)
    worker.terminate()


@pytest.mark.parametrize("step", ["taken", "handed on", "deleted"])
def test_entries_that_a_killed_redis_poller_had_taken_run_on_time_elsewhere(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    # With small chunks, one worker does not take all tasks.
    d = deploy(timer="redis", _chunk_max=10)
    monkeypatch.setenv("DELAYTASKS_TEST_KILL", step)
    mortal = d.worker()
    monkeypatch.delenv("DELAYTASKS_TEST_KILL")
    d.worker()
    tasks: list[DelayedTask] = []
    due = d.now() + timedelta(seconds=0.5)
    d.delays.schedule_many(
        [NewTask("test.note", {"file": str(d.file)}, at=due)] * 300, on_batch=tasks.extend
    )
    wait_until(mortal.ended, 10, "the worker to be killed")
    d.wait_for(tasks, deadline_s=R1_S + FAULT_SLACK_S)
    assert sorted(int(run[0]) for run in d.runs()) == sorted(task.id for task in tasks), "each once"
    wait_until(lambda: is_empty(d), 10, "Redis to be empty")
    if step != "deleted":
        assert d.events(1)["entry.returned"] >= 5


# -- A deployment changes its timer while tasks are pending ---------------------------------------


@pytest.mark.parametrize("timer", ["eta", "redis"])
def test_a_new_timer_loses_and_repeats_no_task(deploy: Deploy, redis_url: str, timer: str) -> None:
    d = deploy("postgresql", "rabbitmq", timer=timer)
    old_worker, old_producer = d.worker(), d.delays
    tasks = [d.schedule(delay=n / 5) for n in range(20)]
    ran_once(d, tasks[:2])

    d.settings["timer"] = redis_url if timer == "eta" else "eta"
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
