"""Workers on the `redis` timer: real processes on a real Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from delaytasks.core.clock import to_us
from tests.running import Deployment

Deploy = Callable[..., Deployment]


@pytest.fixture
def deploy(request: pytest.FixtureRequest, tmp_path: Path, postgresql_url: str, redis_url: str) -> Iterator[Deploy]:
    made: list[Deployment] = []

    def make(broker: str = "redis", **settings: Any) -> Deployment:
        broker_url = request.getfixturevalue(f"{broker}_url")
        options = {"timer": "redis", "redis_url": redis_url, **settings}
        made.append(Deployment(tmp_path, postgresql_url, broker_url, **options))
        return made[-1]

    yield make
    for deployment in made:
        deployment.close()
        client = redis.Redis.from_url(redis_url)
        for key in client.scan_iter(f"*{deployment.settings['namespace']}*", count=1000):
            client.delete(key)
        client.close()


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
@pytest.mark.parametrize("broker", ["redis", "rabbitmq"])
def test_tasks_run_on_time_and_once(deploy: Deploy, broker: str, pool: str) -> None:
    d = deploy(broker, sweep_s=60, self_sweep_s=120, horizon_s=120, grace_s=30)  # nothing but the timer brings them
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
