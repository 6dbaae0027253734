"""Overload of the database or the broker.

No queue grows without bounds, callers wait for a bounded time, the overload is reported, and all
tasks run.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from delaytasks import Status
from delaytasks.runtime import runtime_of
from delaytasks.storage.store import Store
from tests.conftest import settings_for
from tests.proxy import Proxy, proxy_to
from tests.recording import counted
from tests.running import QUICK, Deployment, Process
from tests.services import RabbitServer, RedisServer
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

#: In each direction.
SLOW_S = 0.1
#: The bound of a call: scheduling, sending, and the delays of a busy machine.
CALL_S = 1.5
Deploy = Callable[..., Deployment]


@pytest.fixture
def deploy(tmp_path: Path, postgresql_url: str) -> Iterator[Deploy]:
    made: list[Deployment] = []

    def new(broker_url: str, database_url: str = postgresql_url, **settings: Any) -> Deployment:
        # The calls of these tests reach the broker themselves.
        made.append(Deployment(tmp_path, database_url, broker_url, arm="inline", **settings))
        return made[-1]

    yield new
    for deployment in made:
        deployment.close()


def longest_s(calls: int, call: Callable[[], object]) -> float:
    """Return the duration of the longest of these consecutive calls."""
    times = []
    for _ in range(calls):
        began = time.monotonic()
        call()
        times.append(time.monotonic() - began)
    return max(times)


def schedule_in_vain(d: Deployment) -> None:
    """Schedule while the broker refuses messages.

    Callers wait for a bounded time, one of them gets an error, and no thread keeps waiting.
    """
    before = threading.active_count()
    assert longest_s(20, lambda: d.schedule(delay=0.1)) < CALL_S
    assert d.delays.events.counts["timer.down"] == 1
    assert threading.active_count() <= before + 1


def threads_of(worker: Process) -> int:
    found = re.search(
        r"^Threads:\s+(\d+)", Path(f"/proc/{worker.pid}/status").read_text(), re.MULTILINE
    )
    return int(found[1]) if found else 0


def queued(d: Deployment) -> int:
    with runtime_of(d.delays).celery.connection_for_write() as connection:
        queue = runtime_of(d.delays).publisher.queue("default")(connection)
        return int(queue.queue_declare(passive=False).message_count)


def is_on_time(d: Deployment) -> bool:
    """Return whether the fast path runs a task, since the sweep waits for the grace period."""
    task = d.schedule(delay=0.3)
    d.wait_for([task])
    grace_us = float(QUICK["grace_s"]) * 1e6
    return next(int(run[1]) for run in d.runs() if run[0] == str(task.id)) < grace_us


# -- the database ---------------------------------------------------------------------------------


@pytest.fixture
def line(postgresql_url: str) -> Iterator[Proxy]:
    proxy = proxy_to(postgresql_url)
    yield proxy
    proxy.close()


def test_a_slow_database_does_not_make_requests_pile_up(
    line: Proxy, deploy: Deploy, postgresql_url: str, redis_url: str
) -> None:
    d = deploy(redis_url, line.url(postgresql_url))
    direct = Store(
        postgresql_url, settings_for(postgresql_url, table_prefix=d.settings["table_prefix"])
    )
    worker = d.worker()
    d.wait_for([d.schedule()])
    before = threads_of(worker)
    line.delay_s = SLOW_S
    with ThreadPoolExecutor(30) as callers:  # more callers than connections
        times = list(callers.map(lambda _: longest_s(5, lambda: d.schedule(delay=1)), range(30)))
    assert max(times) < 5, "the time for a connection and one turn of the other callers"
    most = 0

    def are_done() -> bool:
        nonlocal most
        most = max(most, queued(d))
        return counted(direct)[Status.DONE] == 151

    wait_until(are_done, 30, "all tasks to run", every_s=0.1)
    assert most <= 150, "at most one message per task, and no repeated messages"
    assert threads_of(worker) <= before + 3
    runs = [run[0] for run in d.runs()]
    assert len(runs) == len(set(runs)) == 151
    direct.close()


# -- the broker -----------------------------------------------------------------------------------


@pytest.mark.parametrize("timer", ["eta", "redis"])
def test_a_full_redis_delays_tasks_but_loses_none(
    start_redis: Callable[..., RedisServer], deploy: Deploy, timer: str
) -> None:
    server = start_redis("--maxmemory-policy", "noeviction")
    d = deploy(server.url, timer=timer)
    worker = d.worker()
    wait_until(lambda: is_on_time(d), 10, "the fast path")
    server.client().config_set("maxmemory", 1)
    schedule_in_vain(d)
    wait_until(
        lambda: counted(d.store)[Status.NOT_COMPLETE] == 0, 20, "the worker to drain them", 0.1
    )
    assert "does the broker answer" in worker.log()
    server.client().config_set("maxmemory", 0)
    wait_until(lambda: is_on_time(d), 15, "the fast path again", 0.2)
    assert d.delays.events.counts["timer.up"] == 1
    runs = [run[0] for run in d.runs()]
    assert len(runs) == len(set(runs))


def test_a_rabbitmq_that_blocks_publishers_delays_tasks_but_loses_none(
    own_rabbitmq: RabbitServer, deploy: Deploy
) -> None:
    d = deploy(own_rabbitmq.url)
    worker = d.worker()
    wait_until(lambda: is_on_time(d), 10, "the fast path")
    own_rabbitmq.alarm(True)
    try:
        schedule_in_vain(d)
        assert not runtime_of(d.delays).producer_timer.is_up
        wait_until(
            lambda: counted(d.store)[Status.NOT_COMPLETE] == 0, 20, "the worker to drain them", 0.1
        )
        assert "does the broker answer" in worker.log()
    finally:
        own_rabbitmq.alarm(False)
    wait_until(lambda: is_on_time(d), 15, "the fast path again", 0.2)
    assert d.delays.events.counts["timer.up"] == 1
    runs = [run[0] for run in d.runs()]
    assert len(runs) == len(set(runs))


def test_the_sweep_finds_tasks_that_a_full_queue_refused(
    own_rabbitmq: RabbitServer, deploy: Deploy
) -> None:
    d = deploy(own_rabbitmq.url)
    name = runtime_of(d.delays).publisher.queue("default").name
    own_rabbitmq.ctl(
        "set_policy",
        "full",
        f"^{name}$",
        '{"max-length": 5, "overflow": "reject-publish"}',
        "--apply-to",
        "queues",
    )
    assert queued(d) == 0
    tasks = [d.schedule(delay=0.2) for _ in range(30)]
    wait_until(lambda: queued(d) == 5, 5, "the queue to be full")
    d.worker()
    d.wait_for(tasks)
    assert len(d.runs()) == 30
