"""Claim rows, on every database."""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from sqlalchemy import create_engine, update

from delaytasks import DelayedTask, Status, StoreUnavailableError
from delaytasks.db import claims as module
from delaytasks.db.claims import Choice
from delaytasks.run.chunk import MAX_LOCKED
from tests.world import Entry, MonkeyPatch, UnclaimedRow, World


def ids(tasks: list[DelayedTask]) -> list[int]:
    return [task.id for task in tasks]


@pytest.mark.quick
def test_a_claim_takes_due_rows_and_records_the_worker(world: World) -> None:
    made = world.put(body_json='{"n":1}', priority=2, queue="q")
    before = world.now()
    [claimed] = world.claim(made)
    assert (claimed.id, claimed.status, claimed.runs) == (made.id, Status.RUNNING, 1)
    assert claimed.version > made.version
    assert (claimed.body, claimed.priority, claimed.queue, claimed.lapses) == ({"n": 1}, 2, "q", 0)
    found = world.read(made)
    assert (found.status, found.runs) == (Status.RUNNING, 1)
    assert found.version == claimed.version
    assert (found.worker, found.ip_address) == ("worker-1", "127.0.0.1")
    assert found.execution_time is not None
    assert found.lease_until is not None
    assert found.execution_time >= before
    assert timedelta(seconds=59) < found.lease_until - found.execution_time < timedelta(seconds=61)


@pytest.mark.quick
def test_a_task_is_never_claimed_early(world: World) -> None:
    made = world.put(due_s=0.25)
    while not (claimed := world.claim(made)):
        assert world.now() < made.expected_time + timedelta(seconds=5)
    assert world.read(made).execution_time >= made.expected_time  # type: ignore[operator]
    assert len(claimed) == 1


@pytest.mark.quick
def test_a_claim_skips_rows_that_are_not_due_have_moved_or_are_unknown(world: World) -> None:
    due, moved = world.put_many(2)
    later, done = world.put(due_s=60), world.put(Status.DONE)
    gone = world.new_row()
    world.delays.reschedule(moved.id, at=moved.expected_time)
    assert ids(world.claim(due, later, moved, done, gone)) == [due.id]
    unclaimed = world.worker().unclaimed(due, later, moved, done, gone)
    expected = UnclaimedRow(later.id, 0, Status.NOT_COMPLETE, Entry.of(later).due_us, 0)
    assert unclaimed[later.id] == expected
    assert unclaimed[moved.id].version == 1
    assert unclaimed[done.id].status is Status.DONE
    assert gone.id not in unclaimed
    assert world.claim(due) == []


@pytest.mark.quick
def test_a_claim_skips_a_locked_row_without_waiting(world: World) -> None:
    if not world.has_row_locks:
        return
    locked, free = world.put(), world.put()
    with ThreadPoolExecutor(1) as pool, world.locked(locked):
        assert ids(pool.submit(world.claim, locked, free).result(10)) == [free.id]
        assert pool.submit(world.claim_due).result(10) == []
    assert ids(world.claim_due()) == [locked.id]


@pytest.mark.quick
def test_claim_due_takes_the_highest_priority_first_then_the_oldest(world: World) -> None:
    low_old, low_new = world.put(due_s=-50), world.put(due_s=-20)
    high_new, high_old = world.put(due_s=-5, priority=9), world.put(due_s=-6, priority=9)
    world.put(due_s=-60, queue="elsewhere")
    world.put(due_s=60)
    world.put(due_s=-60, priority=5)  # a priority that the claim does not request
    three = world.claim_due(priorities=[0, 9], most=3)
    assert ids(three) == [high_old.id, high_new.id, low_old.id]
    assert ids(world.claim_due(priorities=[0, 9], most=3)) == [low_new.id]
    assert world.claim_due(priorities=[0, 9], most=3) == []


