"""Workers continue from the table if their broker hangs, is unreachable, or lacks a queue."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import ProxiedSite
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
        first = [d.schedule(delay=n) for n in range(3)]
        d.wait_for(first, deadline_s=NOTICES_S + d.r1_s() + SLACK_S)
        later = [d.schedule(delay=n) for n in range(3)]
        d.wait_for(later, deadline_s=3 + d.r1_s() + SLACK_S)
        took = time.monotonic() - began
        _signal(server, signal.SIGCONT)
        wait_until(d.runs_on_time, 20, "the fast path to work again", every_s=0.2)
        assert not worker.ended()
        ran = [run[0] for run in d.runs()]
        assert len(set(ran)) == len(ran), f"each ran once, after {took:.1f} s"
    finally:
        _signal(server, signal.SIGCONT)
        d.close()


@pytest.mark.parametrize("broker", ["redis", "rabbitmq"])
@pytest.mark.parametrize("outage", ["refuse", "swallow"])
def test_a_worker_that_starts_without_its_broker_works_from_the_table(
    proxied_site: Callable[..., ProxiedSite], broker: str, outage: str
) -> None:
    site = proxied_site("postgresql", broker)
    d, proxy = site.deployment, site.broker
    getattr(proxy, outage)()
    tasks = [d.schedule(delay=n) for n in range(3)]
    worker = d.begin_worker()
    d.wait_for(tasks, deadline_s=15 + d.r1_s() + SLACK_S)
    assert not worker.ended()
    proxy.reset()
    proxy.heal()
    wait_until(lambda: " ready." in worker.log(), 30, "the worker to be ready")
    wait_until(d.runs_on_time, 20, "the fast path to work", every_s=0.2)
    worker.terminate()
    assert worker.status == 0


def test_without_a_broker_each_worker_drains_its_own_queues(
    proxied_site: Callable[..., ProxiedSite],
) -> None:
    """A sweep can then drain only the queues of the worker that sweeps."""
    site = proxied_site("postgresql", "redis")
    d, queues = site.deployment, ["mail", "report", "order"]
    for queue in queues:
        d.worker("-Q", f"{d.settings['namespace']}.{queue}")
    site.broker.refuse()
    for _ in range(4):  # the same worker may sweep several times in turn
        tasks = [d.schedule(queue=queue) for queue in queues]
        d.wait_for(tasks, deadline_s=d.r1_s() + SLACK_S)


def test_a_worker_without_its_broker_stops_on_sigterm(
    proxied_site: Callable[..., ProxiedSite],
) -> None:
    site = proxied_site("postgresql", "redis")
    site.broker.refuse()
    worker = site.deployment.begin_worker()
    deadline_s = 15 + site.deployment.r1_s() + SLACK_S
    site.deployment.wait_for([site.deployment.schedule()], deadline_s=deadline_s)
    worker.terminate()
    assert worker.status == 0
