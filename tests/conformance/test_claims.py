"""Claim rows, on every database."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from sqlalchemy import event

from delaytasks.core.clock import to_us
from delaytasks.core.interfaces import Settlement, UnclaimedRow
from delaytasks.core.states import Status
from delaytasks.storage.claims import Claims
from delaytasks.storage.store import Store
from tests.conformance.store_rows import (
    add,
    entry,
    lapse_all,
    put,
    read,
    seconds,
    task,
)
from tests.recording import counted

pytestmark = pytest.mark.quick


def test_a_claim_takes_due_rows_and_records_the_worker(store: Store, claims: Claims) -> None:
    made = add(store, -10.0, body_json='{"n":1}', key=None, priority=2, queue="q")
    before = store.tasks.now()
    [claimed] = claims.claim([entry(made)])
    assert (claimed.id, claimed.status, claimed.attempts) == (made.id, Status.RUNNING, 1)
    assert claimed.version > made.version
    assert (claimed.body, claimed.priority, claimed.queue, claimed.lapses) == ({"n": 1}, 2, "q", 0)
    found = read(store, made.id)
    assert (found.status, found.attempts) == (Status.RUNNING, 1)
    assert found.version == claimed.version
    assert (found.worker, found.ip_address) == ("worker-1", "127.0.0.1")
    assert found.execution_time is not None
    assert found.lease_until is not None
    assert found.execution_time >= before
    assert timedelta(seconds=59) < found.lease_until - found.execution_time < timedelta(seconds=61)


def test_a_task_is_never_claimed_early(store: Store, claims: Claims) -> None:
    made = add(store, 0.25)
    while not (claimed := claims.claim([entry(made)])):
        assert store.tasks.now() < seconds(made.expected_time, 5)
    assert read(store, made.id).execution_time >= made.expected_time  # type: ignore[operator]
    assert len(claimed) == 1


def test_a_claim_skips_rows_that_are_not_due_have_moved_or_are_unknown(
    store: Store, claims: Claims
) -> None:
    due, later, moved, done, gone = (
        add(store),
        add(store, 60.0),
        add(store),
        put(store, Status.DONE),
        task(store),
    )
    store.tasks.reschedule(moved.id, moved.expected_time)
    named = [due, later, moved, done, gone]
    assert [one.id for one in claims.claim([entry(one) for one in named])] == [due.id]
    unclaimed = {row.id: row for row in claims.unclaimed([one.id for one in named])}
    expected = UnclaimedRow(later.id, 0, Status.NOT_COMPLETE, to_us(later.expected_time), 0)
    assert unclaimed[later.id] == expected
    assert unclaimed[moved.id].version == 1
    assert unclaimed[done.id].status is Status.DONE
    assert gone.id not in unclaimed
    assert claims.claim([entry(due)]) == []


def test_a_claim_of_no_rows_executes_no_statement(store: Store, claims: Claims) -> None:
    seen: list[str] = []
    event.listen(
        store.database.auto,
        "before_cursor_execute",
        lambda *given: seen.append(given[2]),
        once=True,
    )
    assert claims.claim([]) == []
    assert claims.settle([]) == set()
    assert claims.unclaimed([]) == []
    assert claims.unclaimed(iter(())) == []
    assert seen == []
    store.tasks.get(1)
    assert len(seen) == 1


def test_a_claim_skips_a_locked_row_without_waiting(store: Store, claims: Claims) -> None:
    if store.database.url.get_backend_name() == "sqlite":
        return  # SQLite has one writer at a time and no row locks
    locked, free = add(store), add(store)
    with ThreadPoolExecutor(1) as pool, store.database.begin() as connection:
        assert store.tasks._moves.locked(connection, locked.id) is not None
        named = pool.submit(claims.claim, [entry(locked), entry(free)])
        assert [one.id for one in named.result(10)] == [free.id]
        assert pool.submit(claims.claim_due, "default", [0], 10).result(10) == []
    assert [one.id for one in claims.claim_due("default", [0], 10)] == [locked.id]


def test_claim_due_takes_the_highest_priority_first_then_the_oldest(
    store: Store, claims: Claims
) -> None:
    low_old, low_new = add(store, -50.0), add(store, -20.0)
    high_new, high_old = add(store, -5.0, priority=9), add(store, -6.0, priority=9)
    add(store, -60.0, queue="elsewhere")
    add(store, 60.0)
    add(store, -60.0, priority=5)  # a priority that the claim does not request
    assert [one.id for one in claims.claim_due("default", [0, 9], 3)] == [
        high_old.id,
        high_new.id,
        low_old.id,
    ]
    assert [one.id for one in claims.claim_due("default", [0, 9], 3)] == [low_new.id]
    assert claims.claim_due("default", [0, 9], 3) == []


def test_a_row_that_lapsed_is_claimed_alone(store: Store, claims: Claims) -> None:
    bad, good = add(store), add(store)
    [lost] = claims.claim([entry(bad)])
    lapse_all(store, [lost])
    bad = read(store, bad.id)
    assert (bad.status, bad.lapses, bad.version) == (Status.NOT_COMPLETE, 1, lost.version + 1)
    assert [one.id for one in claims.claim([entry(bad), entry(good)])] == [good.id]
    assert claims.claim_due("default", [0], 10) == []
    assert claims.claim_alone(bad.id, lost.version) == []
    [alone] = claims.claim_alone(bad.id, bad.version)
    assert (alone.id, alone.lapses, alone.attempts) == (bad.id, 1, 2)
    assert claims.claim_alone(bad.id, bad.version) == []


def test_recovered_rows_of_a_queue_are_claimed_one_by_one(store: Store, claims: Claims) -> None:
    made = [add(store, -20.0 + n) for n in range(2)]
    other = add(store, queue="q")
    lapse_all(store, claims.claim([entry(one) for one in (*made, other)]))
    add(store)
    abandoned = [claims.claim_recovered("default") for _ in range(3)]
    assert [[task.id for task in some] for some in abandoned] == [[made[0].id], [made[1].id], []]


def test_many_workers_share_a_backlog_and_each_row_runs_once(store: Store) -> None:
    made = [task(store, -100.0 + n / 100) for n in range(1000)]
    store.tasks.insert_many(made)
    start = threading.Barrier(6)

    def work(number: int) -> list[int]:
        claims, mine = store.claims(f"worker-{number}", None), []
        start.wait()
        while chunk := claims.claim_due("default", [0], 37):
            accepted = claims.settle([Settlement(one, "succeed") for one in chunk])
            assert accepted == {one.id for one in chunk}
            mine += [one.id for one in chunk]
        return mine

    with ThreadPoolExecutor(6) as pool:
        shares = list(pool.map(work, range(6)))
    assert Counter(id for share in shares for id in share) == {one.id: 1 for one in made}
    assert counted(store)[Status.DONE] == 1000


def test_messages_that_name_the_same_rows_run_each_once(store: Store) -> None:
    made = [task(store) for _ in range(300)]
    store.tasks.insert_many(made)
    entries = [entry(one) for one in made]

    def work(number: int) -> list[int]:
        claims = store.claims(f"worker-{number}", None)
        return [one.id for n in range(0, 300, 50) for one in claims.claim(entries[n : n + 50])]

    with ThreadPoolExecutor(4) as pool:
        claimed = Counter(id for share in pool.map(work, range(4)) for id in share)
    # A row that a claim skipped because of a lock may wait for the slow path. No task runs twice.
    assert set(claimed.values()) == {1}
    rest = {one.id for one in store.claims("last", None).claim_due("default", [0], 1000)}
    assert set(claimed) | rest == {one.id for one in made}
    assert not set(claimed) & rest


def test_a_row_that_is_named_many_times_is_claimed_once(store: Store, claims: Claims) -> None:
    """Two messages contained the task, and both became due."""
    made = [add(store) for _ in range(3)]
    named = [entry(one) for one in made]
    assert sorted(one.id for one in claims.claim([*named, *named, named[0]])) == sorted(
        one.id for one in made
    )
