"""Leases, late renewals and lost workers, on every database."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sqlalchemy import Connection, insert, select, update

from delaytasks import DelayedTask, DelayTasks, Status
from delaytasks.core.clock import to_us
from delaytasks.core.errors import LeaseLostError, StoreUnavailableError, TaskStateError
from delaytasks.core.interfaces import Level, Recovered, Settlement
from delaytasks.execution import executor as run_module
from delaytasks.operations.state import read_tables
from delaytasks.runtime import runtime_of
from delaytasks.storage import database, worker_table
from delaytasks.storage.claims import Claims
from delaytasks.storage.store import Store
from delaytasks.storage.types import db_now_plus
from delaytasks.storage.worker_table import LOST_FOR_S, WorkerTable
from delaytasks.worker import lease_keeper as keeper_module
from delaytasks.worker.lease_keeper import LeaseKeeper, WorkerShares
from tests.conformance.store_rows import (
    add,
    entry,
    has_row_locks,
    keyed,
    lapse_all,
    read,
    second_store,
    seconds,
    task,
)
from tests.recording import record_sweeps
from tests.waiting import wait_until
from tests.world import MakeWorld
from tests.world.broker import RecordingTimer

# Leases and row locks, on every database


@pytest.mark.quick
def test_leases_are_renewed_only_for_rows_that_the_named_processes_claimed(
    store: Store, claims: Claims
) -> None:
    before, other = store.tasks.now(), store.claims("worker-2", None)
    mine, theirs = add(store), add(store)
    claims.claim([entry(mine)])
    other.claim([entry(theirs)])
    t = store.schema.tasks
    with store.database.begin() as connection:
        connection.execute(update(t).values(lease_until=before))
    assert store.leases.renew(["worker-1"], before).rows == 1
    assert read(store, mine.id).lease_until > seconds(before, 59)  # type: ignore[operator]
    assert read(store, theirs.id).lease_until == before
    # A row that was claimed before this instant, and that the process lost, is not renewed.
    assert store.leases.renew(["worker-1"], seconds(store.tasks.now(), 1)).rows == 0
    assert store.leases.renew(["worker-2", "worker-3"], before).rows == 1
    # A lease is renewed if a process still runs the task and names it.
    later = seconds(store.tasks.now(), 1)
    assert store.leases.renew(["worker-1"], later, [mine.id, theirs.id]).rows == 1
    assert store.leases.renew(["worker-1"], before, [mine.id]).rows == 1


@pytest.mark.quick
def test_a_renewed_lease_keeps_the_version_that_the_worker_holds(
    store: Store, claims: Claims
) -> None:
    before = store.tasks.now()
    claimed = claims.claim([entry(add(store))])
    store.leases.renew(["worker-1"], before)
    assert claims.settle([Settlement(one, "succeed") for one in claimed]) == {claimed[0].id}


@pytest.mark.quick
def test_a_locked_row_does_not_prevent_the_renewal_of_other_leases(
    store: Store, claims: Claims, owner: Connection
) -> None:
    if not has_row_locks(store):
        return
    before = store.tasks.now()
    locked, free = add(store), add(store)
    claims.claim([entry(locked), entry(free)])
    store.tasks._moves.locked(owner, locked.id)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(store.leases.renew, ["worker-1"], before).result(3) == (1, [locked.id])


@pytest.mark.quick
@pytest.mark.parametrize("name", ["cancel", "reschedule", "rerun"])
def test_a_move_that_is_refused_leaves_no_lock_in_the_callers_transaction(
    store: Store, claims: Claims, owner: Connection, name: str
) -> None:
    if not has_row_locks(store):
        return
    made = keyed(store)
    [claimed] = claims.claim([entry(made)])
    more = () if name == "cancel" else (made.expected_time,)
    for version in (None, 0):
        with pytest.raises(TaskStateError):
            getattr(store.tasks, name)(made.id, *more, version=version, on=owner)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(claims.settle, [Settlement(claimed, "succeed")]).result(3) == {made.id}


@pytest.mark.quick
@pytest.mark.slow
def test_a_settlement_waits_for_a_lock_only_for_a_while(
    store: Store, claims: Claims, owner: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_row_locks(store):
        return
    monkeypatch.setattr(database, "RETRY_FOR_S", 0)
    other = second_store(store, store.database.url.render_as_string(hide_password=False))
    plain, key = add(store), keyed(store)
    claimed = other.claims("worker-2", None).claim([entry(plain), entry(key)])
    for one in claimed:
        store.tasks._moves.locked(owner, one.id)
    # One settlement stands alone, and one shares a transaction with its key.
    for one in claimed:
        with pytest.raises(StoreUnavailableError, match="stayed busy"):
            other.claims("worker-2", None).settle([Settlement(one, "succeed")])
    owner.get_transaction().rollback()  # type: ignore[union-attr]
    assert len(claims.settle([Settlement(one, "succeed") for one in claimed])) == 2
    other.close()


@pytest.mark.quick
def test_our_connections_wait_briefly_and_lock_no_gaps(store: Store) -> None:
    backend, d = store.database.url.get_backend_name(), store.database
    asked = {
        "postgresql": ("SHOW lock_timeout", "SHOW transaction_isolation"),
        "mysql": ("SELECT @@innodb_lock_wait_timeout", "SELECT @@tx_isolation"),
        "sqlite": ("PRAGMA busy_timeout", "PRAGMA read_uncommitted"),
    }[backend]
    expected = {
        "postgresql": ("1s", "read committed"),
        "mysql": (1, "READ-COMMITTED"),
        "sqlite": (30000, 0),
    }[backend]
    for engine in (d.auto, d.tx):
        with engine.connect() as connection:
            assert tuple(connection.exec_driver_sql(one).scalar() for one in asked) == expected


@pytest.mark.quick
def test_a_server_that_vanished_is_given_up_after_25_seconds(store: Store) -> None:
    if not has_row_locks(store) or not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    for engine in (store.database.auto, store.database.tx):
        with engine.connect() as connection:
            driver: Any = connection.connection.dbapi_connection
            number = (driver if hasattr(driver, "fileno") else driver._sock).fileno()
            with socket.socket(fileno=os.dup(number)) as line:
                assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 25_000


@pytest.mark.quick
def test_the_rows_of_a_dead_process_lapse_immediately(store: Store, claims: Claims) -> None:
    mine, theirs = add(store, priority=3), add(store)
    [held] = claims.claim([entry(mine)])
    store.claims("worker-2", None).claim([entry(theirs)])
    lapsed = store.leases.release(["worker-1"], max_lost_leases=5)
    assert lapsed == Recovered(1, [], levels={Level(mine.queue, 3)}), "and where they wait now"
    found = read(store, mine.id)
    assert (found.status, found.lapses, found.lease_until) == (Status.NOT_COMPLETE, 1, None)
    assert read(store, theirs.id).status is Status.RUNNING
    assert claims.settle([Settlement(held, "succeed")]) == set()


@pytest.mark.quick
def test_a_task_that_lapses_too_often_in_a_row_is_failed(store: Store, claims: Claims) -> None:
    made = add(store)
    for lapses in (1, 2, 3):
        found = read(store, made.id)
        assert claims.claim_alone(found.id, found.version) != []
        assert lapse_all(store, [made], max_lost_leases=3) == 1
        found = read(store, made.id)
        assert found.lapses == lapses
        assert found.status is (Status.FAILED if lapses == 3 else Status.NOT_COMPLETE)
    assert "3 times in a row" in (found.error or "")
    assert found.runs == 3


@pytest.mark.quick
@pytest.mark.parametrize("name", ["recover", "release"])
def test_a_task_that_is_given_up_leaves_its_key(store: Store, claims: Claims, name: str) -> None:
    made, other = keyed(store), add(store, key="free")
    claims.claim([entry(made), entry(other)])
    if name == "release":
        lapsed = store.leases.release(["worker-1"], max_lost_leases=1)
    else:
        t = store.schema.tasks
        with store.database.begin() as connection:
            connection.execute(update(t).values(lease_until=seconds(store.tasks.now(), -1)))
        lapsed = store.sweeps.recover(1, 100)
    assert lapsed.total == 2
    assert {one.id for one in lapsed.worker_lost} == {made.id, other.id}
    assert store.tasks.id_of_key("mail", "order-1") is None
    assert keyed(store).id != made.id


@pytest.mark.quick
def test_a_task_that_lapses_keeps_its_key(store: Store, claims: Claims) -> None:
    made = keyed(store)
    lapse_all(store, claims.claim([entry(made)]))
    assert store.tasks.id_of_key("mail", "order-1") == made.id


@pytest.mark.quick
def test_a_key_that_went_to_another_task_is_kept_when_the_old_one_is_given_up(
    store: Store, claims: Claims
) -> None:
    made = keyed(store)
    claims.claim([entry(made)])
    new, _ = store.tasks.insert_keyed(task(store, key="order-1"), "replace")
    assert lapse_all(store, [made], max_lost_leases=1) == 1
    assert store.tasks.id_of_key("mail", "order-1") == new.id


@pytest.mark.quick
def test_a_lease_that_still_lasts_does_not_lapse(store: Store, claims: Claims) -> None:
    claims.claim([entry(add(store))])
    assert store.sweeps.recover(5, 100) == Recovered(0, [])


@pytest.mark.quick
def test_lapses_are_found_in_bounded_steps(store: Store, claims: Claims) -> None:
    claimed = claims.claim([entry(add(store)) for _ in range(5)])
    t = store.schema.tasks
    with store.database.begin() as connection:
        connection.execute(update(t).values(lease_until=seconds(store.tasks.now(), -1)))
    assert [store.sweeps.recover(5, 2).total for _ in range(4)] == [2, 2, 1, 0]
    assert len(claimed) == 5


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


@pytest.mark.quick
def test_a_lease_that_ended_before_its_renewal_is_reported_as_lost(worker: FrozenWorker) -> None:
    world = worker.world
    reported: list[str] = []

    @world.delays.processor("long")
    def work(body: object, task: DelayedTask) -> None:
        worker.now_s += LEASE_S / 2
        worker.renew()
        task.check_lease()
        worker.now_s += LEASE_S + 1  # all processes of the worker are frozen
        assert lapse_all(world.store, [task]) == 1, "another worker recovers the row"
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


@pytest.mark.quick
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


@pytest.mark.quick
def test_a_row_that_was_locked_during_a_renewal_is_renewed_a_second_later(
    worker: FrozenWorker, owner: Connection
) -> None:
    """Otherwise a sweep could recover the row, which its worker still runs, after the lock."""
    world = worker.world
    if not has_row_locks(world.store):
        return
    ended: list[int] = []

    @world.delays.processor("long")
    def work(body: object, task: DelayedTask) -> None:
        over, t = world.store.tasks.now(), world.store.schema.tasks
        with world.store.database.begin() as connection:
            connection.execute(update(t).where(t.c.id == task.id).values(lease_until=over))
        world.store.tasks._moves.locked(owner, task.id)
        worker.now_s += LEASE_S / 2
        worker.renew()
        assert world.read(task).lease_until == over
        owner.get_transaction().rollback()  # type: ignore[union-attr]
        worker.now_s += 1
        worker.run_keeper(lambda: world.read(task).lease_until != over)
        ended.append(task.id)

    task = world.schedule("long")
    world.run(task)
    assert ended == [task.id]
    assert world.read(task).status is Status.DONE


@pytest.mark.quick
def test_a_process_is_dead_although_its_last_report_came_after_its_death(
    worker: FrozenWorker,
) -> None:
    """Otherwise the worker would wait for its rows, and kill this process id, when it stops."""
    dead, found = 2**22 + 1, list[int]()
    worker.dispatcher.running = lambda: ([], {} if found else {dead: (7,)})
    worker.dispatcher.process_died = lambda pid: found.append(pid)
    worker.run_keeper(lambda: bool(found))
    assert found == [dead]


# A worker that was lost stays in the registry for an hour, where only `lost` returns it


SILENT_S = 60.0


def report(store: Store, *names: str) -> None:
    for name in names:
        store.workers.report(name, ["default"], "prefork", 2, 0, ["mail"])


def change(store: Store, name: str, **seconds: float) -> None:
    """Set times of a worker's row to the given numbers of seconds from now."""
    w = store.schema.workers
    values = {column: db_now_plus(from_now_s) for column, from_now_s in seconds.items()}
    with store.database.begin() as connection:
        connection.execute(update(w).where(w.c.name == name).values(**values))


