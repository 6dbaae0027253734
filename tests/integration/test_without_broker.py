"""Workers continue from the table if their broker hangs, is unreachable, or lacks a queue."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.proxy import proxy_to
from tests.running import Deployment
from tests.services import RedisServer
from tests.waiting import SLACK_S, wait_until

pytestmark = pytest.mark.slow

#: A worker notices that its broker hangs after the next heartbeat, the time limit of that
#: heartbeat, and the time in which Celery closes the connection.
NOTICES_S = 2 + 5 + 5


def _signal(server: RedisServer, number: signal.Signals) -> None:
    assert server._process is not None
    os.kill(server._process.pid, number)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_worker_whose_redis_hangs_works_from_the_table(
    tmp_path: Path, postgresql_url: str, start_redis: Callable[..., RedisServer], pool: str
) -> None:
    server = start_redis()
    d = Deployment(tmp_path, postgresql_url, server.url)
    try:
        worker = d.worker(pool=pool)
        d.wait_for([d.schedule()])
        _signal(server, signal.SIGSTOP)
        began = time.monotonic()
        d.wait_for(
            [d.schedule(delay=n) for n in range(3)], deadline_s=NOTICES_S + d.r1_s() + SLACK_S
        )
        later = [d.schedule(delay=n) for n in range(3)]
        d.wait_for(later, deadline_s=3 + d.r1_s() + SLACK_S)
        took = time.monotonic() - began
        _signal(server, signal.SIGCONT)
        wait_until(lambda: _runs_on_time(d), 20, "the fast path to work again", every_s=0.2)
        assert not worker.ended()
        assert len({run[0] for run in d.runs()}) == len(d.runs()), (
            f"each ran once, after {took:.1f} s"
        )
    finally:
        _signal(server, signal.SIGCONT)
        d.close()


def _runs_on_time(d: Deployment) -> bool:
    task = d.schedule(delay=0.3)
    d.wait_for([task], deadline_s=30)
    return next(int(run[1]) for run in d.runs() if run[0] == str(task.id)) < 200_000


@pytest.mark.parametrize(
    ("outage", "broker"),
    [("refuse", "redis"), ("refuse", "rabbitmq"), ("swallow", "redis"), ("swallow", "rabbitmq")],
)
def test_a_worker_that_starts_without_its_broker_works_from_the_table(
    tmp_path: Path, postgresql_url: str, request: pytest.FixtureRequest, broker: str, outage: str
) -> None:
    url = request.getfixturevalue(f"{broker}_url")
    proxy = proxy_to(url)
    d = Deployment(tmp_path, postgresql_url, proxy.url(url))
    try:
        getattr(proxy, outage)()
        tasks = [d.schedule(delay=n) for n in range(3)]
        worker = d.begin_worker()
        d.wait_for(tasks, deadline_s=15 + d.r1_s() + SLACK_S)
        assert not worker.ended()
        proxy.reset()
        proxy.heal()
        wait_until(lambda: " ready." in worker.log(), 30, "the worker to be ready")
        wait_until(lambda: _runs_on_time(d), 20, "the fast path to work", every_s=0.2)
        worker.terminate()
        assert worker.status == 0
    finally:
        proxy.heal()
        d.close()
        proxy.close()


def test_without_a_broker_each_worker_drains_its_own_queues(
    tmp_path: Path, postgresql_url: str, redis_url: str
) -> None:
    """A sweep can then drain only the queues of the worker that sweeps."""
    proxy = proxy_to(redis_url)
    d = Deployment(tmp_path, postgresql_url, proxy.url(redis_url))
    queues = ["mail", "report", "order"]
    try:
        for queue in queues:
            d.worker("-Q", f"{d.settings['namespace']}.{queue}")
        proxy.refuse()
        for _ in range(4):  # the same worker may sweep several times in turn
            tasks = [d.schedule(queue=queue) for queue in queues]
            d.wait_for(tasks, deadline_s=d.r1_s() + SLACK_S)
    finally:
        proxy.heal()
        d.close()
        proxy.close()


def test_a_worker_without_its_broker_stops_on_sigterm(
    tmp_path: Path, postgresql_url: str, redis_url: str
) -> None:
    proxy = proxy_to(redis_url)
    d = Deployment(tmp_path, postgresql_url, proxy.url(redis_url))
    try:
        proxy.refuse()
        worker = d.begin_worker()
        d.wait_for([d.schedule()], deadline_s=15 + d.r1_s() + SLACK_S)
        worker.terminate()
        assert worker.status == 0
    finally:
        proxy.heal()
        d.close()
        proxy.close()
