"""Leases, late renewals and lost workers, on every database."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sqlalchemy import select

from delaytasks import DelayedTask, LeaseLostError, Status, StoreUnavailableError, TaskStateError
from delaytasks.core.clock import to_us
from delaytasks.core.interfaces import Level, Recovered
from delaytasks.core.workers import ServiceTimes
from delaytasks.execution import executor as run_module
from delaytasks.operations.state import read_tables
from delaytasks.storage import database, worker_table
from delaytasks.storage.store import Store
from delaytasks.storage.types import db_now_plus
from delaytasks.storage.worker_table import LOST_FOR_S, WorkerTable
from delaytasks.worker import lease_keeper as keeper_module
from delaytasks.worker.lease_keeper import LeaseKeeper, WorkerShares
from tests.recording import set_columns
from tests.waiting import wait_until
from tests.world import MakeWorld, World

pytestmark = pytest.mark.quick

# Leases and row locks


def test_leases_are_renewed_only_for_rows_that_the_named_processes_claimed(world: World) -> None:
    before, [mine], [theirs] = (
        world.now(),
        world.claim(world.put()),
        world.claim(world.put(), by="w2"),
    )
    leases, later = world.store.leases, world.now() + timedelta(minutes=1)
    for one in (mine, theirs):
        world.change(one, lease_until=before)
    assert leases.renew(["worker-1"], before).rows == 1
    assert world.read(mine).lease_until > before + timedelta(seconds=59)  # type: ignore[operator]
    assert world.read(theirs).lease_until == before
    assert leases.renew(["worker-1"], later).rows == 0, "claimed before, and lost on the way"
    assert leases.renew(["w2", "w3"], before).rows == 1
    # A lease is renewed if a process still runs the task and names it.
    assert leases.renew(["worker-1"], later, [mine.id, theirs.id]).rows == 1
    assert leases.renew(["worker-1"], before, [mine.id]).rows == 1
    assert world.settle(mine), "its version is the one that the worker holds"


def test_a_locked_row_does_not_prevent_the_renewal_of_other_leases(world: World) -> None:
    if not world.has_row_locks:
        return
    locked, free = world.put(), world.put()
    world.claim(locked, free)
    with ThreadPoolExecutor(1) as pool, world.locked(locked):
        assert pool.submit(world.renew, by="worker-1").result(3) == (1, [locked.id])


@pytest.mark.parametrize("name", ["cancel", "reschedule", "rerun"])
def test_a_move_that_is_refused_leaves_no_lock_in_the_callers_transaction(
    world: World, name: str
) -> None:
    if not world.has_row_locks:
        return
    [claimed] = world.claim(world.schedule(key="k"))
    more = () if name == "cancel" else (claimed.expected_time,)
    with world.engine.connect() as owner, ThreadPoolExecutor(1) as pool:
        for version in (None, 0):
            with pytest.raises(TaskStateError):
                getattr(world.store.tasks, name)(claimed.id, *more, version=version, on=owner)
        assert pool.submit(world.settle, claimed).result(3)


@pytest.mark.slow
def test_a_settlement_waits_for_a_lock_only_for_a_while(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not world.has_row_locks:
        return
    monkeypatch.setattr(database, "RETRY_FOR_S", 0)
    # One settlement stands alone, and one shares a transaction with its key.
    claimed = world.claim(world.schedule(), world.schedule(key="k"))
    with world.locked(*claimed):
        for one in claimed:
            with pytest.raises(StoreUnavailableError, match="stayed busy"):
                world.settle(one)
    assert [world.settle(one) for one in claimed] == [True, True]


def test_our_connections_wait_briefly_and_lock_no_gaps(world: World) -> None:
    d = world.store.database
    asked, expected = {
        "postgresql": (
            ("SHOW lock_timeout", "SHOW transaction_isolation"),
            ("1s", "read committed"),
        ),
        "mysql": (
            ("SELECT @@innodb_lock_wait_timeout", "SELECT @@tx_isolation"),
            (1, "READ-COMMITTED"),
        ),
        "sqlite": (("PRAGMA busy_timeout", "PRAGMA read_uncommitted"), (30000, 0)),
    }[d.url.get_backend_name()]
    for engine in (d.auto, d.tx):
        with engine.connect() as connection:
            assert tuple(connection.exec_driver_sql(one).scalar() for one in asked) == expected


def test_a_server_that_vanished_is_given_up_after_25_seconds(world: World) -> None:
    if not world.has_row_locks or not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    for engine in (world.store.database.auto, world.engine):
        with engine.connect() as connection:
            driver: Any = connection.connection.dbapi_connection
            number = (driver if hasattr(driver, "fileno") else driver._sock).fileno()
            with socket.socket(fileno=os.dup(number)) as line:
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


def test_a_task_that_loses_too_many_leases_in_a_row_fails(world: World) -> None:
    made = world.put()
    for lapses in (1, 2, 3):
        assert world.worker().claim_alone(world.read(made)) != []
        assert world.lapse(made, max_lost_leases=3) == 1
        found = world.read(made)
        is_last = lapses == 3
        assert (found.lapses, found.status is Status.FAILED) == (lapses, is_last)
    assert "3 times in a row" in (found.error or "")
    assert found.runs == 3


@pytest.mark.parametrize("verb", ["recover", "release"])
@pytest.mark.parametrize("end", ["waits", "fails", "fails after its key went to another task"])
def test_a_recovered_task_leaves_its_key_only_if_it_fails(
    world: World, verb: str, end: str
) -> None:
    made, other = world.schedule(key="k"), world.schedule()
    world.claim(made, other)
    if "another" in end:
        new = world.schedule(key="k", on_conflict="replace", delay=60)
    most = 5 if end == "waits" else 1
    if verb == "recover":
        assert world.lapse(made, other, max_lost_leases=most) == 2
    else:
        found = world.die(max_lost_leases=most)
        lost = set() if end == "waits" else {made.id, other.id}
        assert (found.total, {one.id for one in found.worker_lost}) == (2, lost)
    owner = world.store.tasks.id_of_key("note", "k")
    assert owner == {"waits": made.id, "fails": None}.get(end, new.id if "another" in end else 0)


def test_lost_leases_are_found_in_bounded_steps(world: World) -> None:
    world.claim(*world.put_many(5))
    assert world.recover().total == 0, "the leases still last"
    world.advance(61)
    assert [world.recover(most=2).total for _ in range(4)] == [2, 2, 1, 0]


# A worker that was frozen renews too late: its processors learn that the leases have ended


LEASE_S = 60.0


class FrozenWorker:
    """A runner, and the main process that renews its leases, with a monotonic clock that is set."""

    def __init__(self, make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100_000.0
        for module in (run_module, keeper_module):
            monkeypatch.setattr(module, "monotonic", lambda: self.now_s)
        self.world = world = make_world(lease=LEASE_S, _chunk_time_budget_s=1)
        processes = world.worker().processes
        self.renewals = processes.renewals
        chunk_began_us = to_us(world.now()) - int(LEASE_S * 1e6)
        self.dispatcher = dispatcher = SimpleNamespace(running=lambda: ([chunk_began_us], {}))
        pool = SimpleNamespace(info={"processes": [os.getpid()]})
        self._keeper = LeaseKeeper(world.runtime, processes, cast("Any", dispatcher), pool, None)

    def renew(self) -> None:
        """Let the main process renew the leases once."""
        self.run_keeper(lambda: self.renewals.last()[0] == self.now_s)

    def run_keeper(self, until: Callable[[], bool]) -> None:
        self._keeper.loop.start()
        try:
            wait_until(until, 10, "the renewal")
        finally:
            self._keeper.loop.stop()


@pytest.fixture
def worker(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> FrozenWorker:
    return FrozenWorker(make_world, monkeypatch)


def test_a_lease_that_ended_before_its_renewal_is_reported_as_lost(worker: FrozenWorker) -> None:
    world = worker.world
    reported: list[str] = []

    @world.delays.processor("long")
    def work(body: object, task: DelayedTask) -> None:
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

    task = world.schedule("long")
    world.run(task)
    assert reported == ["lost"]
    now = world.read(task)
    assert (now.status, now.lapses) == (Status.NOT_COMPLETE, 1)
    assert [fields["id"] for fields in world.told("task.lease_lost")] == [task.id]


def test_a_run_that_began_after_an_idle_time_has_its_lease(worker: FrozenWorker) -> None:
    world = worker.world
    ended: list[int] = []

    @world.delays.processor("long")
    def work(body: object, task: DelayedTask) -> None:
        for _ in range(3):
            worker.now_s += LEASE_S / 2
            worker.renew()
            task.check_lease()
        ended.append(task.id)

    for _ in range(2):
        worker.now_s += 10 * LEASE_S  # no row runs, so no lease is renewed
        world.run(world.schedule("long"))
    assert len(ended) == 2


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
        worker.run_keeper(lambda: world.read(task).lease_until != over)
        ended.append(task.id)

    task = world.schedule("long")
    world.run(task)
    assert ended == [task.id]
    assert world.read(task).status is Status.DONE


def test_a_process_is_dead_although_its_last_report_came_after_its_death(
    worker: FrozenWorker,
) -> None:
    """Otherwise the worker would wait for its rows, and kill this process id, when it stops."""
    dead, found = 2**22 + 1, list[int]()
    worker.dispatcher.running = lambda: ([], {} if found else {dead: (7,)})
    worker.dispatcher.process_died = lambda pid: found.append(pid)
    worker.run_keeper(lambda: bool(found))
    assert found == [dead]


# The registry of workers. A worker that was lost stays for an hour, where only `lost` returns it


SILENT_S = 60.0


def report(store: Store, *names: str, **fields: Any) -> None:
    for name in names:
        store.workers.report(name, ["default"], "prefork", 2, 0, ["mail"], **fields)


def change(store: Store, name: str, **seconds: float) -> None:
    """Set times of a worker's row to the given numbers of seconds from now."""
    values = {column: db_now_plus(from_now_s) for column, from_now_s in seconds.items()}
    set_columns(store, "workers", {"name": name}, **values)


