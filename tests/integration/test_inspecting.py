"""Celery's remote control reports the load of a worker, and `celery purge` loses no task."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from redis import Redis

from delaytasks import Status
from delaytasks.model.text import installed_version
from delaytasks.runtime import runtime_of
from tests.integration.conftest import Deploy
from tests.running import Deployment
from tests.services import RedisServer
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def open_deployment(
    deploy: Deploy, start_redis: Callable[..., RedisServer], database_url: str
) -> Callable[..., Deployment]:
    return lambda **settings: deploy(database_url, start_redis().url, **settings)


def reports(d: Deployment) -> list[tuple[int, str]]:
    """Return the busy processes and the version of each worker, as its row has them."""
    return [(worker["busy"], worker["version"]) for worker in d.store.workers.all()]


def test_celery_inspect_answers_while_a_chunk_runs(open_deployment: Deploy) -> None:
    """`celery inspect` prints the answer with the JSON encoder of the standard library."""
    d = open_deployment()
    worker = d.worker(concurrency=1)
    running = d.schedule("test.sleep", body={"seconds": 600})
    wait_until(lambda: d.status(running) is Status.RUNNING, 10, "the sleeper to run")
    wait_until(lambda: reports(d) == [(1, installed_version())], 10, "the report of its load")
    said = d.command("inspect", "stats", "-d", d.node(0), "-t", "10")
    assert said.status == 0, f"{said.log()}\n{worker.log()}"
    assert re.search(r'"oldest_chunk": "\d{4}-\d\d-\d\dT', said.log())
    asked = runtime_of(d.delays).celery.control.inspect([d.node(0)], timeout=10, limit=1)
    [stats] = asked.stats().values()
    json.dumps(stats, allow_nan=False)
    assert stats["delaytasks"]["chunks"] == 1
    assert not worker.ended()


def test_celery_purge_loses_no_task(open_deployment: Deploy) -> None:
    """A sweep finds the rows whose messages `celery purge` deletes.

    `celery purge` empties Celery's own queues, and the queues of delaytasks if it names them.
    """
    d = open_deployment(horizon=60)
    task = d.schedule(delay=1)
    queue = d.queue_name
    with Redis.from_url(d.conf["broker_url"]) as redis:
        said = d.command("purge", "-f")
        assert (said.status, redis.llen(queue)) == (0, 1), said.log()
        said = d.command("purge", "-f", "-Q", queue)
        assert (said.status, redis.llen(queue)) == (0, 0), said.log()
    assert d.status(task) is Status.NOT_COMPLETE
    d.worker(concurrency=1)
    d.wait_for([task], deadline_s=d.r1_s() + 15)
