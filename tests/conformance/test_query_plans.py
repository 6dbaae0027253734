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
from sqlalchemy import insert

from delaytasks import DelayedTask, Status
from delaytasks.db.policy_rows import HeldPlace
from tests.world import Settlement
from tests.world.plans import PlannedWorld, assert_no_scan, planned_world

pytestmark = pytest.mark.slow
PRIMARY_KEY = r"plan_yb_delay_task_message_pkey|INTEGER PRIMARY KEY|using PRIMARY"
Works = list[Callable[[PlannedWorld], object]]


@pytest.fixture(scope="module")
def unanalysed(database_url: str) -> Iterator[PlannedWorld]:
    """Yield many finished rows and some waiting rows that the statistics do not include."""
    with planned_world(database_url, "new_plan_", is_analysed=False) as world:
        for priority in (0, 1):
            world.fill(5000, priority - 9000, 2, priority=priority)
        world.end(-100)
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


def waiting(world: PlannedWorld, limit: int) -> list[DelayedTask]:
    return list(world.delays.find(status=Status.NOT_COMPLETE, limit=limit).tasks)


def settle(world: PlannedWorld, tasks: list[DelayedTask]) -> object:
    return world.worker().settle([Settlement(task, "succeed") for task in tasks])


@pytest.mark.parametrize("versions", [1, 3], ids=["one_version", "several"])
def test_claims_use_the_key_on_empty_statistics(unanalysed: PlannedWorld, versions: int) -> None:
    found = waiting(unanalysed, 20)
    some = [replace(one, version=n % versions) for n, one in enumerate(found)]
    shown = unanalysed.plans(lambda: unanalysed.claim(*some))
    shown += unanalysed.plans(lambda: settle(unanalysed, some))
    assert re.search(PRIMARY_KEY, shown), shown
    assert "plan_idx" not in shown, shown
    assert_no_scan(shown)


