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
from typing import Any

import pytest

from delaytasks import DelayedTask, LeaseLostError, Status, TaskStateError
from tests.world import Level, MakeWorld, Recovered, World
from tests.world.workers import FrozenWorker, Registry

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


@pytest.fixture
def registry(world: World) -> Registry:
    return Registry(world)


#: More tags than the registry takes from a worker.
TOO_MANY = [f"tag.{number}" for number in range(16_384)]


def present(registry: Registry) -> list[str]:
    return [worker.name for worker in registry.present()]


def lost(registry: Registry) -> list[str]:
    return [worker.name for worker in registry.lost()]


def test_a_worker_is_listed_as_it_reports_until_it_stops_in_order(registry: Registry) -> None:
    registry.report("w1", queues=["b", "a"], offset_us=-1500)
    registry.report("w2", queues=[], pool="solo", concurrency=1)
    first, _ = registry.present()
    assert (first.queues, first.pool, first.concurrency) == (["a", "b"], "prefork", 2)
    assert (first.tags, first.clock_offset_s) == (frozenset(["mail"]), -0.0015)
    lacking = {"broker_down_s": 400.0, "timer_down_s": 30.0, "beat_s": 90.0}
    registry.report("w1", queues=["a"], pool="threads", tags=TOO_MANY, **lacking)
    again, _ = registry.present()
    assert (again.queues, again.pool, again.tags) == (["a"], "threads", None)
    assert again.started_at == first.started_at <= first.seen_at <= again.seen_at
    for stored_s, measured_s in zip(again.services, lacking.values(), strict=True):
        assert stored_s is not None
        assert measured_s <= stored_s < measured_s + 60
    registry.change("w1", started_at=-3600)
    for is_restarted in (False, True):
        registry.report("w1", is_restarted=is_restarted)
        worker, _ = registry.present()
        age_s = (worker.seen_at - worker.started_at).total_seconds()
        assert (age_s < 3600) is is_restarted, "after a crash, it has a new start"
        assert set(worker.services) == {None}
    registry.lose("w3")
    for name in ("w1", "w3"):
        registry.stop(name)
    assert (registry.names(), lost(registry)) == (["w2"], [])


def test_a_silent_worker_is_lost_once_until_it_reports(world: World, registry: Registry) -> None:
    registry.report("alive")
    before = world.now()
    registry.lose("killed")
    assert (registry.expire(), present(registry)) == ([], ["alive"])
    [gone] = registry.lost()
    assert (gone.name, gone.queues, gone.concurrency) == ("killed", ["default"], 2)
    assert before <= gone.lost_at <= world.now()
    assert (gone.lost_at - gone.seen_at).total_seconds() >= 100
    registry.report("killed", queues=["mail"], pool="threads", tags=["note"], is_restarted=True)
    _, worker = registry.present()
    assert (worker.is_alive, worker.queues, worker.pool) == (True, ["mail"], "threads")
    assert worker.tags == frozenset(["note"])
    # Otherwise, a clock that is set back would make a live worker a lost one.
    registry.change("killed", seen_at=-1000)
    assert (present(registry), lost(registry)) == (["alive", "killed"], [])
    assert registry.expire() == ["killed"], "it is lost a second time"


def test_simultaneous_reports_and_sweeps_have_each_name_once(registry: Registry) -> None:
    names, start = [f"w{number:02}" for number in range(20)], threading.Barrier(4)

    def work(_: int) -> list[str]:
        start.wait()
        registry.report(*names)
        start.wait()
        registry.change(*names, seen_at=-100)
        start.wait()
        return registry.expire()

    with ThreadPoolExecutor(4) as pool:
        found = [name for some in pool.map(work, range(4)) for name in some]
    assert sorted(found) == sorted(lost(registry)) == names


def test_lost_workers_are_listed_for_an_hour_the_latest_loss_first(registry: Registry) -> None:
    times = {"w1": (-50, -100), "w2": (-10, -100), "kept": (-3540, -3700), "over": (-3601, -3800)}
    times["before the clock was set back"] = 5100, 5000
    registry.lose(*times)
    for name, (lost_s, seen_s) in times.items():
        registry.change(name, lost_at=lost_s, seen_at=seen_s)
    assert registry.expire() == []
    assert (lost(registry), registry.names()) == (["w2", "w1", "kept"], ["kept", "w1", "w2"])


def test_a_lost_worker_with_a_new_report_counts_nowhere(world: World, registry: Registry) -> None:
    registry.lose("killed")
    registry.change("killed", seen_at=-1, lost_at=0)
    [reason, *_] = world.why(world.put(due_s=-3600))
    assert "was seen" not in reason.sentence
    assert present(registry) == []
    assert world.sweep()
    assert world.told("queue.unserved")


def test_a_worker_that_was_seen_in_the_future_is_lost(registry: Registry) -> None:
    registry.report("good", "strange")
    registry.change("strange", seen_at=1e9)
    assert [worker.is_alive for worker in registry.present()] == [True, False]
    assert registry.expire() == ["strange"]
    assert present(registry) == ["good"]
