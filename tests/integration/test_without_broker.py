"""Workers continue from the table if their broker hangs, is unreachable, or lacks a queue."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.integration.conftest import Deploy
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
    deploy: Deploy,
    start_redis: Callable[..., RedisServer],
    request: pytest.FixtureRequest,
    pool: str,
) -> None:
    server = start_redis()
    d = deploy("postgresql", server.url)
    worker = d.worker(pool=pool)
    d.wait_for([d.schedule()])
    request.addfinalizer(lambda: _signal(server, signal.SIGCONT))
    _signal(server, signal.SIGSTOP)
    first = [d.schedule(delay=n) for n in range(3)]
    d.wait_for(first, deadline_s=NOTICES_S + d.r1_s() + SLACK_S)
    later = [d.schedule(delay=n) for n in range(3)]
    d.wait_for(later, deadline_s=3 + d.r1_s() + SLACK_S)
    _signal(server, signal.SIGCONT)
    wait_until(d.runs_on_time, 20, "the fast path to work again", every_s=0.2)
    assert not worker.ended()
    ran = [run[0] for run in d.runs()]
    assert len(set(ran)) == len(ran), "each ran once"


@pytest.mark.parametrize("broker", ["redis", "rabbitmq"])
@pytest.mark.parametrize("outage", ["refuse", "swallow"])
def test_a_worker_starts_and_works_without_broker(deploy: Deploy, broker: str, outage: str) -> None:
    d = deploy("postgresql", broker, proxied=["broker"])
    proxy = d.proxies["broker"]
    getattr(proxy, outage)()
    tasks = [d.schedule(delay=n) for n in range(3)]
    worker = d.begin_worker()
    d.wait_for(tasks, deadline_s=15 + d.r1_s() + SLACK_S)
    assert not worker.ended()
    proxy.reset()
    proxy.heal()
    worker.wait_for(" ready.", 30)
    wait_until(d.runs_on_time, 20, "the fast path to work", every_s=0.2)
    worker.terminate()
    assert worker.status == 0