@pytest.mark.quick
def test_recovered_rows_of_a_queue_are_claimed_one_by_one(world: World) -> None:
    made = world.put_many(2)
    world.lapse(*world.claim(*made, world.put(queue="q")))
    world.put()
    recovered = [ids(world.worker().claim_recovered()) for _ in range(3)]
    assert recovered == [[made[0].id], [made[1].id], []]


@pytest.mark.quick
@pytest.mark.parametrize("is_named", [False, True], ids=["due", "named"])
def test_many_workers_claim_and_run_each_row_once(world: World, is_named: bool) -> None:
    """Several messages name the same rows, and each row twice."""
    made, start = world.put_many(600, due_s=-100), threading.Barrier(6)
    workers = [world.worker(f"worker-{n}") for n in range(6)]

    def work(number: int) -> list[int]:
        worker, mine = workers[number], list[int]()
        start.wait()
        for some in [made[n : n + 50] * 2 for n in range(0, 600, 50)]:
            claimed = worker.claim(*some) if is_named else worker.claim_due("default", [0], 37)
            assert worker.end(claimed) == set(ids(claimed))
            mine += ids(claimed)
        return mine

    with ThreadPoolExecutor(6) as pool:
        claimed = [id for share in pool.map(work, range(6)) for id in share]
    # A row that a claim skipped because of a lock may wait for the slow path. No task runs twice.
    rest = ids(world.claim_due(most=1000, by="last"))
    assert Counter(claimed + rest) == {one.id: 1 for one in made}
    assert world.counted()[Status.DONE] == len(claimed) >= 300


# -- workers process a backlog chunk by chunk -----------------------------------------------------


def backlog_of(world: World, *numbers: int, priority: int = 0) -> None:
    """Insert tasks that became due long ago, in the order of their ids."""
    for number in numbers:
        world.put(id=number, due_s=number - 3600, priority=priority)


def next_ids(world: World, most: int, *priorities: int, by: str = "worker-1") -> list[int]:
    return ids(world.claim_due(priorities=priorities or [0], most=most, by=by))


