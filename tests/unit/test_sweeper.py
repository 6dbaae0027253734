"""A sweep arms the rows that are due within the horizon, expires workers, drains and purges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select

from delaytasks import Status, StoreUnavailableError
from delaytasks.core.filters import LogEntry
from delaytasks.core.interfaces import Entry
from delaytasks.maintenance import sweeper
from delaytasks.storage.sweep_queries import SweepQueries
from tests.recording import CrashError, set_columns
from tests.world import MakeWorld, World


def armed_until(world: World) -> datetime:
    query = select(world.table("sweeps").c.armed_until)
    found: datetime = world.store.database.autocommitted(lambda c: c.execute(query).scalar_one())
    return found


def arm_until(world: World, in_s: float) -> None:
    """Record that the last sweep has armed the rows that are due within `in_s`."""
    until = world.now() + timedelta(seconds=in_s)
    set_columns(world.store, "sweeps", armed_until=until)


def drained(world: World) -> list[tuple[str, list[int], int]]:
    return [(queue, sorted(some), count) for queue, some, count in world.broker.requested_drains]


# -- A sweep arms the rows that are due within the horizon ----------------------------------------


def test_a_long_pause_leaves_no_gap(world: World) -> None:
    world.sweep_later()
    arm_until(world, -100)
    world.put(due_s=-50)  # it is overdue, and drained
    near = world.put(due_s=25)
    assert world.sweep_later() == [near.id]


def test_a_crash_between_arming_and_marking_costs_duplicates_and_makes_no_gap(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [task.id for task in world.put_many(2500, due_s=19.9)]
    arm, calls = world.broker.arm, iter([False, True])

    def crash_after_two(entries: Iterable[Entry]) -> bool:
        arm(entries)
        if next(calls):
            raise CrashError
        return True

    with monkeypatch.context() as patch:
        patch.setattr(world.broker, "arm", crash_after_two)
        with pytest.raises(CrashError):
            world.sweep_later()
    assert 0 < len(world.broker.armed) < len(ids)
    assert world.sweep_later() == ids, "all of them again, also those after the crash"


def test_while_the_broker_is_unavailable_nothing_counts_as_armed(world: World) -> None:
    ids = [world.put(due_s=5).id, world.put(due_s=10).id]
    world.serve("w1", "default")
    world.put(due_s=-60)
    world.broker.is_up = False
    for _ in range(2):
        world.sweep_later()
    assert armed_until(world) <= world.now()
    assert (world.count("sweep.armed"), world.count("sweep.drain")) == (0, 0)
    assert [queue for queue, _, _ in drained(world)] == ["default"] * 2, "it is asked nevertheless"
    world.broker.is_up = True
    assert world.sweep_later() == ids
    assert (world.count("sweep.armed"), world.count("sweep.drain")) == (2, 1)


def test_a_refused_queue_does_not_keep_other_rows_from_being_armed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.put_many(1200, due_s=20, queue="bad")
    ids = [task.id for task in world.put_many(1200, due_s=25)]
    arm = world.broker.arm

    def refuse(entries: Iterable[Entry]) -> bool:
        entries = list(entries)
        arm(entry for entry in entries if entry.queue != "bad")
        return all(entry.queue != "bad" for entry in entries)

    monkeypatch.setattr(world.broker, "arm", refuse)
    assert world.sweep_later() == ids
    assert world.sweep_later() == [], "the others are drained when they are overdue"


def test_a_clock_without_a_measurement_arms_nothing_and_marks_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = world.put(due_s=5)

    def fail() -> datetime:
        raise StoreUnavailableError("the database can not be reached")

    with monkeypatch.context() as patch:
        patch.setattr(world.runtime.clock, "certain_now", fail)
        assert world.sweep_later() == []
    assert armed_until(world) <= world.now()
    assert world.sweep_later() == [near.id]


STAGES = {
    "expire": "workers",
    "due_between": "arm",
    "recover": "abandoned",
    "levels_of": "overdue",
    "purge": "purge",
    "purge_audit": "audit",
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_fails_does_not_prevent_the_other_stages(
    make_world: MakeWorld, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(purge_after=3600)
    store, long_ago = world.store, world.now() - timedelta(hours=2)
    near, old = world.put(due_s=5), world.put(Status.DONE, due_s=-7200)
    lapsed = world.put(Status.RUNNING, lease_until=world.now() - timedelta(seconds=1))
    world.change(old, update_time=long_ago)
    log = LogEntry(1, "cancel", {}, "ann", "done", long_ago, long_ago, long_ago, 0, 0, 0)
    store.bulk.begin(log)
    world.put(due_s=-60)
    world.serve("w1", "default")
    world.serve("dead", "default")
    world.silence(60, "dead")

    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("a row can not be read")

    monkeypatch.setattr(store.workers if stage == "expire" else store.sweeps, stage, fail)
    armed = world.sweep_later()
    done = {
        "expire": world.count("worker.lost") == 1,
        "due_between": armed == [near.id],
        "recover": world.read(lapsed).status is Status.NOT_COMPLETE,
        "levels_of": len(drained(world)) == 1,
        "purge": store.tasks.get(old.id) is None,
        "purge_audit": store.bulk.log(10) == [],
    }
    assert [name for name, is_done in done.items() if not is_done] == [stage]
    [failure] = world.told("loop.failed")
    assert (failure["loop"], failure["stage"]) == ("sweep", STAGES[stage])
    assert failure["error"] == "ValueError: a row can not be read"


def test_if_the_broker_takes_no_messages_the_sweeping_worker_drains_its_own_queues(
    world: World,
) -> None:
    for queue in ("default", "mail"):
        world.put(due_s=-60, queue=queue)
        world.serve(f"w-{queue}", queue)
    here: list[tuple[str, Sequence[int]]] = []

    def drain(queue: str, priorities: Sequence[int]) -> bool:
        here.append((queue, priorities))
        return queue == "default"

    for is_up in (True, False):
        world.broker.is_up = is_up
        world.sweep_later(start_drain=drain)
    assert here == [("default", [0]), ("mail", [0])]
    assert world.count("sweep.local_drain") == 1


def test_a_sweep_that_could_not_read_the_policies_releases_nothing(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without policies, no row seems to be paused."""
    world, task = make_world(), make_world().put()
    world.delays.policies.pause(tag="note")
    world.sweep_later()
    assert world.statuses([task]) == ["HELD"]
    other = make_world()

    def fail() -> Any:
        raise StoreUnavailableError("away")

    with monkeypatch.context() as patch:
        patch.setattr(other.runtime.policy_cache, "refresh", fail)
        other.sweep_later()
    assert other.statuses([task]) == ["HELD"]
    assert [fields["stage"] for fields in other.told("loop.failed")] == ["policies"]