def lose(store: Store, *names: str) -> None:
    report(store, *names)
    for name in names:
        change(store, name, seen_at=-100)
    assert store.workers.expire(SILENT_S) == sorted(names)


def present(store: Store) -> list[str]:
    found = [worker["name"] for worker in store.workers.all()]
    assert [worker.name for worker in store.workers.registered(store.tasks.now(), 60)] == found
    return found


def lost(store: Store) -> list[str]:
    return [worker.name for worker in store.workers.lost()]


def rows(store: Store) -> list[str]:
    w = store.schema.workers
    return [row.name for row in store.database.rows(select(w.c.name).order_by(w.c.name))]


def test_a_worker_is_listed_as_it_reports_until_it_stops_in_order(store: Store) -> None:
    store.workers.report("w1", ["b", "a"], "prefork", 2, -1500)
    store.workers.report("w2", [], "solo", 1, 0)
    [first, _] = store.workers.all()
    shown = [first[name] for name in ("name", "queues", "pool", "concurrency", "clock_offset_us")]
    assert shown == ["w1", ["a", "b"], "prefork", 2, -1500]
    lacking = ServiceTimes(broker_down_s=400, timer_down_s=30, beat_s=90)
    store.workers.report("w1", ["a"], "threads", 3, 7, services=lacking)
    again = store.workers.all()[0]
    kept = again["queues"], again["pool"], again["started_at"]
    assert kept == (["a"], "threads", first["started_at"])
    assert again["seen_at"] >= first["seen_at"]
    worker = store.workers.registered(store.tasks.now(), 60)[0]
    for stored_s, measured_s in zip(worker.services, (400, 30, 90), strict=True):
        assert stored_s is not None
        assert measured_s <= stored_s < measured_s + 60
    report(store, "w1")
    assert store.workers.registered(store.tasks.now(), 60)[0].services == ServiceTimes()
    lose(store, "w3")
    for name in ("w1", "w3"):
        store.workers.remove(name)
    assert (rows(store), lost(store)) == (["w2"], [])


