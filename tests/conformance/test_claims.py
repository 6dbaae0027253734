"""Claim rows, on every database."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from statistics import median
from typing import Any

import pytest
from sqlalchemy import create_engine, event, update

from benchmarks.call_counts import count_calls
from delaytasks import DelayTask, DelayTasks
from delaytasks.core.clock import to_us
from delaytasks.core.errors import StoreUnavailableError
from delaytasks.core.interfaces import Entry, Settlement, UnclaimedRow
from delaytasks.core.states import Status
from delaytasks.storage import claims as backlog
from delaytasks.storage import database
from delaytasks.storage.claims import RESTART_S, Claims
from delaytasks.storage.store import Store
from tests.conformance.store_rows import add, entry, lapse_all, put, read, seconds, task
from tests.conftest import open_store
from tests.recording import RunnerHarness, counted, delays_on, record

# Claim rows, on every database


@pytest.mark.quick
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


@pytest.mark.quick
def test_a_task_is_never_claimed_early(store: Store, claims: Claims) -> None:
    made = add(store, 0.25)
    while not (claimed := claims.claim([entry(made)])):
        assert store.tasks.now() < seconds(made.expected_time, 5)
    assert read(store, made.id).execution_time >= made.expected_time  # type: ignore[operator]
    assert len(claimed) == 1


@pytest.mark.quick
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


@pytest.mark.quick
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


@pytest.mark.quick
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


@pytest.mark.quick
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


@pytest.mark.quick
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


@pytest.mark.quick
def test_recovered_rows_of_a_queue_are_claimed_one_by_one(store: Store, claims: Claims) -> None:
    made = [add(store, -20.0 + n) for n in range(2)]
    other = add(store, queue="q")
    lapse_all(store, claims.claim([entry(one) for one in (*made, other)]))
    add(store)
    abandoned = [claims.claim_recovered("default") for _ in range(3)]
    assert [[task.id for task in some] for some in abandoned] == [[made[0].id], [made[1].id], []]


@pytest.mark.quick
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


@pytest.mark.quick
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


@pytest.mark.quick
def test_a_row_that_is_named_many_times_is_claimed_once(store: Store, claims: Claims) -> None:
    """Two messages contained the task, and both became due."""
    made = [add(store) for _ in range(3)]
    named = [entry(one) for one in made]
    assert sorted(one.id for one in claims.claim([*named, *named, named[0]])) == sorted(
        one.id for one in made
    )


# Workers process a backlog chunk by chunk


def make(store: Store, *ids: int, priority: int = 0) -> None:
    """Insert tasks that became due long ago, in the order of their ids."""
    now = store.tasks.now()
    for id in ids:
        due = now - timedelta(hours=1) + timedelta(seconds=id)
        store.tasks.insert(DelayTask(id, "mail", "{}", due, priority=priority, create_time=now))


def ids(claims: Claims, limit: int, *priorities: int) -> list[int]:
    return [task.id for task in claims.claim_due("default", priorities or [0], limit)]


def test_a_chunk_continues_where_the_last_one_ended(store: Store, claims: Claims) -> None:
    make(store, *range(10, 30))
    assert ids(claims, 5) == [10, 11, 12, 13, 14]
    make(store, 1, 2)
    assert ids(claims, 5) == [15, 16, 17, 18, 19]
    assert ids(store.claims("other", None), 3) == [1, 2, 20], "who begins begins at the beginning"


def test_older_rows_are_claimed_before_a_level_is_empty(store: Store, claims: Claims) -> None:
    make(store, *range(10, 20))
    assert ids(claims, 8) == list(range(10, 18))
    make(store, 1, 2, 3)
    assert ids(claims, 4) == [1, 2, 18, 19]
    assert ids(claims, 4) == [3]
    assert ids(claims, 4) == []


def test_older_rows_wait_for_a_few_seconds_at_most(
    store: Store, claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(backlog, "monotonic", lambda: now)
    make(store, *range(10, 40))
    ids(claims, 5)
    make(store, 1)
    now += RESTART_S / 2
    assert ids(claims, 5) == [15, 16, 17, 18, 19]
    now += RESTART_S / 2
    assert ids(claims, 5) == [1, 20, 21, 22, 23], "however many chunks came between"


def test_rows_with_the_same_due_time_are_not_skipped(store: Store, claims: Claims) -> None:
    now = store.tasks.now() - timedelta(seconds=1)
    for id in range(1, 11):
        store.tasks.insert(DelayTask(id, "mail", "{}", now, create_time=now))
    assert sorted(ids(claims, 4) + ids(claims, 4) + ids(claims, 4)) == list(range(1, 11))


def test_each_level_has_its_own_position(store: Store, claims: Claims) -> None:
    make(store, *range(10, 14))
    make(store, *range(20, 24), priority=5)
    assert ids(claims, 6, 0, 5) == [20, 21, 22, 23, 10, 11]
    make(store, 1, priority=5)
    assert ids(claims, 3, 0, 5) == [1, 12, 13]


# A processor that leaves its own row locked in an open transaction


@pytest.mark.slow
def test_a_row_that_its_processor_left_locked_is_named_and_delays_no_other_row(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "RETRY_FOR_S", 0)
    bench = RunnerHarness(store, lease_s=2, chunk_time_budget_s=0.5)
    engine = create_engine(store.database.url)
    connection = engine.connect()
    t = store.schema.tasks

    def lock(body: Any, task: DelayTask) -> None:
        connection.execute(update(t).where(t.c.id == task.id).values(lapses=0))

    bench.registry.processor("lock")(lock)
    locking = bench.schedule("lock")
    # SQLite locks the whole database, so tasks that no worker can settle run again.
    others = (
        [bench.schedule() for _ in range(4)]
        if store.database.url.get_backend_name() != "sqlite"
        else []
    )
    try:
        with pytest.raises(StoreUnavailableError):
            bench.run(locking, *others)
        assert bench.statuses(others) == ["DONE"] * len(others)
    finally:
        connection.rollback()
        engine.dispose()
    [told] = bench.named("task.row_locked")
    assert (told["id"], told["tag"]) == (locking.id, "lock")
    assert "commit or roll back before the processor returns" in told["remedy"]
    assert bench.named("store.down") == []
    assert bench.statuses([locking]) == ["RUNNING"], "its lease ends, and it runs again"


# A task that runs alone costs a limited number of function calls, so that no feature adds to
# the work of each task unnoticed


#: `./dev bench lone` counts the same. If a change needs more, weigh its use against its costs.
MOST_CALLS = 670


@pytest.fixture
def delays(postgresql_url: str) -> Iterator[DelayTasks]:
    store = open_store(postgresql_url, table_prefix="lone_")
    made = delays_on(postgresql_url, table_prefix="lone_")
    yield made
    made.close()
    with store.database.begin() as connection:
        store.schema.metadata.drop_all(connection)
    store.close()


def test_the_function_calls_of_a_lone_task_are_limited(delays: DelayTasks) -> None:
    record(delays)
    delays.processor("lone")(lambda body: None)
    entries = [Entry.of(delays.schedule_delay("lone", None, 0)) for _ in range(30)]
    runner = delays.runner()
    counts = [count_calls(lambda entry=entry: runner.run([entry])) for entry in entries]  # type: ignore[misc]
    # The first runs open connections, and policies are read once a second.
    assert median(counts) <= MOST_CALLS
