"""Sweeps, their partitions and many queues, on every database."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import pytest
from sqlalchemy import select

from delaytasks import Status
from delaytasks.operate.checks import check_ready
from tests.world import FINISHED, Entry, MakeWorld, MonkeyPatch, World
from tests.world.recording import ManualTime

#: The queues that no live worker names, and that one sweep looks at.
MOST_OTHERS = 100
#: A sweep may use this number of statements for each queue that it looks at.
EACH = 8

# -- the rows that a sweep arms -------------------------------------------------------------------


@pytest.mark.slow
def test_a_sweep_with_very_many_near_rows_ends_in_time(
    make_world: MakeWorld, monkeypatch: MonkeyPatch
) -> None:
    """The next sweep continues without a gap, also after more sweeps than the pool has
    connections."""
    world = make_world(horizon=3600)
    rows = world.put_many(2500, due_s=1800)
    ticks = itertools.count(step=100)
    monkeypatch.setattr("delaytasks.worker.sweep.monotonic", lambda: next(ticks))
    for _ in range(6):
        armed = [len(world.sweep_later()) for _ in range(5)]
        assert armed[0] < 2500 == len(set(world.broker.ids)) == len(rows)
        assert armed[-1] == 0, "and each sweep came further"
        world.broker.lose()
        world.forget_armed()


def test_a_look_finds_the_queues_and_priorities_with_late_rows(world: World) -> None:
    assert world.overdue_queues().of_others(()) == {}
    for queue, priority in (("a", 0), ("a", 9), ("b", 3), ("d", 1)):
        world.put_many(3, due_s=-5, queue=queue, priority=priority)
    world.put(due_s=-0.1, queue="b", priority=4)
    world.put(due_s=60, queue="c")
    world.put(Status.DONE, queue="e")
    world.put(Status.RUNNING, queue="f")
    assert world.overdue_queues().of_others(()) == {"a": [9, 0], "b": [3], "d": [1]}
    assert world.overdue_queues().of_named(["b", "c"]) == {"b": [3]}


# -- the rows of lost workers ----------------------------------------------------------------------


def test_the_rows_that_a_lost_worker_had_claimed_run_elsewhere(world: World) -> None:
    ran, theirs, later = (world.put() for _ in range(3))
    near = world.put(due_s=25)
    for name in ("dead", "dead2"):
        world.serve(name, "default")
    [claimed], _ = world.claim(ran, by="dead/7-ab"), world.claim(theirs, by="dead2/7-ab")
    world.silence(14, "dead")
    assert world.sweep_later() == [near.id]
    assert world.statuses([ran]) == ["RUNNING"]
    world.silence(16, "dead")
    assert world.sweep_later() == [near.id], "an entry that it had received is lost with it"
    assert [fields["worker"] for fields in world.told("worker.lost")] == ["dead"]
    assert world.statuses([ran, theirs]) == ["NOT_COMPLETE", "RUNNING"]
    assert (world.read(ran).lapses, world.count("task.recovered")) == (1, 1)
    assert not world.settle(claimed, by="dead/7-ab"), "it was only paused"
    world.claim(later, by="dead/7-ab")
    world.sweep_later()
    assert world.statuses([later]) == ["RUNNING"], "it has claimed again, and reports soon"
    world.serve("dead", "default")
    world.sweep_later()
    assert world.statuses([later]) == ["RUNNING"]


@pytest.mark.parametrize("pool", ["prefork", "solo", "threads", "gevent", "direct/solo"])
def test_a_silent_worker_keeps_its_rows_for_15_s_or_if_a_task_may_silence_it(
    make_world: MakeWorld, pool: str
) -> None:
    """A task that holds the interpreter silences another pool, and its lease protects the task."""
    world = make_world(sweep=1)
    world.serve("busy", "default", pool=pool)
    world.claim(task := world.put(), by="busy/7-ab")
    for silent_s in (5, 16):
        world.silence(silent_s)
        world.sweep_later()
        status = "NOT_COMPLETE" if (pool, silent_s) == ("prefork", 16) else "RUNNING"
        assert (world.count("worker.lost"), world.statuses([task])) == (1, [status])


# -- where a sweep begins -------------------------------------------------------------------------


def test_one_of_two_simultaneous_sweeps_begins(make_world: MakeWorld) -> None:
    world, start = make_world(), threading.Barrier(2)

    def sweep(_: int) -> bool:
        start.wait()
        return world.sweep()

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(sweep, range(2))) == [False, True]  # the first sweep inserts the row
        world.advance(5)
        assert sorted(pool.map(sweep, range(2))) == [False, True]
    assert [make_world(sweep="5s 2").sweep(n) for n in (0, 1, 0)] == [True, True, False]


def test_a_sweep_begins_where_the_last_one_ended_unless_the_timer_has_changed(world: World) -> None:
    near = world.put(due_s=20)
    for _ in range(2):
        assert world.sweep_later() == [near.id], "as far as this timer knows, nothing is armed"
        assert world.sweep_later() == []
        world.set_columns("sweeps", timer="redis")


def test_a_deployment_with_another_namespace_on_the_same_tables_is_reported(world: World) -> None:
    def is_reported() -> bool:
        world.events.clear()
        check_ready(world.runtime)
        return bool(world.told("tables.shared"))

    assert world.sweep()
    assert not is_reported(), "it is ours"
    world.set_columns("sweeps", timer="eta:0badcafe")
    assert is_reported()
    world.advance(16)
    assert not is_reported(), "the other one has stopped"


def test_after_the_clock_was_set_back_sweeps_continue_and_arm_rows_again(world: World) -> None:
    near = world.put(due_s=20)
    assert [world.sweep(), world.sweep(), world.unswept(10)] == [True, False, []]
    world.set_columns("sweeps", swept_at=world.now() + timedelta(hours=1))
    assert world.unswept(10) == [0], "nobody could say that it was not swept"
    assert [world.sweep(), world.sweep(), world.unswept(10)] == [True, False, []]
    assert world.broker.ids == [near.id] * 2


def test_a_sweep_arms_again_what_may_be_lost_even_if_that_is_known_during_it(world: World) -> None:
    first = world.put(due_s=20)
    assert world.sweep_later() == [first.id]
    world.forget_armed()
    assert world.sweep_later() == [first.id]
    world.advance(10)
    second, arm = world.put(due_s=25), world.broker.arm

    def arm_and_forget(entries: Iterable[Entry]) -> bool:
        world.forget_armed()
        return arm(entries)

    with mock.patch.object(world.broker, "arm", arm_and_forget):
        assert world.sweep_later() == [second.id]
    assert world.sweep_later() == [first.id, second.id], "the sweep did not undo it"
    assert world.sweep_later() == []
    world.set_columns("sweeps", armed_until=world.now() - timedelta(seconds=30))
    with mock.patch.object(world.broker, "arm", arm_and_forget):
        assert world.sweep_later() == [first.id, second.id]
    assert world.sweep_later() == [first.id, second.id], "nor did the first sweep after a pause"


# -- purges ---------------------------------------------------------------------------------------


def test_purging_takes_old_finished_rows_in_small_steps(
    make_world: MakeWorld, monkeypatch: MonkeyPatch
) -> None:
    time = ManualTime(runs=True)
    time.replace(monkeypatch)
    world = make_world(purge_after=3600)
    world.lower(rows_of_a_purge=2, purges_of_a_sweep=1)
    old, keep = world.now() - timedelta(hours=2), set()
    for status, at in itertools.product(Status, (old, world.now())):
        row = world.put(status, expected_time=at, create_time=at)
        if at != old or status not in FINISHED:
            keep.add(row.id)
    for purged in (2, 3):
        world.sweep_later()
        assert world.count("task.purged") == purged
    world.put(Status.DONE, expected_time=old, create_time=old)
    for rest_s, purged in ((30, 3), (31, 4)):
        time.at += rest_s
        world.sweep_later()
        assert world.count("task.purged") == purged, "it rests after it found the last row"
    assert {task.id for task in world.delays.find(limit=100)} == keep


def test_purging_deletes_only_the_keys_of_the_purged_tasks(make_world: MakeWorld) -> None:
    world = make_world(purge_after=3600)
    finished = world.schedule(key="k")
    moved = world.put(key="moved")
    live = world.schedule(key="moved")
    # The live task has the tag of one purged task and the key of the other.
    other = world.schedule("sms", key="moved")
    old = world.now() - timedelta(hours=2)
    for task in (finished, moved, other):  # another program finished them and left their keys
        world.change(task, status=int(Status.DONE), expected_time=old, update_time=old)
    world.sweep_later()
    assert world.count("task.purged") == 3
    assert [row[0] for row in world.rows(select(world.table("keys").c.task_id))] == [live.id]


# -- thousands of queue names: each look finds a bounded number of them, in turn ------------------


def names(count: int) -> list[str]:
    return [f"q{number:06}" for number in range(count)]


@pytest.mark.slow
def test_a_sweep_reports_a_few_of_the_queues_that_no_worker_serves(world: World) -> None:
    world.put_each(names(12 * MOST_OTHERS))
    world.put(queue="served", priority=3)
    world.serve("w1", "served", "default")
    with world.statements() as seen:
        world.sweep_later()
    assert len(seen) < EACH * MOST_OTHERS, "the cost is not that of all queues"
    [unserved] = world.told("queue.unserved")
    others = f"and {MOST_OTHERS - 5} more"
    assert unserved["queue"] == f"q000000, q000001, q000002, q000003, q000004 {others}"
    assert unserved["count"] == MOST_OTHERS == world.count("queue.unserved")
    named = ",".join(f"delaytasks.q00000{number}" for number in range(5))
    assert unserved["remedy"].endswith(f"worker -Q {named}")


@pytest.mark.slow
def test_one_of_some_looks_finds_each_queue_and_queue_of_waitlists(world: World) -> None:
    """A worker without queue names of its own serves all of them."""
    queues, waitlists = names(3 * MOST_OTHERS - 10), [f"w{n}" for n in range(2 * MOST_OTHERS - 10)]
    world.put_each(queues)
    row = {"tag": "mail", "limit_key": "", "place": 0, "due": world.now(), "task_id": 1}
    world.insert("waitlists", *({**row, "version": 1, "queue": queue} for queue in waitlists))
    looks = world.overdue_queues()
    found = [queue for _ in range(3) for queue in looks.of_others(())]
    assert sorted(queue for queue in found if queue in queues) == queues, "each of them once"
    assert set(found) == {*queues, *waitlists}
    assert "q000000" in looks.of_others(()), "and again from the beginning"
