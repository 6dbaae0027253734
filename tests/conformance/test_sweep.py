"""Sweeps, their partitions and many queues, on every database."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import insert, update

from delaytasks.core.filters import Filter
from delaytasks.core.interfaces import Entry, Level, QueuePlace
from delaytasks.core.states import FINISHED, Status
from delaytasks.core.workers import ServiceTimes
from delaytasks.maintenance import sweeper as overdue
from delaytasks.maintenance import sweeper as sweeper_module
from delaytasks.maintenance.sweeper import (
    MOST_MESSAGES_PER_QUEUE,
    MOST_NAMED,
    MOST_OTHERS,
    OverdueQueues,
)
from delaytasks.storage import policy_rows as store_holding
from delaytasks.storage import worker_table as store_workers
from delaytasks.storage.policy_rows import WAITLISTS_PER_CALL
from delaytasks.storage.store import Store
from delaytasks.storage.sweep_queries import SweepQueries
from delaytasks.storage.types import db_now_plus
from delaytasks.storage.worker_table import WorkerTable
from tests.conformance.store_rows import add, entry, keyed, put, seconds, task
from tests.world import World

# The queries of the sweep, and the registry of workers, on every database


@pytest.mark.parametrize("sweep_partitions", [1, 2, 4])
def test_all_sweep_partitions_together_read_each_near_row_once(
    store: Store, sweep_partitions: int
) -> None:
    now = store.tasks.now()
    dues = [seconds(now, 10 + n / 1000) for n in range(2500)]
    made = [
        task(store, expected_time=due, priority=n % 3, queue=f"q{n % 2}")
        for n, due in enumerate(dues)
    ]
    made += [
        replace(task(store), id=(1 << 60) + (n << 22), expected_time=seconds(now, 15))
        for n in range(100)
    ]
    store.tasks.insert_many(made)
    # Excluded rows: at the start of the window, after its end, in the past, and not waiting.
    add(store, expected_time=seconds(now, 5))
    add(store, expected_time=seconds(now, 31))
    add(store, expected_time=seconds(now, -5))
    put(store, Status.CANCELLED, expected_time=seconds(now, 20))
    at_the_end = add(store, expected_time=seconds(now, 30))
    met: Counter[Entry] = Counter()
    for sweep_partition in range(sweep_partitions):
        mine: list[Entry] = []
        for some in store.sweeps.due_between(
            seconds(now, 5), seconds(now, 30), sweep_partition, sweep_partitions
        ):
            assert 0 < len(some) <= 1000
            mine += some
        assert [one.due_us for one in mine] == sorted(one.due_us for one in mine)
        assert len(mine) > len(made) / sweep_partitions / 2
        met.update(mine)
    assert met == Counter([entry(one) for one in (*made, at_the_end)])


def test_reading_near_rows_may_stop_in_the_middle(store: Store) -> None:
    now = store.tasks.now()
    store.tasks.insert_many([task(store, expected_time=seconds(now, 10)) for _ in range(2500)])
    for _ in range(30):  # more calls than the pool has connections
        assert len(next(iter(store.sweeps.due_between(now, seconds(now, 30), 0, 1)))) == 1000


def test_levels_are_the_queues_and_priorities_with_late_rows(store: Store) -> None:
    assert store.sweeps.levels(1.0) == []
    late, early, soon = -5, 60, -0.1
    for queue, priority, due_s in (
        ("a", 0, late), ("a", 9, late), ("b", 3, late),
        ("b", 4, soon), ("c", 0, early), ("d", 1, late),
    ):  # fmt: skip
        for _ in range(3):
            add(store, due_s, queue=queue, priority=priority)
    put(store, Status.DONE, queue="e", due_s=-5)
    put(store, Status.RUNNING, queue="f", due_s=-5)
    assert store.sweeps.levels(1.0) == [Level("a", 9), Level("b", 3), Level("d", 1), Level("a", 0)]


def test_one_of_two_simultaneous_sweeps_begins(store: Store) -> None:
    start = threading.Barrier(2)

    def sweep(_: int) -> bool:
        start.wait()
        return store.sweeps.begin_sweep(0, 1, 4.0) is not None

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(sweep, range(2))) == [False, True]  # the first sweep inserts the row
        s = store.schema.sweeps
        with store.database.begin() as connection:
            connection.execute(update(s).values(swept_at=seconds(store.tasks.now(), -5)))
        assert sorted(pool.map(sweep, range(2))) == [False, True]
    assert store.sweeps.begin_sweep(0, 1, 0.0) is not None
    assert store.sweeps.begin_sweep(0, 2, 4.0) is not None
    assert store.sweeps.begin_sweep(1, 2, 4.0) is not None


def test_after_the_clock_was_set_back_sweeps_continue_and_arm_rows_again(store: Store) -> None:
    first = store.sweeps.begin_sweep(0, 1, 0.0)
    assert first is not None
    store.sweeps.mark_armed(0, 1, first, seconds(first, 3630))
    with store.database.begin() as connection:
        connection.execute(update(store.schema.sweeps).values(swept_at=seconds(first, 3600)))
    assert store.sweeps.stale_sweep_partitions(1, 10) == [0], (
        "nobody could say that it was not swept"
    )
    again = store.sweeps.begin_sweep(0, 1, 4.0)
    assert again is not None
    assert abs((store.tasks.now() - again).total_seconds()) < 5
    assert store.sweeps.stale_sweep_partitions(1, 10) == []
    assert store.sweeps.begin_sweep(0, 1, 4.0) is None


def test_a_sweep_begins_where_the_last_one_ended(store: Store) -> None:
    first = store.sweeps.begin_sweep(0, 1, 0.0)
    assert first is not None
    assert abs((store.tasks.now() - first).total_seconds()) < 5
    until = seconds(first, 30)
    store.sweeps.mark_armed(0, 1, first, until)
    assert store.sweeps.begin_sweep(0, 1, 0.0) == until


def test_a_sweep_does_not_undo_a_forget_armed_that_was_called_meanwhile(store: Store) -> None:
    first = store.sweeps.begin_sweep(0, 1, 0.0)
    assert first is not None
    store.sweeps.mark_armed(0, 1, first, seconds(first, 30))
    read = store.sweeps.begin_sweep(0, 1, 0.0)
    assert read is not None
    store.sweeps.forget_armed()
    store.sweeps.mark_armed(0, 1, read, seconds(read, 5))
    again = store.sweeps.begin_sweep(0, 1, 0.0)
    assert again is not None
    assert again <= store.tasks.now()


def test_forget_armed_moves_the_position_back_to_now_and_never_forward(store: Store) -> None:
    first = store.sweeps.begin_sweep(0, 2, 0.0)
    assert first is not None
    second = store.sweeps.begin_sweep(1, 2, 0.0)
    assert second is not None
    past = seconds(first, -100)
    store.sweeps.mark_armed(0, 2, first, seconds(first, 30))
    store.sweeps.mark_armed(1, 2, second, past)
    store.sweeps.forget_armed()
    again = store.sweeps.begin_sweep(0, 2, 0.0)
    assert again is not None
    assert seconds(first, -1) <= again <= store.tasks.now()
    assert store.sweeps.begin_sweep(1, 2, 0.0) == past


def test_the_first_sweep_after_a_change_of_the_timer_begins_now(store: Store) -> None:
    eta, redis = store.sweeps, SweepQueries(store.database, store.schema, "redis")
    for sweeps in (eta, redis, eta):
        since = sweeps.begin_sweep(0, 1, 0.0)
        assert since is not None
        assert abs((store.tasks.now() - since).total_seconds()) < 5, (
            "nothing is armed yet, as far as this one knows"
        )
        until = seconds(since, 30)
        sweeps.mark_armed(0, 1, since, until)
        assert sweeps.begin_sweep(0, 1, 0.0) == until


def test_purging_takes_old_finished_rows_in_small_steps(store: Store) -> None:
    old, new = seconds(store.tasks.now(), -1000), store.tasks.now()
    keep = []
    for status in Status:
        for created in (old, new):
            rows = [
                put(store, status, expected_time=created, create_time=created) for _ in range(2)
            ]
            if created == new or status not in FINISHED:
                keep += [one.id for one in rows]
    assert [store.sweeps.purge(500, 4) for _ in range(3)] == [4, 2, 0]
    left = {one.id for one in store.tasks.find(Filter(), 100)}
    assert left == set(keep)


def test_purging_deletes_only_the_keys_of_the_purged_tasks(store: Store) -> None:
    old = seconds(store.tasks.now(), -1000)
    finished, moved = keyed(store, create_time=old), add(store, create_time=old, key="moved")
    t, live = store.schema.tasks, task(store, key="moved")
    store.tasks.insert_keyed(live, "reject")
    # The live task has the tag of one purged task and the key of the other.
    other, _ = store.tasks.insert_keyed(
        task(store, tag="sms", key="moved", create_time=old), "reject"
    )
    # Another program finished these tasks and left their keys.
    with store.database.begin() as connection:
        done = update(t).where(t.c.id.in_([finished.id, moved.id, other.id]))
        connection.execute(done.values(status=int(Status.DONE), expected_time=old, update_time=old))
    assert store.sweeps.purge(500, 100) == 3
    assert store.tasks.id_of_key("mail", "order-1") is store.tasks.id_of_key("sms", "moved") is None
    assert store.tasks.id_of_key("mail", "moved") == live.id


# -- workers -------------------------------------------------------------------------------------


def test_a_worker_is_listed_until_it_is_removed(store: Store) -> None:
    store.workers.report("w1", ["b", "a"], "prefork", 2, -1500)
    store.workers.report("w2", [], "solo", 1, 0)
    [first, second] = store.workers.all()
    assert (first["name"], first["queues"], first["pool"], first["concurrency"]) == (
        "w1",
        ["a", "b"],
        "prefork",
        2,
    )
    assert first["clock_offset_us"] == -1500
    store.workers.report("w1", ["a"], "threads", 3, 7)
    again = store.workers.all()[0]
    assert (again["queues"], again["pool"], again["started_at"]) == (
        ["a"],
        "threads",
        first["started_at"],
    )
    assert again["seen_at"] >= first["seen_at"]
    store.workers.remove("w1")
    assert [one["name"] for one in store.workers.all()] == [second["name"]]


def test_a_worker_that_restarts_after_a_crash_has_a_new_start(store: Store) -> None:
    store.workers.report("w1", ["a"], "prefork", 2, 0)
    w = store.schema.workers
    with store.database.begin() as connection:
        connection.execute(update(w).values(started_at=db_now_plus(-3600)))
    store.workers.report("w1", ["a"], "prefork", 2, 0)
    [worker] = store.workers.registered(store.tasks.now(), 60)
    assert (worker.seen_at - worker.started_at).total_seconds() >= 3600
    WorkerTable(store.database, store.schema).report("w1", ["a"], "prefork", 2, 0)
    [worker] = store.workers.registered(store.tasks.now(), 60)
    assert (worker.seen_at - worker.started_at).total_seconds() < 600


def test_the_services_that_a_worker_lacks_are_in_its_row_until_they_are_back(store: Store) -> None:
    lacking = ServiceTimes(broker_down_s=400, timer_down_s=30, beat_s=90)
    store.workers.report("w1", ["a"], "prefork", 2, 0, services=lacking)
    [worker] = store.workers.registered(store.tasks.now(), 60)
    for stored_s, measured_s in zip(worker.services, (400, 30, 90), strict=True):
        assert stored_s is not None
        assert measured_s <= stored_s < measured_s + 60
    store.workers.report("w1", ["a"], "prefork", 2, 0)
    [worker] = store.workers.registered(store.tasks.now(), 60)
    assert worker.services == ServiceTimes()


def test_several_threads_may_report_a_worker_simultaneously(store: Store) -> None:
    start = threading.Barrier(4)

    def seen(_: int) -> None:
        start.wait()
        store.workers.report("w1", [], "solo", 1, 0)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(seen, range(4)))
    assert len(store.workers.all()) == 1


# Thousands of queue names: a sweep queries a bounded number of them, and each one is swept in
# turn, on every database


#: A sweep may use this number of statements for each queue that it queries.
EACH = 8
MANY = 12 * MOST_OTHERS


def sweep(world: World, **options: Any) -> list[str]:
    """Sweep, and return the queues for which drains were requested."""
    world.events.clear()
    world.sweep_later(**options)
    assert world.told("loop.failed") == []
    return [queue for queue, _, _ in world.broker.take_requested_drains()]


def names(count: int) -> list[str]:
    return [f"q{number:06}" for number in range(count)]


@pytest.mark.slow
def test_a_sweep_checks_a_bounded_number_of_queues_and_those_of_live_workers_first(
    world: World,
) -> None:
    world.put_each(names(MANY))
    world.put(queue="served", priority=3)
    world.serve("w1", "served", "default")
    beats: list[None] = []
    with world.statements() as seen:
        drained = sweep(world, on_step=lambda: beats.append(None))
    assert len(seen) < EACH * MOST_OTHERS, "the cost is not that of all queues"
    assert drained == ["served"]
    assert len(beats) >= MOST_OTHERS / overdue.QUEUES_PER_QUERY, "the loop shows that it goes on"


@pytest.mark.slow
def test_one_log_line_summarizes_the_queues_that_no_worker_serves(world: World) -> None:
    world.put_each(names(MANY))
    world.serve("w1", "default")
    sweep(world)
    [told] = world.told("queue.unserved")
    assert told["queue"] == "q000000, q000001, q000002, q000003, q000004"
    assert told["count"] == MOST_OTHERS == world.count("queue.unserved")
    named = ",".join(f"delaytasks.q00000{number}" for number in range(5))
    assert told["remedy"].endswith(f"worker -Q {named}")


@pytest.mark.slow
def test_each_queue_is_drained_in_one_of_several_sweeps(world: World) -> None:
    """A worker without queue names of its own serves all of them."""
    world.put_each(names(3 * MOST_OTHERS - 10))
    world.serve("w1", "*")
    drained: list[str] = []
    for _ in range(3):
        drained += sweep(world)
    assert sorted(drained) == names(3 * MOST_OTHERS - 10), "each of them once"
    assert sweep(world)[0] == "q000000", "and again from the beginning"


@pytest.mark.slow
def test_a_worker_that_names_thousands_of_queues_has_each_of_them_swept(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overdue, "MOST_NAMED", 20)
    world.put_each(names(50))
    world.serve("w1", *names(50), "default")
    drained: list[str] = []
    for _ in range(3):
        drained += sweep(world)
    assert set(drained) == set(names(50))
    assert len(drained) <= 60 < MOST_NAMED
    assert world.told("queue.unserved") == []


@pytest.mark.slow
def test_waitlists_of_many_queues_are_visited_over_several_sweeps(world: World) -> None:
    line = world.store.schema.waitlists
    values = {
        "tag": "mail",
        "limit_key": "",
        "place": 0,
        "due": world.store.tasks.now(),
        "task_id": 1,
        "version": 1,
    }
    with world.store.database.begin() as connection:
        connection.execute(insert(line), [{**values, "queue": queue} for queue in names(25)])
    found: set[str] = set()
    place = QueuePlace()
    for _ in range(3):
        queues, place = world.store.sweeps.next_queues(place, 10)
        assert len(queues) <= 10
        found |= queues
    assert found == set(names(25))
    assert place == QueuePlace(), "the next call begins again"
    assert world.store.sweeps.levels_of(["q000003", "none"], 1.0) == [Level("q000003", 0)]


@pytest.mark.slow
def test_each_sweep_visits_some_of_thousands_of_waitlists(world: World) -> None:
    line = world.store.schema.waitlists
    values = {
        "queue": "default",
        "limit_key": "",
        "place": 0,
        "due": world.store.tasks.now(),
        "task_id": 1,
        "version": 1,
    }
    with world.store.database.begin() as connection:
        connection.execute(
            insert(line), [{**values, "tag": tag} for tag in names(2 * WAITLISTS_PER_CALL + 50)]
        )
    waitlists, found = world.store.waitlist_names, list[str]()
    for _ in range(3):
        with world.statements() as seen:
            some = waitlists.in_queue("default")
        assert len(some) <= WAITLISTS_PER_CALL
        assert len(seen) <= WAITLISTS_PER_CALL + 1
        found += sorted(tag for _, tag in some)
    assert found == names(2 * WAITLISTS_PER_CALL + 50)
    assert min(waitlists.in_queue("default")) == ("default", "q000000"), (
        "and again from the beginning"
    )


@pytest.mark.slow
def test_thousands_of_worker_rows_cause_a_bounded_number_of_messages(world: World) -> None:
    world.put(queue="default")
    w = world.store.schema.workers
    values = {"queues": '["default"]', "pool": "prefork", "concurrency": 1}
    now = world.store.tasks.now()
    with world.store.database.begin() as connection:
        rows = [
            {"name": name, "seen_at": now, "started_at": now, **values}
            for name in names(MOST_MESSAGES_PER_QUEUE)
        ]
        connection.execute(insert(w), rows)
    world.sweep_later()
    [(_, _, messages)] = world.broker.requested_drains
    assert messages == MOST_MESSAGES_PER_QUEUE


@pytest.mark.slow
def test_each_sweep_reports_some_of_many_lost_workers_in_one_line(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_workers, "EXPIRED_PER_SWEEP", 10)
    for name in names(15):
        world.serve(name, "default")
    world.silence()
    told = []
    for _ in range(3):
        sweep(world)
        told += [fields["count"] for fields in world.told("worker.lost")]
    assert told == [10, 5]


@pytest.mark.slow
def test_a_sweep_with_near_rows_of_many_queues_ends_in_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each queue needs its own message.

    The next sweep continues where this one ended, without a gap.
    """
    world.put_each(names(1200), due_s=20)
    world.put_each(names(1200), due_s=25)
    ids = {row.id for row in world.store.tasks.find(Filter(), 10_000).tasks}
    now = iter(range(10**6))
    monkeypatch.setattr(sweeper_module, "monotonic", lambda: next(now) * 100.0)
    armed: list[int] = []
    for _ in range(4):
        armed.append(len(world.sweep_later()))
    assert armed[0] < len(ids)
    assert set(world.broker.ids) == ids
    assert armed[-1] == 0, "and each sweep came further"


@pytest.mark.slow
def test_a_pause_sweep_over_many_queues_works_step_by_step(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_holding, "QUEUES_PER_CALL", 10)
    world.put_each(names(25), priority=2)
    world.put(queue="q000003", priority=7)
    rows, found, after = world.store.paused_rows, list[Level](), None
    with world.statements() as seen:
        some, after = rows.levels(Status.NOT_COMPLETE)
    assert len(seen) < EACH * 10
    assert some[0] == Level("q000003", 7), "the highest priority comes first"
    while True:
        found += some
        if after is None:
            break
        some, after = rows.levels(Status.NOT_COMPLETE, after)
    assert sorted(found) == sorted([Level(queue, 2) for queue in names(25)] + [Level("q000003", 7)])


@pytest.mark.slow
def test_a_check_that_may_read_no_queue_executes_no_statement(world: World) -> None:
    world.put_each(names(3))
    with world.statements() as seen:
        assert OverdueQueues(world.store.sweeps, 1.0).of_others((), most=0) == {}
    assert seen == []
