"""Limits, waitlists and slots, on every database."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select, update

from delaytasks import DelayedTask, Status, StoreError
from delaytasks.model.policies import WAITLIST_RECHECK_S
from tests.world import MonkeyPatch, Settlement, WaitlistState, World


def admit(world: World, limit: int = 100) -> list[DelayedTask]:
    return list(world.worker().admission.admit("default", "note", limit)[0])


def waitlist_rows(world: World) -> int:
    return len(world.rows(select(world.table("waitlists"))))


def queue_up(world: World, *tasks: DelayedTask) -> None:
    """Let another task run, and these wait behind it, since only one may run."""
    world.limit(concurrency=1)
    assert len(world.claim(world.schedule(body="first"))) == 1
    assert world.claim(*tasks) == []
    assert world.statuses(tasks) == ["HELD"] * len(tasks)


# Tasks start within the limits, and others wait in the waitlist


def test_no_more_tasks_start_than_the_limit_allows_and_the_others_are_held(world: World) -> None:
    world.limit(concurrency=4)
    tasks = [world.schedule(queue="other")] + [world.schedule(body=n) for n in range(1, 6)]
    other = world.schedule("other")
    assert len(world.claim(*tasks[:1], other)) == 2, "another tag is not limited"
    assert len(world.claim(*tasks[1:])) == 1, "a part of what is free, so that others have some"
    assert Counter(world.statuses(tasks)) == {"RUNNING": 2, "HELD": 4}
    assert [task.body for task in admit(world)] == [2]
    assert [task.body for task in admit(world)] == [3]
    assert admit(world) == []
    assert Counter(world.statuses(tasks)) == {"RUNNING": 4, "HELD": 2}
    assert waitlist_rows(world) == 2


def test_a_later_task_waits_behind_the_tasks_of_the_waitlist(world: World) -> None:
    queue_up(world, world.schedule(body=2))
    third = world.schedule(body=3, priority=1)
    assert world.claim(third) == []
    world.limit(concurrency=17)
    assert world.claim(world.schedule(body=4)) == [], "there would be room"
    assert [task.body for task in admit(world)] == [3, 2], "by priority and time"
    assert [task.body for task in admit(world)] == [4]


def test_a_claim_that_holds_fewer_rows_than_it_has_locked_is_rolled_back(world: World) -> None:
    world.limit(concurrency=1)
    tasks = [world.schedule(body=n) for n in range(3)]
    queries, t = world.worker().admission._queries, world.table()
    queries._hold = queries._hold.where(t.c.id != tasks[2].id)
    with pytest.raises(StoreError, match="rows to hold: 1 of 2 locked rows were changed"):
        world.claim(*tasks)
    assert world.statuses(tasks) == ["NOT_COMPLETE"] * 3
    assert waitlist_rows(world) == 0


def test_a_runner_whose_time_is_over_reports_the_waitlist_that_is_left(world: World) -> None:
    world.limit(concurrency=1)
    tasks = [world.schedule(body=n) for n in range(3)]
    report = world.run(*tasks)
    assert world.notes == [0, 1]
    assert report.waitlists == (WaitlistState("default", "note", 1),)
    report = world.worker().run_waitlist("note", 10, 20)
    assert world.notes == [0, 1, 2]
    assert report.waitlists == ()


def test_overdue_tasks_of_a_limited_tag_join_the_waitlist(world: World) -> None:
    world.limit(concurrency=2)
    tasks = [world.schedule(body=n) for n in range(7)]
    other = world.schedule("other", body="other")
    world.delays.processor("other")(world.notes.append)
    report = world.drain(most=5)
    assert report.is_full, "there may be more behind those who were held"
    world.drain(most=5, for_s=20)
    assert sorted(map(str, world.notes)) == ["0", "1", "2", "3", "4", "5", "6", "other"]
    assert world.statuses([*tasks, other]) == ["DONE"] * 8


def test_waitlists_are_found_behind_a_backlog(world: World, monkeypatch: MonkeyPatch) -> None:
    world.limit(concurrency=1)
    first, second = [world.schedule(body=n) for n in range(2)]
    world.worker().end(world.claim(first, second))
    assert world.statuses([second]) == ["HELD"]
    world.delays.processor("other")(world.notes.append)
    for _ in range(20):
        world.schedule("other", body="other")
    # Otherwise a second must pass first.
    monkeypatch.setattr("delaytasks.run.runner.RECOVERED_S", 0)
    report = world.drain(most=5)
    assert (report.is_full, report.waitlists) == (True, (WaitlistState("default", "note", None),))
    assert world.statuses([second]) == ["HELD"], "the backlog goes on"


def test_each_key_has_its_own_limit(world: World) -> None:
    world.limit(concurrency_per_key=2)
    tasks = [world.schedule(body=key, limit_key=key) for key in "aaaab"]
    tasks.append(world.schedule(body="none"))
    assert sorted(task.body for task in world.claim(*tasks)) == ["a", "a", "b", "none"]
    assert admit(world) == []
    late = [world.schedule(body="b", limit_key="b") for _ in range(3)]
    assert world.claim(*late) == []
    assert [task.body for task in admit(world)] == ["b"], "the others of a wait, and keep nobody"
    assert waitlist_rows(world) == 4


def test_tasks_of_different_concurrency_keys_are_admitted_in_turn(world: World) -> None:
    tasks = [world.schedule(body=f"a{n}", limit_key="a") for n in range(5)]
    tasks += [world.schedule(body=f"b{n}", limit_key="b") for n in range(2)]
    tasks += [world.schedule(body=f"-{n}") for n in range(2)]
    queue_up(world, *tasks)
    order = []
    for limit in range(2, 11):
        world.limit(concurrency=limit)
        [task] = admit(world)
        order.append(task.body)
    assert order == ["-0", "a0", "b0", "-1", "a1", "b1", "a2", "a3", "a4"]


def test_several_tasks_admitted_together_are_shared_among_concurrency_keys(world: World) -> None:
    keys = "a" * 30 + "b" * 3 + "c" * 30
    queue_up(world, *(world.schedule(body=key, limit_key=key) for key in keys))
    world.limit(concurrency=1000)
    assert Counter(task.body for task in admit(world, 15)) == {"a": 5, "b": 3, "c": 7}
    assert len(admit(world, 100)) == 48
    assert waitlist_rows(world) == 0


def test_a_recovered_task_waits_in_the_waitlist_and_runs_alone(world: World) -> None:
    lapsed, *others = [world.schedule(body=n) for n in range(3)]
    world.change(lapsed, lapses=1)
    queue_up(world)
    assert world.worker().claim_alone(lapsed) == []
    assert world.worker().claim_recovered() == []
    assert world.claim(*others) == []
    assert world.statuses([lapsed, *others]) == ["HELD"] * 3
    world.limit(concurrency=100)
    assert [task.body for task in admit(world)] == [0]
    assert [task.body for task in admit(world)] == [1, 2]


def test_a_slow_rate_returns_the_time_until_the_next_check(world: World) -> None:
    world.limit(rate=5, rate_period_s=60.0)
    tasks = [world.schedule(body=n) for n in range(3)]
    assert len(world.claim(*tasks)) == 1
    state = WaitlistState("default", "note", 0, 1.0)
    assert world.worker().admission.admit("default", "note", 10) == ([], state)
    world.limit(rate=5, rate_period_s=3.0)
    opening = world.worker().admission.admit("default", "note", 10)[1]
    assert opening is not None
    assert 0.1 < opening.recheck_s < 0.62
    assert world.worker().run_waitlist("note", 10, 2).ran == 2


def test_simultaneous_workers_never_exceed_the_limit(world: World) -> None:
    running, most, ran = Counter[int](), [], list[int]()
    lock = threading.Lock()

    def work(body: int) -> None:
        with lock:
            running[body] += 1
            most.append(sum(running.values()))
        threading.Event().wait(0.1)
        with lock:
            running[body] -= 1
            ran.append(body)

    world.delays.processor("limited")(work)
    world.limit("limited", concurrency=5)
    tasks = [world.schedule("limited", body=n) for n in range(40)]
    with ThreadPoolExecutor(8) as pool:
        parts = [pool.submit(world.worker().run, *tasks[n::8], for_s=20) for n in range(8)]
        for part in parts:
            part.result()
        while waitlist_rows(world):
            world.worker().run_waitlist("limited", 10, 5)
    assert sorted(ran) == list(range(40))
    assert 2 <= max(most) <= 5


LEAVES = [("cancel", (), "CANCELLED"), ("touch", (60,), "NOT_COMPLETE")]
LEAVES += [("reschedule", (60,), "NOT_COMPLETE")]


@pytest.mark.parametrize(("move", "to", "status"), LEAVES)
def test_a_task_that_left_the_waitlist_does_not_run(
    world: World, move: str, to: Any, status: str
) -> None:
    tasks = [world.schedule(body=n) for n in range(14)]
    queue_up(world, *tasks)
    for task in tasks[:-1]:
        assert getattr(world.delays, move)(task, *to)
    world.limit(concurrency=2)
    # One call examines only a few rows.
    assert [task.body for _ in range(3) for task in admit(world)] == [13]
    assert waitlist_rows(world) == 0
    assert world.statuses(tasks[:-1]) == [status] * 13


def test_a_locked_task_of_the_waitlist_does_not_delay_the_others(world: World) -> None:
    if not world.has_row_locks:
        return  # SQLite has one writer at a time
    tasks = [world.schedule(body=n) for n in range(2)]
    queue_up(world, *tasks)
    world.limit(concurrency=2)
    with world.locked(tasks[0]):
        assert [task.body for task in admit(world)] == [1]
    world.limit(concurrency=3)
    assert [task.body for task in admit(world)] == [0]


def test_without_limits_all_tasks_of_a_waitlist_are_admitted(world: World) -> None:
    queue_up(world, *(world.schedule() for _ in range(4)))
    assert admit(world) == []
    assert world.die().total == 1
    assert len(admit(world)) == 1, "the room of a dead worker is free"
    world.delete("policies")
    assert len(admit(world)) == 3


# A task that is settled passes its slot on


def test_a_settlement_transfers_a_slot_to_the_next(world: World, monkeypatch: MonkeyPatch) -> None:
    world.limit(concurrency=1)
    tasks = [world.schedule(body=n) for n in range(4)]
    seen: list[list[str]] = []
    admission = world.worker().admission
    admit_to_slots = admission.admit_to_slots

    def admit_and_record(*arguments: Any) -> Any:
        following = admit_to_slots(*arguments)
        seen.append(sorted(world.statuses(tasks)))  # as others see them
        return following

    monkeypatch.setattr(admission, "admit_to_slots", admit_and_record)
    world.worker().run(*tasks, for_s=20)
    assert world.notes == [0, 1, 2, 3]
    assert seen == [["DONE"] * n + ["HELD"] * (3 - n) + ["RUNNING"] for n in (1, 2, 3)]


def test_a_slot_that_was_lost_is_not_transferred(world: World) -> None:
    world.limit(concurrency=1)
    tasks = [world.schedule(body=n) for n in range(2)]
    [running] = world.claim(*tasks)
    lost = replace(running, version=running.version + 5)
    ended = [Settlement(lost, "succeed")]
    assert world.worker().admission.settle_and_admit(ended, "default", "note") == (set(), [])
    assert world.statuses(tasks) == ["RUNNING", "HELD"]


OTHERS = [{"rate": 100, "rate_period_s": 1.0}, {"concurrency_per_key": 1}, {"concurrency": None}]


@pytest.mark.parametrize("limits", OTHERS)
def test_a_slot_is_not_transferred_if_another_limit_also_applies(world: World, limits: Any) -> None:
    world.limit(concurrency=1)
    tasks = [world.schedule(body=n, limit_key="k") for n in range(3)]
    assert len(world.claim(*tasks)) == 1
    world.limit(**limits)
    with world.begin() as connection:
        assert world.worker().admission.admit_to_slots(connection, "default", "note", 1) == []


def test_sweeps_do_not_release_tasks_of_a_waitlist(world: World) -> None:
    tasks = [world.schedule(body=n, limit_key=key) for n, key in enumerate([None, "a", "a"])]
    queue_up(world, *tasks)
    stray = world.put(Status.HELD, tag="other")
    ids = [task.id for task in (stray, *tasks)]
    assert [entry.id for entry in world.release(*ids)] == [stray.id]
    assert world.delays.touch(tasks[1], 60)
    released = [entry.id for entry in world.release(*ids)]
    assert released == [tasks[1].id], "it is not due any more, and waits in vain"


@pytest.mark.slow
def test_a_locked_policy_is_no_outage(world: World, monkeypatch: MonkeyPatch) -> None:
    if not world.has_row_locks:
        pytest.skip("a lock is on the whole database")
    monkeypatch.setattr("delaytasks.db.database.RETRY_FOR_S", 0)
    queue_up(world, world.schedule())
    lines, policies = world.worker().admission, world.table("policies")
    with world.begin() as somebody:
        somebody.execute(update(policies).values(concurrency=policies.c.concurrency))
        tasks, state = lines.admit("default", "note", 5)
        assert (tasks, state) == ([], WaitlistState("default", "note", 0, WAITLIST_RECHECK_S))
    assert world.count("chunk.failed") == 1