def test_a_worker_that_restarts_after_a_crash_has_a_new_start(store: Store) -> None:
    report(store, "w1")
    change(store, "w1", started_at=-3600)
    report(store, "w1")
    for process, is_old in (
        (store.workers, True),
        (WorkerTable(store.database, store.schema), False),
    ):
        process.report("w1", ["a"], "prefork", 2, 0)
        [worker] = store.workers.registered(store.tasks.now(), 60)
        assert ((worker.seen_at - worker.started_at).total_seconds() >= 3600) is is_old


def test_several_threads_may_report_a_worker_simultaneously(store: Store) -> None:
    start = threading.Barrier(4)

    def seen(_: int) -> None:
        start.wait()
        report(store, "w1")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(seen, range(4)))
    assert present(store) == ["w1"]


def test_a_silent_worker_is_returned_once_and_is_lost_from_then_on(store: Store) -> None:
    report(store, "alive")
    before = store.tasks.now()
    lose(store, "killed")
    assert store.workers.expire(SILENT_S) == []
    assert present(store) == ["alive"]
    [worker] = store.workers.lost()
    assert (worker.name, worker.queues, worker.concurrency) == ("killed", ["default"], 2)
    assert before <= worker.lost_at <= store.tasks.now()
    assert (worker.lost_at - worker.seen_at).total_seconds() >= 100


