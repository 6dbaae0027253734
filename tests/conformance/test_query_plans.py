"""The plans of the statements: none scans the table."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from delaytasks import DelayedTask, Status
from delaytasks.cli.tasks import LATELY, MOST_FOLLOWED
from delaytasks.db.policy_rows import HeldPlace
from tests.world import Level, Settlement
from tests.world.plans import PlannedWorld, assert_no_scan, planned_world

pytestmark = pytest.mark.slow
PRIMARY_KEY = r"message_pkey|INTEGER PRIMARY KEY|using PRIMARY"
#: The indexes of the table: one of them, that of waiting and running rows, and that of all rows.
INDEX, HOT, BY_TIME = "plan_idx", "plan_idx_yb_delay_hot", "plan_idx_expectedTime_status"
NOTHING = "(?!)"
Work = Callable[[PlannedWorld], object]


@pytest.fixture(scope="module")
def unanalysed(database_url: str) -> Iterator[PlannedWorld]:
    """Yield many finished rows, some waiting rows, and keys that the statistics do not include."""
    with planned_world(database_url, "new_plan_", is_analysed=False) as world:
        for priority in (0, 1):
            world.fill(5000, priority - 9000, 2, priority=priority)
        world.end(-100)
        put_keys(world, "mail", 10_000)
        yield world


@pytest.fixture(scope="module")
def analysed(database_url: str) -> Iterator[PlannedWorld]:
    """Yield many finished and many waiting rows with statistics.

    The statistics do not relate columns: here all finished rows are in the past, and nearly all
    waiting rows are not.
    """
    with planned_world(database_url, "plan_") as world:
        world.fill(30_000, -10_000)
        world.end(-100)
        world.analyse()
        yield world


@pytest.fixture(params=["unanalysed", "analysed"])
def either(request: Any, unanalysed: PlannedWorld, analysed: PlannedWorld) -> PlannedWorld:
    return analysed if request.param == "analysed" else unanalysed


def put_keys(world: PlannedWorld, tag: str, count: int) -> None:
    world.insert("keys", *({"tag": tag, "task_key": f"k{n}", "task_id": n} for n in range(count)))


def check(
    world: PlannedWorld, work: Callable[[], object], uses: str = "", avoids: str = NOTHING
) -> str:
    """Check which indexes the statements of `work` use, and return their plans."""
    shown = world.plans(work)
    assert re.search(uses, shown), shown
    assert not re.search(avoids, shown), shown
    assert_no_scan(shown)
    return shown


def waiting(world: PlannedWorld, limit: int) -> list[DelayedTask]:
    return list(world.delays.find(status=Status.NOT_COMPLETE, limit=limit).tasks)


def claim_and_settle(world: PlannedWorld, rows: list[DelayedTask]) -> None:
    world.claim(*rows)
    world.worker().settle([Settlement(row, "succeed") for row in rows])


# -- rows that are named --------------------------------------------------------------------------


@pytest.mark.parametrize("versions", [1, 3], ids=["one_version", "several"])
def test_claims_use_the_key_on_empty_statistics(unanalysed: PlannedWorld, versions: int) -> None:
    found = waiting(unanalysed, 20)
    some = [replace(one, version=n % versions) for n, one in enumerate(found)]
    check(unanalysed, partial(claim_and_settle, unanalysed, some), PRIMARY_KEY, INDEX)


def test_rows_of_a_chunk_are_found_by_id_if_statistics_have_no_live_rows(database_url: str) -> None:
    """Without a kept plan, as with some poolers, the index of all waiting and running rows looks
    cheap."""
    with planned_world(database_url, "stale_plan_", is_analysed=False) as world:
        world.fill(2000, -9000)
        world.end(0)
        world.analyse()
        rows = world.fill(2000, -7000)[:200]
        world.deny("prepare")
        check(world, partial(claim_and_settle, world, rows), PRIMARY_KEY, INDEX)
        assert {world.read(row).status for row in rows[::20]} == {Status.RUNNING}


def test_calls_find_rows_by_id_and_by_key_on_empty_statistics(unanalysed: PlannedWorld) -> None:
    delays, ids = unanalysed.delays, [one.id for one in waiting(unanalysed, 1000)]
    made = [delays.schedule_delay("mail", None, 60, key=f"new{n}") for n in range(300)]
    named = [one.id for one in made]
    keys = [f"k{n}" for n in range(300)]
    for named_ids, named_keys in ((ids[0], "k1"), (ids, keys)):
        check(unanalysed, partial(delays.touch, named_ids, 5000), avoids=INDEX)
        by_key = partial(delays.touch, tag="mail", key=named_keys, delay=5000)
        check(unanalysed, by_key, avoids=INDEX)
    scan = "(Seq Scan|ALL|index) on new_plan_yb_delay_task_m|SCAN new_plan_"
    for call in (partial(delays.bulk.reschedule, 3600), delays.bulk.cancel):
        shown = unanalysed.plans(partial(call, ids=named))
        assert not re.search(f"{scan}|{INDEX}", shown), shown
    assert {unanalysed.read(one).version for one in made} == {2}


def test_some_ids_are_found_by_the_primary_key(either: PlannedWorld) -> None:
    ids = [one.id for one in either.delays.find(limit=1000).tasks[::3]]
    for named, status in itertools.product((ids, ids[:3]), (None, ["DONE"], ["FAILED"])):
        work = partial(either.delays.find, ids=named, status=status, limit=50)
        check(either, work, avoids=INDEX)
    check(either, partial(either.windows, "cancel", {"ids": ids}, 1000), avoids=INDEX)


# -- rows that are found by their state and due time ----------------------------------------------


def test_a_read_of_the_state_scans_no_table(analysed: PlannedWorld) -> None:
    find = partial(analysed.delays.find, limit=MOST_FOLLOWED, newest_first=True)
    lately = {"since": analysed.now() - LATELY, "until": analysed.now()}
    found = [partial(find, **lately, **more) for more in ({}, {"tag": "note"}, {"key": "k"})]
    found.append(partial(find, status="RUNNING"))
    for work in (*found, analysed.running, analysed.overdue, analysed.unserved):
        check(analysed, work)


SLOW_PATH: list[Work] = [
    lambda world: world.store.sweeps.levels(1),
    lambda world: world.claim_due(priorities=[0, 1], most=50),
    lambda world: world.worker().claim_recovered(),
    lambda world: world.recover(),
]
SLOW_PATH_OF_MANY_ROWS: list[Work] = [
    lambda world: world.store.sweeps.levels(1000),
    lambda world: world.claim_due(priorities=[0], most=50),
    lambda world: world.die("w"),
    lambda world: world.renew(since=world.now()),
    lambda world: world.store.leases.count_expired(),
]


def test_the_slow_path_uses_the_hot_index(either: PlannedWorld, analysed: PlannedWorld) -> None:
    for work in SLOW_PATH + (SLOW_PATH_OF_MANY_ROWS if either is analysed else []):
        shown = check(either, partial(work, either), HOT, BY_TIME)
        # The clocks of the other databases can be used with an index.
        if either.kind == "postgresql" and either is not analysed and work in SLOW_PATH[1:3]:
            assert re.search(r"Index Cond: .*expected_time\)? <", shown)


def test_neither_a_claim_nor_a_count_reads_the_rows_that_are_not_due(postgresql_url: str) -> None:
    """PostgreSQL does not end a scan at the upper bound of a comparison of several columns."""
    with planned_world(postgresql_url, "far_plan_") as world:
        world.fill(20_000, 86_400)
        world.execute(f"VACUUM ANALYZE {world.table().name}")
        for work in (lambda: world.claim_due(priorities=[0], most=500), world.overdue):
            assert most_pages(world.plans(work, "(ANALYZE, BUFFERS)")) < 30


def most_pages(shown: str) -> int:
    """Return the pages that the largest part of a plan has read."""
    # Leave out those of the planner.
    lines = re.findall("^  Buffers: .*", shown, re.MULTILINE)
    return max(sum(map(int, re.findall(r"(?:hit|read)=(\d+)", line))) for line in lines)


@pytest.mark.parametrize("queues", ["aaab", "aaaaaaab"], ids=["by_id", "by_time"])
def test_claims_lock_no_rows_of_other_queues_although_the_table_is_small(
    database_url: str, queues: str
) -> None:
    """Without hints, a claim by id scans three of four rows, and that of the oldest rows seven of
    eight, whatever the statistics are."""
    with planned_world(database_url, "small_") as world:
        if world.kind == "postgresql":
            return  # its planner reads a small table as a whole, and locks only the rows it wants
        rows = world.put_each(queues)
        some, past = rows[:3], world.now() - timedelta(seconds=10)
        works: list[Callable[[], object]] = [
            lambda: world.claim(*some),
            lambda: world.claim(*some, replace(some[0], version=5)),
            lambda: world.worker().claim_recovered("a"),
            lambda: world.die("w"),
            lambda: world.renew(by="w", since=past),
            lambda: world.claim_due("a", [0], 50),
        ]
        for number, work in enumerate(works):
            shown = world.plans(work)
            assert number < 2 or "idx_yb_delay_hot" in shown, shown
            assert not re.search(r"(SCAN|ALL on|index on) small_(?!yb_delay_policy)", shown), shown


def test_few_rows_of_a_status_or_key_are_found_by_index(either: PlannedWorld) -> None:
    world, find = either, either.delays.find
    some = [world.put(tag="few", due_s=n - 5000, key=f"few{n}") for n in range(100)]
    world.worker().end(world.claim(*some[:50]), "fail", error="x")
    failed, keyed = find(status="FAILED").tasks, find(key="few70", status="NOT_COMPLETE").tasks
    assert ([one.id for one in failed], [one.id for one in keyed]) == (
        [one.id for one in some[:50]], [some[70].id],
    )  # fmt: skip
    for status in set(Status) - {Status.DONE}:
        check(world, partial(find, status=status, limit=20), avoids=BY_TIME)
    check(world, partial(find, key="few70", limit=20), "plan_idx_yb_delay_key")
    world.delete("tasks", tag="few")  # other tests use the same table


def test_a_sweep_reads_rows_by_their_time(unanalysed: PlannedWorld, analysed: PlannedWorld) -> None:
    check(analysed, lambda: analysed.store.sweeps.purge(20_000, 100), BY_TIME)
    check(unanalysed, unanalysed.near, BY_TIME, HOT)
    if unanalysed.kind != "postgresql":  # which reads such a small table as a whole
        check(unanalysed, lambda: unanalysed.store.sweeps.purge(60, 100), BY_TIME, HOT)


@pytest.mark.parametrize("move", ["cancel", "reschedule", "rerun"])
def test_bulk_calls_find_rows_in_windows_of_due_times(analysed: PlannedWorld, move: str) -> None:
    status = "FAILED" if move == "rerun" else "NOT_COMPLETE"
    since = analysed.now() - timedelta(seconds=5000)
    choices: list[dict[str, Any]] = [{"tag": "nobody"}]
    choices += [{"status": status, "key_prefix": "x", "since": since}]
    for filters in choices:
        shown = check(analysed, partial(analysed.windows, move, filters))
        used = re.findall("plan_idx_([a-z_]+)", shown.lower())
        # MySQL may use the other index if it estimates that a window is as narrow there.
        # PostgreSQL may read the few rows with a key inside a window.
        has_another = move == "rerun" and analysed.kind == "postgresql"
        in_order = "yb_delay_ended_badly" if has_another else "yb_delay_hot"
        assert used[0] == in_order, shown
        least = 1 if move == "rerun" else 3  # no row has failed, so there are no windows
        assert used.count(in_order) + used.count("yb_delay_key") >= least, shown


# -- paused rows, and recurring schedules ---------------------------------------------------------


@pytest.fixture(scope="module", params=["no statistics", "good statistics"])
def planned(request: pytest.FixtureRequest, database_url: str) -> Iterator[PlannedWorld]:
    """Yield many finished rows, many paused and overdue rows, and many waiting rows."""
    with planned_world(database_url, "paused_plan_", is_analysed=False) as world:
        world.fill(24_000, -5000, 0.25, tags=["sms", "mail"])
        world.end(-1000)
        world.end(1000, Status.HELD, tag="mail")
        if request.param == "good statistics":
            world.analyse()
        yield world


def test_pauses_read_only_held_rows_and_find_them_by_their_ids(planned: PlannedWorld) -> None:
    held = [one.id for one in planned.delays.find(status=Status.HELD, limit=100).tasks]
    claimed = planned.claim_due(priorities=[0], most=20)
    planned.delays.policies.pause(tag="sms")
    name = "plan_idx_yb_delay_" + ("held" if planned.kind == "postgresql" else "hot")
    rows = planned.store.paused_rows
    check(planned, rows.levels, name, BY_TIME)
    for place in (HeldPlace(), HeldPlace(planned.now(), 1)):
        check(planned, partial(rows.page, Level("default", 0), place), name, BY_TIME)
    check(planned, lambda: planned.release(*held), PRIMARY_KEY, INDEX)
    check(planned, lambda: planned.hold_back(*claimed), PRIMARY_KEY, INDEX)


def test_claims_do_not_read_held_rows(planned: PlannedWorld) -> None:
    if planned.kind != "postgresql":
        return  # the other databases have the status first in the index of all rows
    # Remove dead index entries, because they do not count as a backlog.
    planned.execute(f"VACUUM {planned.table().name}")
    planned.delays.policies.resume(tag="sms")
    levels = partial(planned.store.sweeps.levels, 0)
    for work in (lambda: planned.claim_due(priorities=[0], most=5), levels):
        shown = planned.plans(work, "(ANALYZE, BUFFERS)")
        assert not any(map(int, re.findall(r"Rows Removed by Filter: (\d+)", shown))), shown
        assert most_pages(shown) < 100, shown


def test_no_statement_of_a_sweep_reads_all_schedules(database_url: str) -> None:
    with planned_world(database_url, "many_plan_") as world:
        world.delays.recurring.set("first", "report", every="1h", overlap="skip")
        schedules, now = world.table("recurring"), world.now()
        [first] = world.rows(schedules.select())
        at = [now + timedelta(seconds=n) for n in range(5000)]
        new = [{**first._mapping, "name": f"r{n}", "id": n, "next_at": t} for n, t in enumerate(at)]
        world.insert("recurring", *new)
        put_keys(world, "other", 5000)
        if world.kind != "sqlite":
            world.analyse("recurring")
            world.analyse("keys")
        check(world, world.runtime.make_recurring_tasks, "plan_")
        assert world.delays.find(tag="report").tasks
