"""Sweeps, their partitions and many queues, on every database."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import insert, update

from delaytasks import Status
from delaytasks.core.interfaces import Entry, Level, QueuePlace
from delaytasks.core.states import FINISHED
from delaytasks.maintenance import sweeper
from delaytasks.maintenance.sweeper import (
    MOST_MESSAGES_PER_QUEUE,
    MOST_NAMED,
    MOST_OTHERS,
    OverdueQueues,
)
from delaytasks.storage import policy_rows, worker_table
from delaytasks.storage.policy_rows import WAITLISTS_PER_CALL
from delaytasks.storage.sweep_queries import SweepQueries
from tests.world import World


def seconds(instant: datetime, more: float) -> datetime:
    return instant + timedelta(seconds=more)


# -- the rows that a sweep reads ------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, 2, 4])
def test_all_partitions_together_read_each_near_row_once(world: World, partitions: int) -> None:
    now = world.now()
    made = [
        world.new_row(expected_time=seconds(now, 10 + n / 1000), priority=n % 3, queue=f"q{n % 2}")
        for n in range(2500)
    ]
    made += [
        world.new_row(id=(1 << 60) + (n << 22), expected_time=seconds(now, 15)) for n in range(100)
    ]
    made.append(world.new_row(expected_time=seconds(now, 30)))
    # Excluded rows: at the start of the window, after its end, in the past, and not waiting.
    others = [world.new_row(expected_time=seconds(now, due_s)) for due_s in (5, 31, -5)]
    world.store.tasks.insert_many(made + others)
    world.put(Status.CANCELLED, expected_time=seconds(now, 20))
    met: Counter[Entry] = Counter()
    for partition in range(partitions):
        window = seconds(now, 5), seconds(now, 30), partition, partitions
        some = list(world.store.sweeps.due_between(*window))
        assert all(0 < len(batch) <= 1000 for batch in some)
        mine = [entry for batch in some for entry in batch]
        assert [one.due_us for one in mine] == sorted(one.due_us for one in mine)
        assert len(mine) > len(made) / partitions / 2
        met.update(mine)
    assert met == Counter(map(Entry.of, made))


def test_reading_near_rows_may_stop_in_the_middle(world: World) -> None:
    world.put_many(2500, due_s=10)
    now = world.now()
    for _ in range(30):  # more calls than the pool has connections
        window = world.store.sweeps.due_between(now, seconds(now, 30), 0, 1)
        assert len(next(iter(window))) == 1000


def test_levels_are_the_queues_and_priorities_with_late_rows(world: World) -> None:
    levels = world.store.sweeps.levels
    assert levels(1.0) == []
    late = [("a", 0), ("a", 9), ("b", 3), ("d", 1)]
    for queue, priority in late:
        world.put_many(3, due_s=-5, queue=queue, priority=priority)
    world.put(due_s=-0.1, queue="b", priority=4)
    world.put(due_s=60, queue="c")
    world.put(Status.DONE, queue="e")
    world.put(Status.RUNNING, queue="f")
    assert levels(1.0) == [Level("a", 9), Level("b", 3), Level("d", 1), Level("a", 0)]


# -- where a sweep begins -------------------------------------------------------------------------


def begin(world: World, partition: int = 0, partitions: int = 1) -> datetime:
    since = world.store.sweeps.begin_sweep(partition, partitions, 0.0)
    assert since is not None
    return since


def is_now(world: World, instant: datetime) -> bool:
    return timedelta(0) <= world.now() - instant < timedelta(seconds=5)


def test_one_of_two_simultaneous_sweeps_begins(world: World) -> None:
    start, sweeps = threading.Barrier(2), world.store.sweeps

    def sweep(_: int) -> bool:
        start.wait()
        return sweeps.begin_sweep(0, 1, 4.0) is not None

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(sweep, range(2))) == [False, True]  # the first sweep inserts the row
        world.advance(5)
        assert sorted(pool.map(sweep, range(2))) == [False, True]
    assert begin(world)
    assert sweeps.begin_sweep(0, 2, 4.0) is not None
    assert sweeps.begin_sweep(1, 2, 4.0) is not None


def test_after_the_clock_was_set_back_sweeps_continue_and_arm_rows_again(world: World) -> None:
    sweeps, first = world.store.sweeps, begin(world)
    sweeps.mark_armed(0, 1, first, seconds(first, 3630))
    with world.begin() as connection:
        ahead = update(world.table("sweeps")).values(swept_at=seconds(first, 3600))
        connection.execute(ahead)
    assert sweeps.stale_sweep_partitions(1, 10) == [0], "nobody could say that it was not swept"
    again = sweeps.begin_sweep(0, 1, 4.0)
    assert again is not None
    assert is_now(world, again)
    assert sweeps.stale_sweep_partitions(1, 10) == []
    assert sweeps.begin_sweep(0, 1, 4.0) is None


def test_a_sweep_begins_where_the_last_one_ended_unless_the_timer_has_changed(world: World) -> None:
    eta, redis = world.store.sweeps, SweepQueries(world.store.database, world.store.schema, "redis")
    for sweeps in (eta, redis, eta):
        since = sweeps.begin_sweep(0, 1, 0.0)
        assert since is not None
        assert is_now(world, since), "nothing is armed yet, as far as this timer knows"
        until = seconds(since, 30)
        sweeps.mark_armed(0, 1, since, until)
        assert sweeps.begin_sweep(0, 1, 0.0) == until


def test_forget_armed_moves_the_position_back_to_now_and_never_forward(world: World) -> None:
    first, second = begin(world, 0, 2), begin(world, 1, 2)
    past = seconds(first, -100)
    world.store.sweeps.mark_armed(0, 2, first, seconds(first, 30))
    world.store.sweeps.mark_armed(1, 2, second, past)
    during_a_sweep = begin(world, 0, 2)
    world.store.sweeps.forget_armed()
    world.store.sweeps.mark_armed(0, 2, during_a_sweep, seconds(during_a_sweep, 5))
    assert is_now(world, begin(world, 0, 2)), "the sweep does not undo it"
    assert begin(world, 1, 2) == past


# -- purges ---------------------------------------------------------------------------------------


def test_purging_takes_old_finished_rows_in_small_steps(world: World) -> None:
    old, keep = seconds(world.now(), -1000), set()
    for status in Status:
        for created in (old, world.now()):
            for _ in range(2):
                row = world.put(status, expected_time=created, create_time=created)
                if created != old or status not in FINISHED:
                    keep.add(row.id)
    assert [world.store.sweeps.purge(500, 4) for _ in range(3)] == [4, 2, 0]
    assert {task.id for task in world.delays.find(limit=100)} == keep


def test_purging_deletes_only_the_keys_of_the_purged_tasks(world: World) -> None:
    finished = world.schedule(key="k")
    moved = world.put(key="moved")
    live = world.schedule(key="moved")
    # The live task has the tag of one purged task and the key of the other.
    other = world.schedule("sms", key="moved")
    old = seconds(world.now(), -1000)
    for task in (finished, moved, other):  # another program finished them and left their keys
        world.change(task, status=int(Status.DONE), expected_time=old, update_time=old)
    assert world.store.sweeps.purge(500, 100) == 3
    owners = [
        world.store.tasks.id_of_key(*name)
        for name in (("note", "k"), ("sms", "moved"), ("note", "moved"))
    ]
    assert owners == [None, None, live.id]


# -- thousands of queue names: a sweep looks at a bounded number of them, in turn -----------------


#: A sweep may use this number of statements for each queue that it looks at.
EACH = 8
MANY = 12 * MOST_OTHERS


def names(count: int) -> list[str]:
    return [f"q{number:06}" for number in range(count)]


def drained(world: World, *served: str) -> list[str]:
    """Sweep while a worker serves these queues, and return those for which it requested drains."""
    world.serve("w1", *served)
    world.sweep_later()
    assert world.told("loop.failed") == []
    return [queue for queue, _, _ in world.broker.take_requested_drains()]


def put_waitlists(world: World, rows: list[dict[str, str]]) -> None:
    usual = {"limit_key": "", "place": 0, "due": world.now(), "task_id": 1, "version": 1}
    with world.begin() as connection:
        connection.execute(insert(world.table("waitlists")), [usual | row for row in rows])


@pytest.mark.slow
def test_a_sweep_looks_at_a_bounded_number_of_queues_and_at_those_of_live_workers_first(
    world: World,
) -> None:
    world.put_each(names(MANY))
    world.put(queue="served", priority=3)
    world.serve("w1", "served", "default")
    beats: list[None] = []
    with world.statements() as seen:
        world.sweep_later(on_step=lambda: beats.append(None))
    assert len(seen) < EACH * MOST_OTHERS, "the cost is not that of all queues"
    [(queue, priorities, _)] = world.broker.requested_drains
    assert (queue, priorities) == ("served", [3])
    assert len(beats) >= MOST_OTHERS / sweeper.QUEUES_PER_QUERY, "the loop shows that it goes on"
    [unserved] = world.told("queue.unserved")
    assert unserved["queue"] == "q000000, q000001, q000002, q000003, q000004"
    assert unserved["count"] == MOST_OTHERS == world.count("queue.unserved")
    named = ",".join(f"delaytasks.q00000{number}" for number in range(5))
    assert unserved["remedy"].endswith(f"worker -Q {named}")


@pytest.mark.slow
def test_each_queue_is_drained_in_one_of_several_sweeps(world: World) -> None:
    """A worker without queue names of its own serves all of them."""
    queues = names(3 * MOST_OTHERS - 10)
    world.put_each(queues)
    found = [queue for _ in range(3) for queue in drained(world, "*")]
    assert sorted(found) == queues, "each of them once"
    assert drained(world, "*")[0] == "q000000", "and again from the beginning"


@pytest.mark.slow
def test_a_worker_that_names_thousands_of_queues_has_each_of_them_swept(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeper, "MOST_NAMED", 20)
    world.put_each(names(50))
    found = [queue for _ in range(3) for queue in drained(world, *names(50), "default")]
    assert set(found) == set(names(50))
    assert len(found) <= 60 < MOST_NAMED
    assert world.told("queue.unserved") == []


@pytest.mark.slow
def test_waitlists_of_many_queues_are_visited_over_several_sweeps(world: World) -> None:
    put_waitlists(world, [{"queue": queue, "tag": "mail"} for queue in names(25)])
    found, place = set[str](), QueuePlace()
    for _ in range(3):
        queues, place = world.store.sweeps.next_queues(place, 10)
        assert len(queues) <= 10
        found |= queues
    assert found == set(names(25))
    assert place == QueuePlace(), "the next call begins again"
    assert world.store.sweeps.levels_of(["q000003", "none"], 1.0) == [Level("q000003", 0)]


@pytest.mark.slow
def test_each_sweep_visits_some_of_thousands_of_waitlists(world: World) -> None:
    tags = names(2 * WAITLISTS_PER_CALL + 50)
    put_waitlists(world, [{"queue": "default", "tag": tag} for tag in tags])
    waitlists, found = world.store.waitlist_names, list[str]()
    for _ in range(3):
        with world.statements() as seen:
            some = waitlists.in_queue("default")
        assert len(some) <= WAITLISTS_PER_CALL
        assert len(seen) <= WAITLISTS_PER_CALL + 1
        found += sorted(tag for _, tag in some)
    assert found == tags
    assert min(waitlists.in_queue("default")) == ("default", tags[0]), "again from the beginning"


@pytest.mark.slow
def test_thousands_of_worker_rows_cause_a_bounded_number_of_messages(world: World) -> None:
    world.put()
    seen: dict[str, Any] = {"seen_at": world.now(), "started_at": world.now()}
    values = {"queues": '["default"]', "pool": "prefork", "concurrency": 1, **seen}
    with world.begin() as connection:
        rows = [{"name": name, **values} for name in names(MOST_MESSAGES_PER_QUEUE)]
        connection.execute(insert(world.table("workers")), rows)
    world.sweep_later()
    [(_, _, messages)] = world.broker.requested_drains
    assert messages == MOST_MESSAGES_PER_QUEUE


@pytest.mark.slow
def test_each_sweep_reports_some_of_many_lost_workers_in_one_line(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_table, "EXPIRED_PER_SWEEP", 10)
    for name in names(15):
        world.serve(name, "default")
    world.silence()
    for _ in range(3):
        world.sweep_later()
    assert [fields["count"] for fields in world.told("worker.lost")] == [10, 5]


@pytest.mark.slow
def test_a_sweep_with_near_rows_of_many_queues_ends_in_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each queue needs its own message. The next sweep continues without a gap."""
    world.put_each(names(1200), due_s=20)
    world.put_each(names(1200), due_s=25)
    ticks = iter(range(10**6))
    monkeypatch.setattr(sweeper, "monotonic", lambda: next(ticks) * 100.0)
    armed = [len(world.sweep_later()) for _ in range(4)]
    assert armed[0] < 2400 == len(set(world.broker.ids))
    assert armed[-1] == 0, "and each sweep came further"


@pytest.mark.slow
def test_a_pause_sweep_over_many_queues_works_step_by_step(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_rows, "QUEUES_PER_CALL", 10)
    world.put_each(names(25), priority=2)
    world.put(queue="q000003", priority=7)
    with world.statements() as seen:
        found, after = world.store.paused_rows.levels(Status.NOT_COMPLETE)
    assert len(seen) < EACH * 10
    assert found[0] == Level("q000003", 7), "the highest priority comes first"
    while after is not None:
        some, after = world.store.paused_rows.levels(Status.NOT_COMPLETE, after)
        found += some
    assert sorted(found) == sorted([Level(queue, 2) for queue in names(25)] + [Level("q000003", 7)])


def test_a_check_that_may_read_no_queue_executes_no_statement(world: World) -> None:
    world.put_each(names(3))
    with world.statements() as seen:
        assert OverdueQueues(world.store.sweeps, 1.0).of_others((), most=0) == {}
    assert seen == []
