"""A worker that was lost stays in the registry for an hour, where only `lost` returns it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone

import pytest
from sqlalchemy import insert, select, update

from delaytasks import DelayTasks
from delaytasks.operations.state import read_tables
from delaytasks.runtime import runtime_of
from delaytasks.storage import worker_table
from delaytasks.storage.store import Store
from delaytasks.storage.types import db_now_plus
from delaytasks.storage.worker_table import LOST_FOR_S, WorkerTable
from delaytasks.worker.lease_keeper import WorkerShares
from tests.recording import RecordingTimer, record_sweeps

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