def test_a_chunk_continues_where_the_last_one_ended_and_finds_older_rows_in_seconds(
    world: World, monkeypatch: MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("delaytasks.db.claims.monotonic", lambda: now)
    backlog_of(world, *range(10, 40))
    assert next_ids(world, 5) == [10, 11, 12, 13, 14]
    backlog_of(world, 1, 2)
    assert next_ids(world, 5) == [15, 16, 17, 18, 19]
    assert next_ids(world, 3, by="other") == [1, 2, 20], "who begins begins at the beginning"
    backlog_of(world, 3)
    now += 2.5
    assert next_ids(world, 5) == [21, 22, 23, 24, 25]
    now += 2.5
    assert next_ids(world, 5) == [3, 26, 27, 28, 29], "however many chunks came between"
    backlog_of(world, 4, 5, 6)
    assert next_ids(world, 12) == [4, 5, *range(30, 40)], "before the level is empty"
    assert next_ids(world, 12) == [6]
    assert next_ids(world, 12) == []


def test_rows_with_the_same_due_time_are_not_skipped(world: World) -> None:
    due = world.now() - timedelta(seconds=1)
    for number in range(1, 11):
        world.put(id=number, expected_time=due)
    found = next_ids(world, 4) + next_ids(world, 4) + next_ids(world, 4)
    assert sorted(found) == list(range(1, 11))


def test_each_level_has_its_own_position(world: World) -> None:
    backlog_of(world, *range(10, 14))
    backlog_of(world, *range(20, 24), priority=5)
    assert next_ids(world, 6, 0, 5) == [20, 21, 22, 23, 10, 11]
    backlog_of(world, 1, priority=5)
    assert next_ids(world, 3, 0, 5) == [1, 12, 13]


# -- a processor that leaves its own row locked in an open transaction ----------------------------


@pytest.mark.slow
@pytest.mark.parametrize("locking", [1, MAX_LOCKED + 4], ids=["one", "many"])
def test_a_row_left_locked_delays_no_other_row(make_world: Any, locking: int) -> None:
    world: World = make_world(lease=4, _chunk_time_budget_s=0.5)
    # SQLite locks the whole database, so tasks that no worker can settle run again.
    others = [world.schedule() for _ in range(4 if world.has_row_locks and locking == 1 else 0)]
    engine, t = create_engine(world.url), world.table()
    with engine.connect() as connection:

        @world.delays.processor("lock")
        def lock(body: Any, task: DelayedTask) -> None:
            connection.execute(update(t).where(t.c.id == task.id).values(lapses=0))

        tasks = [world.schedule("lock") for _ in range(locking if world.has_row_locks else 1)]
        with pytest.raises(StoreUnavailableError):
            world.run(*tasks, *others)
        assert world.statuses(others) == ["DONE"] * len(others)
        for row in map(world.read, others):
            assert row.execution_time is not None
            assert row.update_time is not None
            took = row.update_time - row.execution_time
            assert took < timedelta(seconds=4), "their leases have not ended"
        connection.rollback()
    engine.dispose()
    told = world.told("task.row_locked")
    assert len({one["id"] for one in told}) == min(len(tasks), MAX_LOCKED), "a try takes a second"
    assert (told[-1]["tag"], told[-1]["id"] in {task.id for task in tasks}) == ("lock", True)
    assert "commit or roll back before the processor returns" in told[-1]["remedy"]
    assert world.told("store.down") == []
    assert world.statuses(tasks[:1]) == ["RUNNING"], "its lease ends, and it runs again"


# -- the SQL of the claims ------------------------------------------------------------------------


def test_the_statements_of_claims_are_those_of_the_file(world: World) -> None:
    """Each is also executed, since nothing else finds a misspelt column of a rare one."""

    def spread(sql: str) -> list[str]:
        return re.sub(r"([(),])", r" \1 ", sql).split()

    text = Path(__file__).with_name("claims.sql").read_text()
    golden = dict(re.findall(rf"^-- {world.kind}(\w+)\n(.+?);$", text, re.DOTALL | re.MULTILINE))
    if world.kind == "postgresql":
        assert " ".join(spread(golden["_listed"])) in " ".join(spread(module.__doc__ or ""))
    claims = world.worker().claims
    choices = {name: one for name, one in vars(claims).items() if isinstance(one, Choice)}
    shown = {name: one.claim or one.lock for name, one in choices.items()}
    shown["_locked"] = claims._locked
    prefix = world.table().name.removesuffix("yb_delay_task_message")
    for name, one in shown.items():
        named = re.sub(r"\b(yb|idx)_", rf"{prefix}\1_", golden.pop(name))
        assert spread(one.statement.element.text) == spread(named)
    assert not golden
    given: dict[str, Any] = dict.fromkeys(("version", "status", "lapses", "priority", "most"), 0)
    given |= {"ids": [1], "first": 1, "last": 1, "rows": "[]", "queue": "q"}
    for one in [claims._locked, *filter(None, chain(*choices.values()))]:
        with world.begin() as connection:
            assert one(connection, {**given, "due_from": world.now()}).row_count <= 0


# -- a task that runs alone costs a limited number of function calls ------------------------------


#: If a change needs more, weigh its use against its costs.
MOST_CALLS = 670


def count_calls(work: Callable[[], object]) -> int:
    """Return how many functions, of Python and of C, `work` calls in this thread.

    Their number does not depend on the load of the machine.
    """
    count = 0

    def observe(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(observe)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_the_function_calls_of_a_lone_task_are_limited(world: World) -> None:
    if world.url.get_driver_name() != "psycopg2":
        pytest.skip("the calls of one driver are counted")
    world.delays.processor("lone")(lambda body: None)
    tasks = [world.schedule("lone") for _ in range(30)]
    counts = [count_calls(lambda task=task: world.run(task)) for task in tasks]  # type: ignore[misc]
    # The first runs open connections, and policies are read once a second.
    assert median(counts) <= MOST_CALLS