def test_simultaneous_sweeps_return_each_name_once(store: Store) -> None:
    names = [f"w{number:02}" for number in range(20)]
    report(store, *names)
    for name in names:
        change(store, name, seen_at=-100)
    start = threading.Barrier(4)

    def sweep(_: int) -> list[str]:
        start.wait()
        return store.workers.expire(SILENT_S)

    with ThreadPoolExecutor(4) as pool:
        found = [name for names in pool.map(sweep, range(4)) for name in names]
    assert sorted(found) == sorted(lost(store)) == names


def test_the_latest_loss_comes_first(store: Store) -> None:
    lose(store, "w1", "w2", "w3")
    for name, at_s in (("w1", -50), ("w2", -10), ("w3", -30)):
        change(store, name, lost_at=at_s)
    assert lost(store) == ["w2", "w3", "w1"]


@pytest.mark.parametrize(
    ("seconds", "is_kept"),
    [
        ({"lost_at": -LOST_FOR_S - 1, "seen_at": -LOST_FOR_S - 200}, False),
        ({"lost_at": -LOST_FOR_S + 60, "seen_at": -LOST_FOR_S - 100}, True),
        ({"lost_at": 5100, "seen_at": 5000}, False),  # the clock was set back
    ],
)
def test_a_lost_worker_is_removed_after_an_hour(
    store: Store, seconds: dict[str, float], is_kept: bool
) -> None:
    lose(store, "w1")
    change(store, "w1", **seconds)
    assert store.workers.expire(SILENT_S) == []
    assert rows(store) == lost(store) == (["w1"] if is_kept else [])


def test_a_sweep_removes_a_limited_number_of_lost_workers(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["w1", "w2", "w3"]
    lose(store, *names)
    for name in names:
        change(store, name, lost_at=-LOST_FOR_S - 1, seen_at=-LOST_FOR_S - 200)
    monkeypatch.setattr(worker_table, "EXPIRED_PER_SWEEP", 2)
    assert store.workers.expire(SILENT_S) == []
    assert rows(store) == ["w3"]
    lose(store, "w4")


def test_a_worker_that_reports_again_is_no_longer_lost(store: Store) -> None:
    lose(store, "w1")
    WorkerTable(store.database, store.schema).report("w1", ["mail"], "threads", 3, 0, ["note"])
    [worker] = store.workers.registered(store.tasks.now(), 60)
    assert (worker.is_alive, worker.queues, worker.pool) == (True, ["mail"], "threads")
    assert list(worker.tags or ()) == ["note"]
    # Otherwise, a clock that is set back would make a live worker a lost one.
    change(store, "w1", seen_at=-1000)
    assert (present(store), lost(store)) == (["w1"], [])
    assert store.workers.expire(SILENT_S) == ["w1"], "it is lost a second time"


def test_a_lost_worker_counts_nowhere_even_if_its_report_looks_recent(world: World) -> None:
    lose(world.store, "killed")
    change(world.store, "killed", seen_at=-1, lost_at=0)
    world.put(due_s=-3600)
    found = read_tables(world.store, world.delays.settings)
    assert found.workers == []
    assert [group.reason.facts["last_seen"] for group in found.late] == [{}]
    assert world.sweep()
    assert world.broker.requested_drains == [], "no worker would receive the message"


def test_a_worker_that_was_seen_in_the_future_is_lost(store: Store) -> None:
    report(store, "good", "strange")
    change(store, "strange", seen_at=1e9)
    found = store.workers.registered(store.tasks.now(), SILENT_S)
    assert [worker.is_alive for worker in found] == [True, False]
    members = WorkerShares("me")
    members.learn(
        [row for row in store.workers.all() if row["name"] != "good"], store.tasks.now(), 5
    )
    assert members._workers == []
    assert store.workers.expire(SILENT_S) == ["strange"]
    assert present(store) == ["good"]