def test_a_sweep_makes_the_tasks_of_recurring_schedules(world: World) -> None:
    world.delays.recurring.set("r", "note", {}, every="5s")
    world.sweep_later()
    assert world.delays.find(tag="note").tasks


def test_without_a_horizon_nothing_is_armed_by_sweeps(make_world: MakeWorld) -> None:
    world = make_world(horizon=None)
    world.put(due_s=5)
    assert world.sweep_later() == []


# -- A sweep is alone, expires workers, drains queues and purges ----------------------------------


def test_partitions_share_the_rows_and_the_first_does_the_other_work(make_world: MakeWorld) -> None:
    world = make_world(sweep=(5, 3))
    tasks = [world.schedule(delay=5) for _ in range(60)]
    world.broker.lose()
    lapsed = world.put(Status.RUNNING, lease_until=world.now() - timedelta(seconds=1))
    world.serve("w1", "default")
    world.put(due_s=-60)
    shares = [world.sweep_later(1), world.sweep_later(2)]
    assert (world.statuses([lapsed]), drained(world)) == (["RUNNING"], [])
    shares.append(world.sweep_later(0))
    assert (world.statuses([lapsed]), len(drained(world))) == (["NOT_COMPLETE"], 1)
    assert sorted(id for share in shares for id in share) == sorted(task.id for task in tasks)
    assert min(len(share) for share in shares) >= 10
    assert [world.sweep_later(partition) for partition in range(3)] == [[], [], []]


# -- workers that died ---------------------------------------------------------------------------


def test_rows_that_a_dead_worker_held_are_armed_again(world: World) -> None:
    world.serve("w1", "default")
    world.serve("w2", "default")
    ids = [world.put(due_s=5).id, world.put(due_s=20).id]
    assert world.sweep_later() == ids
    world.silence(world.delays.settings.sweep_s * 2)
    assert world.sweep_later() == [], "their silence was short"
    world.silence(60, "w1")
    assert world.sweep_later() == ids
    assert [fields["worker"] for fields in world.told("worker.lost")] == ["w1"]
    assert world.sweep_later() == [], "it is told once"


