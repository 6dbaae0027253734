"""Faults of machines, databases, clocks and processes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from chaos.clocks import ABOUT_S, HOUR_S, MOST_CPU, Hours, cpu_s, servers, try_out
from chaos.failpoints import FAILPOINTS
from delaytasks import Status, StoreUnavailableError
from tests import running as faketime
from tests.conftest import closing_all
from tests.proxy import Proxy, proxy_to
from tests.running import Deployment, Process
from tests.services import MissingServiceError, PostgresServer, RabbitServer
from tests.waiting import SLACK_S, wait_until

# Faults that need private servers or processes, each with its bound from docs/guarantees.md


LEASE_S = 3.0
Deploy = Callable[..., Deployment]


@pytest.fixture
def deploy(tmp_path: Path, redis_url: str) -> Iterator[Deploy]:
    def new(database_url: str, broker_url: str = redis_url, **settings: Any) -> Deployment:
        return Deployment(tmp_path, database_url, broker_url, **settings)

    with closing_all(new) as deploy:
        yield deploy


@pytest.mark.slow
def test_a_frozen_worker_cannot_finish_tasks_it_lost(deploy: Deploy, postgresql_url: str) -> None:
    d = deploy(postgresql_url, lease=LEASE_S)
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
    line = f"task.lease_lost id={task.id}"
    wait_until(lambda: line in frozen.log(), 15, "its late finish to be refused", 0.05)
    assert d.delays.get(task) == done, "the refused finish changed the row"
    assert (done.runs, done.lapses) == (2, 0)
    assert [run[1] for run in d.runs()].count("ended") == 2


@pytest.fixture
def line(postgresql_url: str) -> Iterator[Proxy]:
    """The way to the database, on which faults are made."""
    proxy = proxy_to(postgresql_url)
    yield proxy
    proxy.heal()
    proxy.close()


@pytest.mark.slow
def test_a_processor_whose_lease_cannot_be_renewed_is_notified_before_the_lease_ends(
    line: Proxy, deploy: Deploy, postgresql_url: str
) -> None:
    d = deploy(line.url(postgresql_url), lease=LEASE_S)
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
    assert d.delays.get(task).runs == 1, "none is used"


@pytest.mark.slow
def test_workers_survive_a_killed_database(own_postgresql: PostgresServer, deploy: Deploy) -> None:
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
    assert d.counted()[Status.DONE] == 52


@pytest.fixture
def small_disk(own_postgresql: PostgresServer) -> Iterator[Path]:
    """A disk of a few megabytes for a tablespace of this PostgreSQL. Only root can mount one."""
    with tempfile.TemporaryDirectory(prefix="dt_test_disk_") as folder:
        Path(folder).chmod(0o755)
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", folder])
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


@pytest.mark.slow
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


# Each failpoint once, in real processes. `./dev failpoints` runs all of them many times


ROOT = Path(__file__).parent.parent.parent
#: Failpoints that kill a whole worker, whose restart takes a second or two.
OF_MAIN = {"received", "in the pool", "sending back", "handing on", "near rows armed", "renewed"}
OF_MAIN |= {"occurrences written", "occurrences committed"}


@pytest.mark.slow
def test_tasks_recover_at_whatever_step_a_process_is_killed(redis_url: str) -> None:
    points = FAILPOINTS.values()
    names = [one.name for one in points if one.process_kind != "main" or one.name in OF_MAIN]
    command = [sys.executable, "-m", "chaos", "failpoints", "--seeds", "1", "--worlds", "2"]
    command += ["--slack", "10"]
    command += [word for name in names for word in ("--only", name)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=450)
    assert ended.returncode == 0, ended.stdout[-9000:] + ended.stderr[-3000:]
    assert "nothing found" in ended.stdout


# Some of the combinations of clocks that are an hour apart. `./dev clocks` runs all of them


APART = [("postgresql", Hours(HOUR_S, -HOUR_S, 0)), ("mariadb", Hours(-HOUR_S, 0, HOUR_S))]


@pytest.mark.slow
@pytest.mark.skipif(faketime.library() is None, reason=faketime.MISSING)
@pytest.mark.parametrize(("database", "hours"), APART)
def test_the_database_clock_decides_and_is_not_polled_in_a_tight_loop(
    database: str, hours: Hours, redis_url: str, tmp_path: Path
) -> None:
    try:
        with servers(database, hours.database) as started:
            outcome = try_out(tmp_path, started.database_url, redis_url, hours)
    except MissingServiceError as error:
        pytest.skip(str(error))
    assert outcome.verdict.findings == [], f"{outcome.figures}\n{outcome.verdict}"


@pytest.mark.slow
@pytest.mark.skipif(faketime.library() is None, reason=faketime.MISSING)
@pytest.mark.parametrize("timer", ["eta", "redis"])
def test_setting_the_clock_of_a_worker_that_holds_tasks_makes_no_task_early_or_late(
    timer: str, postgresql_url: str, redis_url: str, tmp_path: Path
) -> None:
    dial = faketime.Dial(tmp_path / "dial")
    d = Deployment(tmp_path, postgresql_url, redis_url, timer=timer)
    try:
        worker = d.worker(**dict[str, Any](dial.environment))
        for ahead_s in (-HOUR_S, HOUR_S, 0):
            tasks = [d.schedule(delay=1 + n / 10) for n in range(20)]
            time.sleep(0.5)  # the worker holds them now
            dial.set(ahead_s)
            what_it_shows = d.schedule("test.time")
            d.wait_for([*tasks, what_it_shows])
            (shown,) = (int(run[1]) for run in d.runs() if run[0] == str(what_it_shows.id))
            assert abs(shown - time.time() - ahead_s) < ABOUT_S, "the worker's clock is set"
            rows = [d.delays.get(task) for task in tasks]
            late = [row.execution_time - row.expected_time for row in rows if row.execution_time]
            assert min(late) >= timedelta(0), f"early, with {ahead_s:+d} s"
            assert max(late) < timedelta(seconds=d.r1_s() + SLACK_S), f"late, with {ahead_s:+d} s"
            assert {(row.runs, row.lapses) for row in rows} == {(1, 0)}, "each of them once"
            before, began = cpu_s(worker.pid), time.monotonic()
            time.sleep(1)  # the worker is idle meanwhile
            used = (cpu_s(worker.pid) - before) / (time.monotonic() - began)
            assert used < MOST_CPU, f"hot, with {ahead_s:+d} s"
    finally:
        d.close()
        faketime.forget_the_dead()


# Overload of the database or the broker. The calls reach the broker themselves: `arm="inline"`


#: In each direction.
SLOW_S = 0.1
#: The bound of a call: scheduling, sending, and the delays of a busy machine.
CALL_S = 1.5


def longest_s(calls: int, call: Callable[[], object]) -> float:
    """Return the duration of the longest of these consecutive calls."""
    times = []
    for _ in range(calls):
        began = time.monotonic()
        call()
        times.append(time.monotonic() - began)
    return max(times)


def threads_of(worker: Process) -> int:
    found = re.search(r"\nThreads:\s+(\d+)", Path(f"/proc/{worker.pid}/status").read_text())
    return int(found[1]) if found else 0


# -- the database ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_slow_database_does_not_make_requests_pile_up(
    line: Proxy, deploy: Deploy, postgresql_url: str
) -> None:
    d = deploy(line.url(postgresql_url), arm="inline")
    direct = d.producer(postgresql_url)
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
        most = max(most, d.queued())
        return len(direct.find(status="DONE", limit=1000)) == 151

    wait_until(are_done, 30, "all tasks to run", every_s=0.1)
    assert most <= 150, "at most one message per task, and no repeated messages"
    assert threads_of(worker) <= before + 3
    runs = [run[0] for run in d.runs()]
    assert len(runs) == len(set(runs)) == 151
    direct.close()


# -- the broker -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_blocking_rabbitmq_loses_none(
    own_rabbitmq: RabbitServer, deploy: Deploy, postgresql_url: str
) -> None:
    d = deploy(postgresql_url, own_rabbitmq.url, arm="inline")
    worker = d.worker()
    wait_until(lambda: d.runs_on_time(), 10, "the fast path")
    own_rabbitmq.alarm(True)
    try:
        # Callers wait for a bounded time, one of them gets an error, and no thread keeps waiting.
        before = threading.active_count()
        assert longest_s(20, lambda: d.schedule(delay=0.1)) < CALL_S
        assert d.delays.events.counts["timer.down"] == 1
        assert threading.active_count() <= before + 1
        assert not d.timer_is_up
        wait_until(lambda: d.counted()[Status.NOT_COMPLETE] == 0, 20, "them to be drained", 0.1)
        # A worker that has just begun sweeps without complaint.
        wait_until(lambda: "does the broker answer" in worker.log(), 20, "the worker to report it")
    finally:
        own_rabbitmq.alarm(False)
    wait_until(lambda: d.runs_on_time(), 15, "the fast path again", 0.2)
    assert d.delays.events.counts["timer.up"] == 1
    runs = [run[0] for run in d.runs()]
    assert len(runs) == len(set(runs))