READS: dict[str, Callable[[PlannedWorld], object]] = {
    "changes": lambda world: world.changes(),
    "changes of a tag": lambda world: world.changes(tag="note"),
    "changes of a key": lambda world: world.changes(key="k"),
    "what happens now": lambda world: world.live_rows(),
    "overdue tasks": lambda world: world.overdue(),
    "queues that no worker serves": lambda world: world.unserved(),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_of_the_state_scans_no_table(analysed: PlannedWorld, name: str) -> None:
    shown = analysed.plans(lambda: READS[name](analysed))
    assert shown
    assert_no_scan(shown)


def test_rows_of_a_chunk_are_found_by_id_if_statistics_have_no_live_rows(database_url: str) -> None:
    """Without a kept plan, as with some poolers, the index of all waiting and running rows looks
    cheap."""
    with planned_world(database_url, "stale_", is_analysed=False) as world:
        world.fill(2000, -9000)
        world.end(0)
        world.analyse()
        rows, claimed = world.fill(2000, -7000), list[DelayedTask]()
        with world.without_kept_plans():
            shown = world.plans(lambda: claimed.extend(world.claim(*rows[:200])))
            shown += world.plans(lambda: settle(world, claimed))
    assert len(claimed) == 200
    assert re.search(r"_pkey|INTEGER PRIMARY KEY|using PRIMARY", shown), shown
    assert "idx_" not in shown, shown


def test_touch_finds_rows_and_keys_by_index_on_empty_statistics(unanalysed: PlannedWorld) -> None:
    delays, ids = unanalysed.delays, [one.id for one in waiting(unanalysed, 1000)]
    keys = [f"k{n}" for n in range(10_000)]
    with unanalysed.begin() as connection:
        rows = [{"tag": "mail", "task_key": key, "task_id": ids[0]} for key in keys]
        connection.execute(insert(unanalysed.table("keys")), rows)
    works: list[Callable[[], object]] = [
        lambda: delays.touch(ids[0], 5000),
        lambda: delays.touch(tag="mail", key="k1", delay=5000),
        lambda: delays.touch(ids, 5000),
        lambda: delays.touch(tag="mail", key=keys[:300], delay=5000),
    ]
    for work in works:
        shown = unanalysed.plans(work)
        assert "plan_idx" not in shown, shown
        assert_no_scan(shown)


SLOW_PATH: Works = [
    lambda world: world.levels(1.0),
    lambda world: world.claim_due(priorities=[0, 1], most=50),
    lambda world: world.worker().claim_recovered(),
    lambda world: world.recover(),
]
SLOW_PATH_OF_MANY_ROWS: Works = [
    lambda world: world.levels(1000.0),
    lambda world: world.claim_due(priorities=[0], most=50),
    lambda world: world.die("w"),
    lambda world: world.renew(since=world.now()),
    lambda world: world.expired_leases(),
]


def test_the_slow_path_uses_the_hot_index(either: PlannedWorld, analysed: PlannedWorld) -> None:
    for work in SLOW_PATH + (SLOW_PATH_OF_MANY_ROWS if either is analysed else []):
        shown = either.plans(partial(work, either))
        assert "plan_idx_yb_delay_hot" in shown, shown
        assert "plan_idx_expectedTime_status" not in shown, shown
        assert_no_scan(shown)


def test_neither_a_claim_nor_a_count_reads_the_rows_that_are_not_due(postgresql_url: str) -> None:
    """PostgreSQL does not end a scan at the upper bound of a comparison of several columns."""
    with planned_world(postgresql_url, "far_plan_") as world:
        world.fill(20_000, 86_400)
        world.execute(f"VACUUM ANALYZE {world.table().name}")
        for work in (lambda: world.claim_due(priorities=[0], most=500), world.overdue):
            shown = world.plans(work, "(ANALYZE, BUFFERS)")
            pages = [
                sum(map(int, re.findall(r"(?:hit|read)=(\d+)", line)))
                for line in shown.splitlines()
                if line.startswith("  Buffers")  # not those of the planner
            ]
            assert pages, shown
            assert max(pages) < 30, shown


def test_claims_lock_no_rows_of_other_queues_although_the_table_is_small(database_url: str) -> None:
    with planned_world(database_url, "small_") as world:
        if world.kind == "postgresql":
            return  # its planner reads a small table as a whole, and locks only the rows it wants
        rows = world.put_each("aaabbaac")
        some, past = rows[:3], world.now() - timedelta(seconds=10)
        works: list[tuple[Callable[[], object], str]] = [
            (lambda: world.worker().claim_recovered("a"), "idx_yb_delay_hot"),
            (lambda: world.die("w"), "idx_yb_delay_hot"),
            (lambda: world.renew(by="w", since=past), "idx_yb_delay_hot"),
            (lambda: world.claim_due("a", [0], 50), "idx_yb_delay_hot"),
            (lambda: world.claim(*some), ""),
            (lambda: world.claim(*some, replace(some[0], version=5)), ""),
        ]
        for work, index in works:
            shown = world.plans(work)
            assert index in shown, shown
            assert not re.search(r"(SCAN|ALL on|index on) small_(?!yb_delay_policy)", shown), shown


def test_few_rows_of_a_status_or_key_are_found_by_index(either: PlannedWorld) -> None:
    world = either
    some = [world.put(tag="few", due_s=n - 5000, key=f"k{n}") for n in range(100)]
    world.worker().end(world.claim(*some[:50]), "fail", error="x")

    def find(status: Status | None, key: str | None, limit: int = 20) -> list[int]:
        return [one.id for one in world.delays.find(status=status, key=key, limit=limit).tasks]

    assert find(Status.FAILED, None, 100) == [one.id for one in some[:50]]
    assert find(None, "k70") == find(Status.NOT_COMPLETE, "k70") == [some[70].id]
    for status in set(Status) - {Status.DONE}:
        shown = world.plans(partial(find, status, None))
        assert "plan_idx_expectedTime_status" not in shown, shown
        assert_no_scan(shown)
    shown = world.plans(partial(find, None, "k70"))
    assert "plan_idx_yb_delay_key" in shown, shown
    assert_no_scan(shown)
    t = world.table()
    with world.begin() as connection:  # other tests use the same table
        connection.execute(t.delete().where(t.c.tag == "few"))


def test_counts_of_a_large_table_are_estimates_of_the_planner(analysed: PlannedWorld) -> None:
    exact = {status: (rows, False) for status, rows in analysed.counted().items()}
    assert analysed.counts() == exact
    found = analysed.counts(1000)
    large = () if analysed.kind == "sqlite" else (Status.DONE, Status.NOT_COMPLETE)
    for status, (rows, is_estimate) in found.items():
        assert is_estimate is (status in large)
        if is_estimate:
            assert exact[status][0] / 2 < rows < exact[status][0] * 2
        else:
            assert rows == exact[status][0]


def test_due_rows_are_found_without_reading_waiting_rows(unanalysed: PlannedWorld) -> None:
    if unanalysed.kind != "postgresql":
        return  # the clocks of the other databases can be used with an index
    for work in SLOW_PATH[1:3]:
        shown = unanalysed.plans(partial(work, unanalysed))
        assert re.search(r"Index Cond: .*expected_time\)? <", shown)


def test_a_sweep_reads_rows_by_their_time(unanalysed: PlannedWorld, analysed: PlannedWorld) -> None:
    works: list[tuple[PlannedWorld, Callable[[], object]]] = [
        (unanalysed, unanalysed.near),
        (analysed, lambda: analysed.purge(20_000)),
    ]
    if unanalysed.kind != "postgresql":  # which reads such a small table as a whole
        works.append((unanalysed, lambda: unanalysed.purge(60)))
    for world, work in works:
        shown = world.plans(work)
        assert "plan_idx_expectedTime_status" in shown, shown
        assert world is analysed or "plan_idx_yb_delay_hot" not in shown, shown
        assert_no_scan(shown)


@pytest.mark.parametrize("move", ["cancel", "reschedule", "rerun"])
def test_bulk_calls_find_rows_in_windows_of_due_times(analysed: PlannedWorld, move: str) -> None:
    status = "FAILED" if move == "rerun" else "NOT_COMPLETE"
    since = analysed.now() - timedelta(seconds=5000)
    choices: list[dict[str, Any]] = [{"tag": "nobody"}]
    choices += [{"status": status, "key_prefix": "x", "since": since}]
    for filters in choices:
        shown = analysed.plans(partial(analysed.windows, move, filters))
        assert_no_scan(shown)
        used = re.findall("plan_idx_([a-z_]+)", shown.lower())
        # MySQL may use the other index if it estimates that a window is as narrow there.
        # PostgreSQL may read the few rows with a key inside a window.
        has_another = move == "rerun" and analysed.kind == "postgresql"
        in_order = "yb_delay_ended_badly" if has_another else "yb_delay_hot"
        assert used[0] == in_order, shown
        least = 1 if move == "rerun" else 3  # no row has failed, so there are no windows
        assert used.count(in_order) + used.count("yb_delay_key") >= least, shown


def test_some_ids_are_found_by_the_primary_key(either: PlannedWorld) -> None:
    ids = [one.id for one in either.delays.find(limit=1000).tasks[::3]]
    works: list[Callable[[], object]] = [
        partial(either.delays.find, ids=named, status=status, limit=50)
        for named, status in itertools.product((ids, ids[:3]), (None, ["DONE"], ["FAILED"]))
    ]
    works += [
        partial(either.windows, move, {"ids": named}, 1000)
        for named, move in itertools.product((ids, ids[:3]), ("cancel", "rerun"))
    ]
    for work in works:
        shown = either.plans(work)
        assert "plan_idx" not in shown, shown
        assert_no_scan(shown)


@pytest.mark.parametrize("move", ["cancel", "reschedule"])
def test_bulk_moves_use_ids_on_empty_statistics(unanalysed: PlannedWorld, move: str) -> None:
    delays = unanalysed.delays
    made = [delays.schedule_delay("mail", None, 60, key=f"{move}{n}") for n in range(300)]
    call, more = getattr(delays.bulk, move), [] if move == "cancel" else [3600]
    shown = unanalysed.plans(lambda: call(*more, ids=[one.id for one in made]))
    scan = "(Seq Scan|ALL|index) on new_plan_yb_delay_task_m|SCAN new_plan_"
    assert not re.search(scan, shown), shown
    assert "plan_idx" not in shown, shown
    assert {unanalysed.read(one).version for one in made} == {1}


# The plans of the statements of pauses


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


def test_the_search_for_rows_to_release_reads_only_held_rows(planned: PlannedWorld) -> None:
    now, name = planned.now(), "held" if planned.kind == "postgresql" else "hot"
    planned.delays.policies.pause(tag="sms")
    for work in (
        planned.held_levels,
        partial(planned.held_page, HeldPlace()),
        partial(planned.held_page, HeldPlace(now, 1)),
    ):
        shown = planned.plans(work)
        assert f"plan_idx_yb_delay_{name}" in shown, shown
        assert "plan_idx_expectedTime_status" not in shown, shown
        assert_no_scan(shown)


def test_rows_are_held_and_released_by_their_ids(planned: PlannedWorld) -> None:
    held = [one.id for one in planned.delays.find(status=Status.HELD, limit=100).tasks]
    claimed = planned.claim_due(priorities=[0], most=20)
    planned.delays.policies.pause(tag="sms")
    for work in (partial(planned.release, *held), partial(planned.hold_back, *claimed)):
        shown = planned.plans(work)
        assert re.search(PRIMARY_KEY, shown), shown
        assert "plan_idx" not in shown, shown
        assert_no_scan(shown)


def test_claims_do_not_read_held_rows(planned: PlannedWorld) -> None:
    if planned.kind != "postgresql":
        return  # the other databases have the status first in the index of all rows
    # Remove dead index entries, because they do not count as a backlog.
    planned.execute(f"VACUUM {planned.table().name}")
    planned.delays.policies.resume(tag="sms")
    for work in (lambda: planned.claim_due(priorities=[0], most=5), lambda: planned.levels(0)):
        shown = planned.plans(work, "(ANALYZE, BUFFERS)")
        assert not any(map(int, re.findall(r"Rows Removed by Filter: (\d+)", shown))), shown
        read = re.findall(r"^  Buffers: shared hit=(\d+)", shown, re.MULTILINE)
        assert read, shown
        assert max(map(int, read)) < 100, shown


# The statements of sweeps find recurring schedules by indexes


def test_no_statement_of_a_sweep_reads_all_schedules(database_url: str) -> None:
    with planned_world(database_url, "many_plan_") as world:
        world.delays.recurring.set("first", "report", every="1h", overlap="skip")
        schedules, now = world.table("recurring"), world.now()
        [first] = world.rows(schedules.select())
        at = [now + timedelta(seconds=n) for n in range(5000)]
        new = [{**first._mapping, "name": f"r{n}", "id": n, "next_at": t} for n, t in enumerate(at)]
        keys = [{"tag": "other", "task_key": f"k{n}", "task_id": n} for n in range(5000)]
        with world.begin() as connection:
            connection.execute(insert(schedules), new)
            connection.execute(insert(world.table("keys")), keys)
        if world.kind != "sqlite":
            world.analyse("recurring")
            world.analyse("keys")
        shown = world.plans(world.make_recurring_tasks)
        assert "plan_" in shown
        assert_no_scan(shown)
        assert world.delays.find(tag="report").tasks
