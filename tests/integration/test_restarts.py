"""Test brokers that restart repeatedly under workers.

A Redis server loses its data at each restart, for each timer. A RabbitMQ server takes seconds to
start, and loses its data at every second restart.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from delaytasks import DelayTask
from tests.running import QUICK, Deployment
from tests.services import RabbitServer, RedisServer
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

ROUNDS = 20
#: RabbitMQ restarts fewer times, since twenty restarts take minutes.
RABBITMQ_ROUNDS = int(os.environ.get("DELAYTASKS_TEST_RESTARTS", "3"))
RESUMES_S = 10
#: After this many seconds a new quorum queue survives a crash of its only node. A younger one does
#: not answer any more, at least in RabbitMQ 3.10; see `test_refused_queues.py`.
QUORUM_QUEUE_STORED_S = 3


@pytest.fixture
def server(start_redis: Callable[[], RedisServer]) -> RedisServer:
    return start_redis()


@pytest.fixture
def deployments(
    tmp_path: Path, postgresql_url: str, server: RedisServer
) -> Iterator[list[Deployment]]:
    made = []
    for timer in ("eta", "redis"):
        folder = tmp_path / timer
        folder.mkdir()
        made.append(Deployment(folder, postgresql_url, server.url, timer=timer))
    yield made
    for deployment in made:
        deployment.close()


def test_workers_resume_each_time_their_redis_is_restarted(
    deployments: list[Deployment], server: RedisServer
) -> None:
    workers = [d.worker() for d in deployments]
    tasks = [(d, d.schedule(delay=n / 2)) for d in deployments for n in range(20)]
    for _ in range(ROUNDS):
        tasks += [(d, d.schedule(delay=0.2)) for d in deployments for _ in range(5)]
        server.restart()
        for d in deployments:
            wait_until(lambda d=d: is_in_time(d), RESUMES_S, "a task to be in time", every_s=0.2)  # type: ignore[misc]
    assert not any(worker.ended() for worker in workers)
    for d in deployments:
        each_ran_once(d, [task for place, task in tasks if place is d])


@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
def test_workers_resume_each_time_their_rabbitmq_is_restarted(
    tmp_path: Path, postgresql_url: str, own_rabbitmq: RabbitServer, queue_type: str
) -> None:
    d = Deployment(
        tmp_path, postgresql_url, own_rabbitmq.url, {"task_default_queue_type": queue_type}
    )
    try:
        worker = d.worker()
        tasks = [d.schedule(delay=n / 2) for n in range(20)]
        for round in range(RABBITMQ_ROUNDS):
            tasks += [d.schedule(delay=0.2) for _ in range(5)]
            time.sleep(QUORUM_QUEUE_STORED_S)
            own_rabbitmq.crash()
            tasks.append(d.schedule(delay=0.2))
            own_rabbitmq.start(is_empty=round % 2 == 1)
            wait_until(lambda: is_in_time(d), RESUMES_S, "a task to be in time", every_s=0.2)
        assert not worker.ended()
        each_ran_once(d, tasks)
    finally:
        d.close()


def test_a_worker_without_broker_looks_for_it_every_few_seconds(
    tmp_path: Path, sqlite_path: Callable[[str], str], server: RedisServer
) -> None:
    """Celery's own pauses grow by two seconds with each attempt; those of a worker are limited."""
    d = Deployment(tmp_path, sqlite_path("test"), server.url)
    try:
        worker = d.worker(pool="solo")
        server.stop()
        pauses: list[str] = []

        def has_tried_thrice() -> bool:
            pauses[:] = re.findall(r"Trying again in (\d+)", worker.log())
            return len(pauses) == 3

        wait_until(has_tried_thrice, 30, "three tries to connect", every_s=0.2)
        assert pauses == ["2", "4", "4"]
        server.start()
        wait_until(lambda: is_in_time(d), RESUMES_S, "a task to be in time", every_s=0.2)
    finally:
        d.close()


def each_ran_once(d: Deployment, tasks: list[DelayTask]) -> None:
    d.wait_for(tasks)
    runs = [run[0] for run in d.runs()]
    assert len(runs) == len(set(runs)), "no task runs twice"
    assert {str(task.id) for task in tasks} <= set(runs)


def is_in_time(d: Deployment) -> bool:
    """Return whether the broker delivers a task before a sweep can find it.

    A sweep ignores a task until its grace period ends.
    """
    task = d.schedule(delay=0.2)
    d.wait_for([task])
    late_us = next(int(run[1]) for run in d.runs() if run[0] == str(task.id))
    return late_us < float(QUICK["grace_s"]) * 1e6
