"""Faults that need private servers or processes, each with its bound from docs/reliability.md."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from delaytasks import Status
from delaytasks.core.errors import StoreUnavailableError
from tests.proxy import Proxy, proxy_to
from tests.recording import counted
from tests.running import Deployment
from tests.services import PostgresServer
from tests.waiting import SLACK_S, wait_until

pytestmark = pytest.mark.slow

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


def test_a_worker_frozen_past_its_lease_cannot_finish_the_tasks_it_lost(
    deploy: Deploy, postgresql_url: str
) -> None:
    d = deploy(postgresql_url, lease_s=LEASE_S)
    for _ in range(2):
        d.worker(concurrency=1)
    task = d.schedule("test.sleep", body={"seconds": 1})
    wait_until(d.runs, 10, "it to begin")
    frozen = d.at_work(task)
    os.killpg(frozen.pid, signal.SIGSTOP)
    at = time.monotonic()
    wait_until(lambda: len(d.runs()) > 1, 30, "it to begin elsewhere")
    assert time.monotonic() - at < d.r2_s() + SLACK_S
    d.wait_for([task])
    done = d.delays.get(task)
    os.killpg(frozen.pid, signal.SIGCONT)
    wait_until(
        lambda: f"task.lease_lost id={task.id}" in frozen.log(),
        15,
        "its late finish to be refused",
        0.05,
    )
    assert d.delays.get(task) == done, "the refused finish changed the row"
    assert (done.attempts, done.lapses) == (2, 0)
    assert [run[1] for run in d.runs()].count("ended") == 2


@pytest.fixture
def line(postgresql_url: str) -> Iterator[Proxy]:
    proxy = proxy_to(postgresql_url)
    yield proxy
    proxy.heal()
    proxy.close()


def test_a_processor_whose_lease_cannot_be_renewed_is_notified_before_the_lease_ends(
    line: Proxy, deploy: Deploy, postgresql_url: str
) -> None:
    d = deploy(line.url(postgresql_url), lease_s=LEASE_S)
    d.worker(concurrency=1)
    task = d.schedule("test.guarded", body={"seconds": 10 * LEASE_S})
    wait_until(d.runs, 10, "it to begin")
    time.sleep(LEASE_S)  # the lease is renewed, and no signal is sent
    assert len(d.runs()) == 1
    cut = time.monotonic()
    line.swallow()
    wait_until(lambda: len(d.runs()) > 1, LEASE_S + 1, "it to be notified", 0.01)
    assert time.monotonic() - cut < LEASE_S
    assert d.runs()[1][1] == "notified"
    line.heal()
    wait_until(lambda: len(d.runs()) == 3, 15, "it to begin again", 0.05)
    assert [run[1] for run in d.runs()] == ["began", "notified", "began"]
    assert d.delays.get(task).attempts == 1, "none is used"


def test_workers_continue_within_seconds_after_a_killed_postgresql_restarts(
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
    assert counted(d.store)[Status.DONE] == 52


@pytest.fixture
def small_disk(own_postgresql: PostgresServer) -> Iterator[Path]:
    """A disk of a few megabytes for a tablespace of this PostgreSQL. Only root can mount one."""
    with tempfile.TemporaryDirectory(prefix="dt_test_disk_") as folder:
        Path(folder).chmod(0o755)
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", folder], check=False
        )
        if mounted.returncode:
            pytest.skip("needs a small disk, which only root can mount")
        try:
            place = Path(folder) / "tables"
            place.mkdir()
            shutil.chown(place, "nobody")
            own_postgresql.execute(f"CREATE TABLESPACE small LOCATION '{place}'")
            yield Path(folder)
        finally:
            own_postgresql.stop()
            subprocess.run(["umount", folder], check=True)


def fill(folder: Path) -> Path:
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return ballast


def test_a_full_disk_is_reported_and_leaves_no_partial_changes(
    own_postgresql: PostgresServer, small_disk: Path, deploy: Deploy
) -> None:
    d = deploy(own_postgresql.url + "?options=-c%20default_tablespace%3Dsmall")
    worker = d.worker()
    text = os.urandom(20_000).hex()  # incompressible text
    failing = d.schedule("test.fail", 3, body={"text": text})
    before = [d.schedule(delay=3 + n / 20) for n in range(20)]
    ballast = fill(small_disk)
    calls: list[Callable[[], Any]] = [
        lambda: d.delays.schedule_delay("test.quiet", {"text": text}, 3600),
        lambda: d.delays.schedule_delay("test.quiet", {"text": text}, 3600, key="k"),
        lambda: d.delays.schedule_many([("test.quiet", {"text": text}, 3600)] * 10),
    ]
    for call in calls:
        with pytest.raises(StoreUnavailableError, match="cannot work now"):
            call()
    assert d.delays.find(tag="test.quiet").tasks == []
    wait_until(lambda: "cannot work now" in worker.log(), 20, "the worker to meet it")
    ballast.unlink()
    freed = time.monotonic()
    d.wait_for([d.schedule()], deadline_s=5)
    assert time.monotonic() - freed < 5
    d.wait_for([failing], Status.FAILED, deadline_s=30)
    d.wait_for(before, deadline_s=30)
    assert not worker.ended()
    for call in calls:
        call()
    assert len(d.delays.find(tag="test.quiet").tasks) == 12