def lose(store: Store, *names: str) -> None:
    for name in names:
        report(store, name)
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
    assert sorted(found) == names
    assert lost(store) == names


def test_a_lost_worker_is_removed_after_an_hour(store: Store) -> None:
    lose(store, "old", "recent")
    change(store, "old", lost_at=-LOST_FOR_S - 1, seen_at=-LOST_FOR_S - 200)
    change(store, "recent", lost_at=-LOST_FOR_S + 60, seen_at=-LOST_FOR_S - 100)
    assert store.workers.expire(SILENT_S) == []
    assert rows(store) == lost(store) == ["recent"]


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
    report(store, "w4")
    change(store, "w4", seen_at=-100)
    assert store.workers.expire(SILENT_S) == ["w4"]


def test_a_worker_that_starts_again_under_its_name_is_no_longer_lost(store: Store) -> None:
    lose(store, "w1")
    WorkerTable(store.database, store.schema).report("w1", ["mail"], "threads", 3, 0, ["note"])
    assert lost(store) == []
    [worker] = store.workers.registered(store.tasks.now(), 60)
    assert (worker.is_alive, worker.queues, worker.pool) == (True, ["mail"], "threads")
    assert list(worker.tags or ()) == ["note"]
    change(store, "w1", seen_at=-100)
    assert store.workers.expire(SILENT_S) == ["w1"], "it is lost a second time"


