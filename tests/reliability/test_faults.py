"""Faults that need servers or processes of their own, each with its bound: see docs/reliability.md."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from delaytasks import Status
from tests.postgres_server import PostgresServer
from tests.proxy import Proxy, proxy_to
from tests.running import Deployment
from tests.waiting import wait_until

LEASE_S = 3.0
Deploy = Callable[..., Deployment]


@pytest.fixture
def deploy(tmp_path: Path, redis_url: str) -> Iterator[Deploy]:
    made: list[Deployment] = []

    def new(database_url: str, **settings: Any) -> Deployment:
        made.append(Deployment(tmp_path, database_url, redis_url, **settings))
        return made[-1]

    yield new
    for deployment in made:
        deployment.close()


def test_a_worker_that_was_frozen_past_its_lease_can_not_finish_what_it_lost(
    deploy: Deploy, postgresql_url: str
) -> None:
    d = deploy(postgresql_url, lease_s=LEASE_S)
    frozen = d.worker(concurrency=1)
    task = d.schedule("test.sleep", body={"seconds": 1})
    wait_until(d.runs, 10, "it to begin")
    os.killpg(frozen.pid, signal.SIGSTOP)
    stopped = time.monotonic()
    d.worker()
    d.wait_for([task], deadline_s=30)
    settings = d.delays.settings
    assert time.monotonic() - stopped < LEASE_S + settings.self_sweep_s + 1 + 5, "R2, a worker's start, the run itself"
    done = d.delays.get(task)
    os.killpg(frozen.pid, signal.SIGCONT)
    wait_until(lambda: f"task.lease_lost id={task.id}" in frozen.log(), 15, "its late finish to be refused", 0.05)
    assert d.delays.get(task) == done, "and nothing was changed by it"
    assert (done.attempts, done.lapses) == (2, 0)
    assert [run[1] for run in d.runs()].count("ended") == 2


@pytest.fixture
def line(postgresql_url: str) -> Iterator[Proxy]:
    proxy = proxy_to(postgresql_url)
    yield proxy
    proxy.heal()
    proxy.close()


def test_a_processor_whose_lease_can_not_be_renewed_is_told_before_it_ends(
    line: Proxy, deploy: Deploy, postgresql_url: str
) -> None:
    d = deploy(line.url(postgresql_url), lease_s=LEASE_S)
    d.worker(concurrency=1)
    task = d.schedule("test.guarded", body={"seconds": 10 * LEASE_S})
    wait_until(d.runs, 10, "it to begin")
    time.sleep(LEASE_S)  # it is renewed, and told nothing
    assert len(d.runs()) == 1
    cut = time.monotonic()
    line.swallow()
    wait_until(lambda: len(d.runs()) > 1, LEASE_S + 1, "it to be told", 0.01)
    assert time.monotonic() - cut < LEASE_S
    assert d.runs()[1][1] == "told"
    line.heal()
    wait_until(lambda: len(d.runs()) == 3, 15, "it to begin again", 0.05)
    assert [run[1] for run in d.runs()] == ["began", "told", "began"]
    assert d.delays.get(task).attempts == 1, "none is used"


def test_workers_go_on_within_seconds_when_a_killed_postgresql_is_back(
    own_postgresql: PostgresServer, deploy: Deploy
) -> None:
    d = deploy(own_postgresql.url)
    worker = d.worker()
    tasks = [d.schedule(delay=n / 10) for n in range(50)]
    running = d.schedule("test.sleep", body={"seconds": 2})
    wait_until(lambda: len(d.runs()) > 5, 10, "some to run")
    own_postgresql.stop(signal.SIGQUIT)
    time.sleep(1)
    own_postgresql.start()
    up = time.monotonic()
    after = d.schedule()
    d.wait_for([after], deadline_s=5)
    assert time.monotonic() - up < 5
    d.wait_for([*tasks, running], deadline_s=30)
    assert not worker.ended()
    assert d.store.tasks.counts()[Status.DONE] == 52