def test_a_worker_that_dies_while_a_partition_is_swept_is_not_forgotten(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep began before the worker expired, so it must not mark all rows as armed."""
    world = make_world(sweep=(5, 2))
    world.serve("w1", "default")
    ids = {world.schedule(delay=15 + n / 100).id for n in range(40)}
    world.broker.lose()
    assert {*world.sweep_later(0), *world.sweep_later(1)} == ids
    world.broker.lose()
    arm = world.broker.arm

    def die_meanwhile(entries: Iterable[Entry]) -> bool:
        monkeypatch.setattr(world.broker, "arm", arm)
        world.silence()
        world.sweep_later(0)
        return arm(entries)

    for _ in range(20):
        world.schedule(delay=29.9)
    arm_until(world, 29)
    monkeypatch.setattr(world.broker, "arm", die_meanwhile)
    world.sweep_later(1)
    world.sweep_later(1)
    assert ids <= {*world.broker.ids}


# -- overdue rows --------------------------------------------------------------------------------


def test_overdue_rows_cause_a_few_drain_messages_for_served_queues(world: World) -> None:
    for _ in range(50):
        world.put(due_s=-60, queue="mail", priority=3)
        world.put(due_s=-60, queue="mail", priority=5)
    world.put(due_s=-60, queue="nobody")
    world.put(due_s=-0.2)  # within the grace period
    world.serve("w1", "default", "mail")
    world.serve("w2", "mail")
    world.sweep_later()
    assert drained(world) == [("mail", [3, 5], 2 * world.delays.settings.drain_messages)]
    assert [fields["queue"] for fields in world.told("queue.unserved")] == ["nobody"]


@pytest.mark.parametrize(
    ("changes", "age", "left"),
    [
        ({}, timedelta(days=29), 28),
        ({}, timedelta(days=31), 3),
        ({"purge_after": None}, timedelta(days=31), 28),
        ({"purge_after": "1h"}, timedelta(hours=2), 3),
    ],
    ids=str,
)
def test_rows_that_ended_long_ago_are_deleted_and_all_others_stay(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, changes: Any, age: timedelta, left: int
) -> None:
    monkeypatch.setattr(sweeper, "PURGE_ROWS", 10)
    world = make_world(**changes)
    due_s = -age.total_seconds()
    for status in (*[Status.DONE] * 25, Status.NOT_COMPLETE, Status.RUNNING):
        world.change(world.put(status, due_s=due_s), update_time=world.now() - age)
    world.change(world.put(Status.FAILED, due_s=due_s), update_time=world.now())
    world.sweep_later()
    assert sum(world.counted().values()) == left
    assert world.count("task.purged") == 28 - left


def test_workers_without_a_broker_cause_no_drain_messages(world: World) -> None:
    world.serve("drainer", "*", pool="drain/prefork")
    world.serve("direct", "default", pool="direct/prefork")
    world.put(due_s=-60)
    world.sweep_later()
    assert world.told("queue.unserved")
    world.serve("worker", "default")
    world.sweep_later()
    [messages] = [fields["messages"] for fields in world.told("sweep.drain")]
    assert messages == world.delays.settings.drain_messages


def test_sweeps_without_a_broker_do_not_replace_sweeps_with_one(world: World) -> None:
    sweeps, store = world.store.sweeps, world.store
    direct = SweepQueries(store.database, store.schema, "direct")
    assert direct.begin_sweep(0, 1, 4) is not None
    assert sweeps.stale_sweep_partitions(1, 10) == [0]
    assert sweeps.begin_sweep(0, 1, 4) is not None
    assert [each.stale_sweep_partitions(1, 10) for each in (sweeps, direct)] == [[], []]
    assert direct.begin_sweep(0, 1, 4) is None


def test_abandoned_rows_are_recovered_in_any_number(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeper, "RECOVER_ROWS", 10)
    over = {"lease_until": world.now() - timedelta(seconds=1)}
    lapsed = [world.put(Status.RUNNING, **over) for _ in range(25)]
    last = world.put(Status.RUNNING, lapses=world.delays.settings.max_lost_leases - 1, **over)
    runs = world.put(Status.RUNNING)
    world.sweep_later()
    assert world.statuses([*lapsed, last, runs]) == ["NOT_COMPLETE"] * 25 + ["FAILED", "RUNNING"]
    assert world.count("task.recovered") == 26


def test_a_worker_drains_its_own_queues_without_a_sweep(world: World) -> None:
    for queue, priority in (("default", 0), ("default", 9), ("mail", 0), ("paused", 0)):
        world.put(due_s=-60, queue=queue, priority=priority)
    world.put(due_s=-0.5)
    world.put(due_s=60, queue="later")
    world.delays.policies.pause(queue="paused")
    here: list[tuple[str, list[int]]] = []
    world.runtime.sweeper.start_own_drains(
        ["default", "mail", "paused", "later"],
        lambda queue, priorities: here.append((queue, sorted(priorities))) or True,
    )
    assert sorted(here) == [("default", [0, 9]), ("mail", [0])]
