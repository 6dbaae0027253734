"""Leases, late renewals and lost workers, on every database."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import select

from delaytasks import DelayedTask, LeaseLostError, Status, TaskStateError
from delaytasks.db.sweep_queries import RegisteredWorker, WorkerTable
from delaytasks.db.types import db_now_plus
from tests.world import Level, MakeWorld, Recovered, World
from tests.world.workers import FrozenWorker

pytestmark = pytest.mark.quick

# Leases and row locks


def test_leases_are_renewed_only_for_rows_that_the_named_processes_claimed(world: World) -> None:
    before, later = world.now(), world.now() + timedelta(minutes=1)
    [mine], [theirs] = world.claim(world.put()), world.claim(world.put(), by="w2")
    for one in (mine, theirs):
        world.change(one, lease_until=before)
    assert world.renew(since=before).rows == 1
    assert world.read(mine).lease_until > before + timedelta(seconds=59)  # type: ignore[operator]
    assert world.read(theirs).lease_until == before
    assert world.renew(since=later).rows == 0, "claimed before, and lost on the way"
    assert world.renew(by="w2", since=before).rows == 1
    # A lease is renewed if a process still runs the task and names it.
    assert world.renew(since=later, named=[mine.id, theirs.id]).rows == 1
    assert world.renew(since=before, named=[mine.id]).rows == 1
    assert world.settle(mine), "its version is the one that the worker holds"


def test_a_locked_row_does_not_prevent_the_renewal_of_other_leases(world: World) -> None:
    if not world.has_row_locks:
        return
    locked, free = world.put(), world.put()
    world.claim(locked, free)
    with ThreadPoolExecutor(1) as pool, world.locked(locked):
        assert pool.submit(world.renew, by="worker-1").result(10) == (1, [locked.id])


@pytest.mark.parametrize("name", ["cancel", "reschedule", "rerun"])
def test_a_move_that_is_refused_leaves_no_lock_in_the_transaction(world: World, name: str) -> None:
    if not world.has_row_locks:
        return
    [claimed] = world.claim(world.schedule(key="k"))
    move, more = getattr(world.delays, name), () if name == "cancel" else (60,)
    with world.engine.connect() as owner, ThreadPoolExecutor(1) as pool:
        for version in (None, 0):
            with suppress(TaskStateError):
                assert not move(claimed.id, *more, version=version, session=owner)
        assert pool.submit(world.settle, claimed).result(10)


#: By database, statements, and what they return on our connections.
LIMITS: dict[str, dict[str, Any]] = {
    "postgresql": {"SHOW lock_timeout": "1s", "SHOW transaction_isolation": "read committed"},
    "mysql": {
        "SELECT @@innodb_lock_wait_timeout": 1, "SELECT @@tx_isolation": "READ-COMMITTED"
    },
    "sqlite": {"PRAGMA busy_timeout": 30000, "PRAGMA read_uncommitted": 0},
}  # fmt: skip


def test_our_connections_wait_briefly_lock_no_gaps_and_give_up_a_server(world: World) -> None:
    for connection in world.connections():
        for statement, expected in LIMITS[world.kind].items():
            assert connection.exec_driver_sql(statement).scalar() == expected
        if world.store.notices.is_possible and hasattr(socket, "TCP_USER_TIMEOUT"):
            driver: Any = connection.connection.dbapi_connection
            with socket.socket(fileno=os.dup(driver.fileno())) as line:
                assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 25_000


def test_the_rows_of_a_dead_process_are_recovered_immediately(world: World) -> None:
    mine, theirs = world.put(priority=3), world.put()
    [held] = world.claim(mine)
    world.claim(theirs, by="worker-2")
    levels = {Level("default", 3)}
    assert world.die() == Recovered(1, [], levels=levels), "and where they wait now"
    found = world.read(mine)
    assert (found.status, found.lapses, found.lease_until) == (Status.NOT_COMPLETE, 1, None)
    assert world.read(theirs).status is Status.RUNNING
    assert not world.settle(held)


# A worker that was frozen renews too late: its processors learn that the leases have ended


LEASE_S = 60.0


@pytest.fixture
def worker(make_world: MakeWorld) -> Iterator[FrozenWorker]:
    with closing(FrozenWorker(make_world(lease=LEASE_S, _chunk_time_budget_s=1))) as made:
        yield made


def test_a_lease_that_ended_before_its_renewal_is_reported_as_lost(worker: FrozenWorker) -> None:
    world = worker.world
    reported: list[str] = []

    @world.delays.processor("long")
    def work(body: object, task: DelayedTask) -> None:
        for _ in range(3):
            worker.now_s += LEASE_S / 2
            worker.renew()
            task.check_lease()
        worker.now_s += LEASE_S + 1  # all processes of the worker are frozen
        assert world.lapse(task) == 1, "another worker recovers the row"
        worker.renew()
        with pytest.raises(LeaseLostError, match="has ended"):
            task.check_lease()
        reported.append("lost")
        task.check_lease()

    worker.now_s += LEASE_S / 2
    worker.renew()
    worker.now_s += 10 * LEASE_S  # no row runs, so no lease is renewed
    world.run(task := world.schedule("long"))
    assert reported == ["lost"]
    now = world.read(task)
    assert (now.status, now.lapses) == (Status.NOT_COMPLETE, 1)
    assert [fields["id"] for fields in world.told("task.lease_lost")] == [task.id]


def test_a_row_that_was_locked_during_a_renewal_is_renewed_a_second_later(
    worker: FrozenWorker,
) -> None:
    """Otherwise a sweep could recover the row, which its worker still runs, after the lock."""
    world = worker.world
    if not world.has_row_locks:
        return
    ended: list[int] = []

    @world.delays.processor("long")
    def work(body: object, task: DelayedTask) -> None:
        over = world.now()
        world.change(task, lease_until=over)
        with world.locked(task):
            worker.now_s += LEASE_S / 2
            worker.renew()
            assert world.read(task).lease_until == over
        worker.now_s += 1
        worker.keep_leases(lambda: world.read(task).lease_until != over)
        ended.append(task.id)

    world.run(task := world.schedule("long"))
    assert ended == [task.id]
    assert world.read(task).status is Status.DONE


def test_a_dead_process_is_found_once(worker: FrozenWorker) -> None:
    """Otherwise the worker would wait for its rows, and kill this process id, when it stops."""
    worker.find_dead(2**22 + 1)  # its report came after its death
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    worker.pids.append(child.pid)  # it died before it was seen
    worker.find_dead(child.pid, has_reported=False)
    child.wait()


def test_leases_are_renewed_while_the_pool_replaces_a_process(worker: FrozenWorker) -> None:
    worker.pids.append(None)
    worker.now_s += LEASE_S / 2
    worker.renew()
    assert not worker.world.told("loop.failed")


# The registry of workers. A worker that was lost stays for an hour, where only `lost` returns it


#: More tags than the registry takes from a worker.
TOO_MANY = [f"tag.{number}" for number in range(16_384)]
SILENT_S = 60.0


def expire(world: World) -> list[str]:
    """Mark silent workers as lost, as a sweep does, and return their names."""
    return world.store.workers.expire(SILENT_S)


def present(world: World) -> list[RegisteredWorker]:
    """Return the workers that are not lost."""
    found = world.store.workers.registered(world.now(), SILENT_S)
    assert [row["name"] for row in world.store.workers.all()] == [one.name for one in found]
    return found


def lose(world: World, *names: str) -> None:
    """Let workers report, and be silent until they are lost."""
    for name in names:
        world.serve(name, "default")
    world.silence(100, *names)
    assert expire(world) == sorted(names)


def lost(world: World) -> list[str]:
    return [worker.name for worker in world.store.workers.lost()]


def names(world: World) -> list[str]:
    """Return the names in the table: those of workers that are present or lost."""
    return sorted(row[0] for row in world.rows(select(world.table("workers").c.name)))


def set_times(world: World, name: str, **seconds: float) -> None:
    """Set times of a worker to these numbers of seconds from now."""
    times = {column: db_now_plus(from_now_s) for column, from_now_s in seconds.items()}
    world.set_columns("workers", {"name": name}, **times)


def restart(world: World, name: str, queue: str = "default", pool: str = "prefork") -> None:
    """Let a worker report by a process that has not reported before."""
    table = WorkerTable(world.store.database, world.store.schema)
    table.report(name, [queue], pool, 2, 0, ["note"])


def test_a_worker_is_listed_as_it_reports_until_it_stops_in_order(world: World) -> None:
    world.serve("w1", "b", "a", tags=["mail"], clock_offset_s=-0.0015)
    world.serve("w2", pool="solo", size=1)
    first, _ = present(world)
    assert (first.queues, first.pool, first.concurrency) == (["a", "b"], "prefork", 2)
    assert (first.tags, first.clock_offset_s) == (frozenset(["mail"]), -0.0015)
    lacking = {"broker_down_s": 400.0, "timer_down_s": 30.0, "beat_s": 90.0}
    world.serve("w1", "a", pool="threads", tags=TOO_MANY, **lacking)
    again, _ = present(world)
    assert (again.queues, again.pool, again.tags) == (["a"], "threads", None)
    assert (again.started_at, again.seen_at >= first.seen_at) == (first.started_at, True)
    for stored_s, measured_s in zip(again.services, lacking.values(), strict=True):
        assert measured_s <= (stored_s or 0) < measured_s + 60
    set_times(world, "w1", started_at=-3600)
    for report, is_new in ((world.serve, False), (partial(restart, world), True)):
        report("w1")
        worker, _ = present(world)
        age_s = (worker.seen_at - worker.started_at).total_seconds()
        assert (age_s < 3600) is is_new, "after a crash, it has a new start"
        assert set(worker.services) == {None}
    lose(world, "w3")
    for name in ("w1", "w3"):
        world.store.workers.remove(name)
    assert (names(world), lost(world)) == (["w2"], [])


def test_a_silent_worker_is_lost_once_until_it_reports(world: World) -> None:
    world.serve("alive", "default")
    before = world.now()
    lose(world, "killed")
    assert (expire(world), [one.name for one in present(world)]) == ([], ["alive"])
    [gone] = world.store.workers.lost()
    assert (gone.name, gone.queues, gone.concurrency) == ("killed", ["default"], 2)
    assert before <= gone.lost_at <= world.now()
    assert (gone.lost_at - gone.seen_at).total_seconds() >= 100
    restart(world, "killed", "mail", "threads")
    _, worker = present(world)
    assert (worker.is_alive, worker.queues, worker.pool) == (True, ["mail"], "threads")
    assert worker.tags == frozenset(["note"])
    # Otherwise, a clock that is set back would make a live worker a lost one.
    set_times(world, "killed", seen_at=-1000)
    assert ([one.name for one in present(world)], lost(world)) == (["alive", "killed"], [])
    assert expire(world) == ["killed"], "it is lost a second time"


def test_simultaneous_reports_and_sweeps_have_each_name_once(world: World) -> None:
    workers, start = [f"w{number:02}" for number in range(20)], threading.Barrier(4)

    def work(_: int) -> list[str]:
        start.wait()
        for name in workers:
            world.serve(name, "default")
        start.wait()
        world.silence(100, *workers)
        start.wait()
        return expire(world)

    with ThreadPoolExecutor(4) as pool:
        found = [name for some in pool.map(work, range(4)) for name in some]
    assert sorted(found) == sorted(lost(world)) == workers


def test_lost_workers_are_listed_for_an_hour_the_latest_loss_first(world: World) -> None:
    times = {"w1": (-50, -100), "w2": (-10, -100), "kept": (-3540, -3700), "over": (-3601, -3800)}
    times["before the clock was set back"] = 5100, 5000
    lose(world, *times)
    for name, (lost_s, seen_s) in times.items():
        set_times(world, name, lost_at=lost_s, seen_at=seen_s)
    assert expire(world) == []
    assert (lost(world), names(world)) == (["w2", "w1", "kept"], ["kept", "w1", "w2"])


def test_a_worker_that_was_seen_in_the_future_is_lost(world: World) -> None:
    for name in ("good", "strange"):
        world.serve(name, "default")
    set_times(world, "strange", seen_at=1e9)
    assert [worker.is_alive for worker in present(world)] == [True, False]
    assert expire(world) == ["strange"]
    assert [worker.name for worker in present(world)] == ["good"]