def test_a_report_clears_the_time_of_the_loss(store: Store) -> None:
    """Otherwise, a clock that is set back would make a live worker a lost one."""
    lose(store, "w1")
    report(store, "w1")
    change(store, "w1", seen_at=-1000)
    assert (present(store), lost(store)) == (["w1"], [])


def test_a_worker_that_stops_in_order_leaves_no_row(store: Store) -> None:
    report(store, "w1")
    lose(store, "w2")
    for name in ("w1", "w2"):
        store.workers.remove(name)
    assert rows(store) == lost(store) == []


def test_a_lost_worker_is_removed_if_the_clock_was_set_back(store: Store) -> None:
    lose(store, "w1")
    change(store, "w1", seen_at=5000, lost_at=5100)
    assert store.workers.expire(SILENT_S) == []
    assert rows(store) == []


def test_a_lost_worker_counts_nowhere_even_if_its_report_looks_recent(
    store: Store, delays: DelayTasks, timer: RecordingTimer
) -> None:
    lose(store, "killed")
    change(store, "killed", seen_at=-1, lost_at=0)
    past = datetime(2020, 1, 1, tzinfo=timezone.utc)
    row = {"tag": "mail", "message_body": "{}", "expected_time": past, "queue": "default"}
    with store.database.begin() as connection:
        connection.execute(insert(store.schema.tasks).values(row))
    found = read_tables(runtime_of(delays).store, delays.settings)
    assert found.workers == []
    assert [group.reason.facts["last_seen"] for group in found.late] == [{}]
    record_sweeps(runtime_of(delays), timer)
    runtime_of(delays).sweeper.sweep()
    assert timer.requested_drains == [], "no worker would receive the message"


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
