"""Leases and row locks, on every database."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Connection, update

from delaytasks.core.errors import (
    StoreUnavailableError,
    TaskStateError,
)
from delaytasks.core.interfaces import Level, Recovered, Settlement
from delaytasks.core.states import Status
from delaytasks.storage import database
from delaytasks.storage.claims import Claims
from delaytasks.storage.store import Store
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

pytestmark = pytest.mark.quick


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


def test_a_renewed_lease_keeps_the_version_that_the_worker_holds(
    store: Store, claims: Claims
) -> None:
    before = store.tasks.now()
    claimed = claims.claim([entry(add(store))])
    store.leases.renew(["worker-1"], before)
    assert claims.settle([Settlement(one, "succeed") for one in claimed]) == {claimed[0].id}


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


def test_a_server_that_vanished_is_given_up_after_25_seconds(store: Store) -> None:
    if not has_row_locks(store) or not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    for engine in (store.database.auto, store.database.tx):
        with engine.connect() as connection:
            driver: Any = connection.connection.dbapi_connection
            number = (driver if hasattr(driver, "fileno") else driver._sock).fileno()
            with socket.socket(fileno=os.dup(number)) as line:
                assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 25_000


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
    assert found.attempts == 3


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


def test_a_task_that_lapses_keeps_its_key(store: Store, claims: Claims) -> None:
    made = keyed(store)
    lapse_all(store, claims.claim([entry(made)]))
    assert store.tasks.id_of_key("mail", "order-1") == made.id


def test_a_key_that_went_to_another_task_is_kept_when_the_old_one_is_given_up(
    store: Store, claims: Claims
) -> None:
    made = keyed(store)
    claims.claim([entry(made)])
    new, _ = store.tasks.insert_keyed(task(store, key="order-1"), "replace")
    assert lapse_all(store, [made], max_lost_leases=1) == 1
    assert store.tasks.id_of_key("mail", "order-1") == new.id


def test_a_lease_that_still_lasts_does_not_lapse(store: Store, claims: Claims) -> None:
    claims.claim([entry(add(store))])
    assert store.sweeps.recover(5, 100) == Recovered(0, [])


def test_lapses_are_found_in_bounded_steps(store: Store, claims: Claims) -> None:
    claimed = claims.claim([entry(add(store)) for _ in range(5)])
    t = store.schema.tasks
    with store.database.begin() as connection:
        connection.execute(update(t).values(lease_until=seconds(store.tasks.now(), -1)))
    assert [store.sweeps.recover(5, 2).total for _ in range(4)] == [2, 2, 1, 0]
    assert len(claimed) == 5
