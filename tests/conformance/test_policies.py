"""Pauses and limits of tags and queues, on every database."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any
from unittest import mock

import pytest
from sqlalchemy import event, select, update

import delaytasks as e
from delaytasks import DelayedTask, Status
from tests.refusals import invalid
from tests.world import NO_POLICIES, MakeWorld, MonkeyPatch, World, run_chunk
from tests.world.recording import CrashError

HOUR = 3600.0


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    return swept_patiently(make_world())


@pytest.fixture
def other(make_world: MakeWorld) -> World:
    """Another process on the same tables."""
    return swept_patiently(make_world())


def swept_patiently(world: World) -> World:
    """Let the pass of a sweep complete even if the machine stalls for seconds."""
    world.runtime.pauses._budget_s = 60
    world.delays.processor("sms")(world.notes.append)
    return world


@pytest.fixture
def small_steps(world: World) -> None:
    """Limit each step to one row, and each sweep to one step."""
    world.lower(rows_of_a_pause_query=2, rows_of_a_pause_step=1)
    world.runtime.pauses._budget_s = -1


def pause(world: World, **options: Any) -> Any:
    """Pause the tag `note`, or what the options name, and apply the pause."""
    policy = world.delays.policies.pause(**(options or {"tag": "note"}))
    world.sweep_later()
    return policy


def resume(world: World, **options: Any) -> None:
    world.delays.policies.resume(**(options or {"tag": "note"}))
    world.sweep_later()


def sweep_until(world: World, is_so: Callable[[], object]) -> None:
    for _ in range(100):
        if is_so():
            return
        world.sweep_later()
    raise AssertionError("100 sweeps were not enough")


def held(world: World) -> int:
    return world.counted()[Status.HELD]


def policies(world: World) -> list[tuple[str, str, int]]:
    return [(each.kind, each.name, each.held or 0) for each in world.delays.policies.list()]


def let_pauses_end(world: World) -> None:
    p, now = world.table("policies"), world.now()
    with world.begin() as connection:
        connection.execute(update(p).values(paused_until=now, version=p.c.version + 1))


def raise_unavailable(*_: Any) -> list[Any]:
    raise e.StoreUnavailableError("no route to host")


# -- pause ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tag", "queue"])
def test_a_pause_holds_the_waiting_tasks_of_any_time_and_no_others(world: World, kind: str) -> None:
    of = {"tag": "sms"} if kind == "tag" else {"queue": "slow"}
    times = [{"due_s": due_s, "priority": n % 2} for n, due_s in enumerate((-5, 5, 15, HOUR))]
    paused = [world.put(**of, **at) for at in times]
    tags = ("sms", "note") if kind == "queue" else ("sms",)
    paused += [world.put(tag=tag, queue="slow", key=tag) for tag in tags]
    others = [world.put(**at) for at in times]
    recovered = world.put(**of, lapses=1)
    policy = pause(world, **of, actor="me")
    assert (policy.kind, policy.name, policy.is_paused, policy.updated_by) == (
        kind, *of.values(), True, "me",
    )  # fmt: skip
    assert {*world.statuses(paused)} == {"HELD"}
    assert {*world.statuses(others)} == {"NOT_COMPLETE"}
    assert (world.read(recovered).status, world.read(recovered).lapses) == (Status.HELD, 1)
    assert world.count("task.held") == held(world) == len(paused) + 1
    assert policies(world) == [(kind, *of.values(), len(paused) + 1)]
    assert world.delays.policies.list()[0].is_applied
    assert world.read(paused[0]).version == paused[0].version + 1


def test_a_pause_with_an_end_lasts_until_the_sweep_after_it(world: World, other: World) -> None:
    tasks = [world.put(due_s=due_s) for due_s in (-5, HOUR)]
    world.delays.policies.set(tag="note", concurrency=3)
    until = pause(world, tag="note", until="1h").paused_until
    assert HOUR - 60 < (until - world.now()).total_seconds() <= HOUR + 1
    world.sweep_later()
    assert world.statuses(tasks) == ["HELD"] * 2
    let_pauses_end(world)
    world.delays.policies.pause(queue="slow")
    changes = world.count("policy.changed")
    other.sweep_later()
    [ended] = other.told("policy.changed")
    assert (ended["actor"], ended["changes"]) == ("the end of the pause", "{'is_paused': False}")
    assert world.statuses(tasks) == ["NOT_COMPLETE"] * 2
    world.sweep_later()
    assert world.count("policy.changed") == changes, "the other process has ended the pause"
    without_end, policy = world.delays.policies.list()
    assert without_end.is_paused
    assert (policy.is_paused, policy.paused_until, policy.concurrency) == (False, None, 3)
    world.run(world.read(tasks[0]))
    assert world.notes == [{}]


@pytest.mark.parametrize("name", [{"tag": "note"}, {"queue": "default"}], ids=["tag", "queue"])
def test_until_sets_or_extends_a_pause_and_never_shortens_it(world: World, name: Any) -> None:
    task, calls = world.put(due_s=HOUR), world.delays.policies
    in_a_day = world.now() + timedelta(days=1)
    assert calls.pause(**name, until="2h", actor="ann").paused_until is not None
    assert calls.pause(**name, until=in_a_day, actor="ben").paused_until == in_a_day
    kept = calls.pause(**name, until="1h", actor="a processor")
    assert (kept.paused_until, kept.updated_by, kept.version) == (in_a_day, "ben", 2)
    for until in (None, "2d"):
        assert calls.pause(**name, until=until, actor="ann").paused_until is None
    world.sweep_later()
    assert (world.statuses([task]), len(calls.list())) == (["HELD"], 1)
    assert calls.resume(**name).paused_until is None
    world.sweep_later()
    assert (world.statuses([task]), calls.list()) == (["NOT_COMPLETE"], [])
    calls.pause(**name, until="2h")
    assert calls.remove(**name).paused_until is None


def test_a_queue_that_is_paused_gets_no_drain_messages(world: World) -> None:
    world.serve("w", "default", "slow")
    pause(world, queue="slow")
    # The pause sweeper has already passed the due times of these rows.
    world.put_each(["slow", "default"], due_s=-60)
    world.sweep_later()
    assert [queue for queue, *_ in world.broker.requested_drains] == ["default"]


def test_a_paused_task_that_comes_within_the_horizon_is_held_and_not_armed(world: World) -> None:
    pause(world)  # the pass has ended
    late, near = world.put_many(3, due_s=60), world.put(tag="sms", due_s=60)
    world.advance(40)
    world.sweep_later()
    assert world.statuses([*late, near]) == ["HELD"] * 3 + ["NOT_COMPLETE"]
    assert world.broker.ids == [near.id]


@pytest.mark.parametrize("is_drained", [False, True])
def test_a_claimed_task_of_a_paused_tag_is_held_not_run(world: World, is_drained: bool) -> None:
    paused, other = world.put(lapses=1 if is_drained else 0), world.put(tag="sms", body_json="7")
    world.delays.policies.pause(tag="note")
    report = world.drain() if is_drained else world.run(paused, other)
    assert (report.claimed, report.ran, world.notes) == (2, 1, [7])
    found = world.read(paused)
    assert (found.status, found.runs, found.lapses) == (Status.HELD, 0, paused.lapses)
    assert (found.worker, found.execution_time, found.lease_until) == (None, None, None)
    assert (found.version == paused.version + 2) is world.counts_moves
    assert world.count("task.held") == 1
    assert world.run(found).claimed == 0, "nobody claims it"


def test_a_full_chunk_of_paused_rows_asks_for_another_one(world: World) -> None:
    rows = world.put_many(7)
    world.delays.policies.pause(tag="note")
    assert [world.drain(most=5).is_full for _ in range(2)] == [True, False]
    assert world.statuses(rows) == ["HELD"] * 7


def test_a_worker_that_lost_its_lease_holds_nothing(world: World) -> None:
    world.delays.policies.pause(tag="note")
    [mine] = world.claim(world.put())
    world.lapse(mine)
    [again] = world.worker("other").claim_alone(world.read(mine))
    assert world.store.paused_rows.hold_claimed([mine]) == set()
    assert world.read(mine).status is Status.RUNNING
    assert world.store.paused_rows.hold_claimed([again]) == {mine.id}


# -- the policies that a process knows ------------------------------------------------------------


def test_a_process_applies_a_pause_within_about_a_second(world: World, other: World) -> None:
    cache = other.runtime.policy_cache
    assert not cache.current().has_pauses
    world.delays.policies.pause(tag="note")
    assert not cache.current().has_pauses, "it reads once a second"
    cache._read_at -= 1
    assert cache.current().pauses("note", "default")


def test_a_pool_process_reads_policies_when_its_main_process_has_others_or_none(
    world: World, other: World, make_world: MakeWorld
) -> None:
    main, child = world.runtime.policy_cache, other.runtime.policy_cache
    reads, read = list[int](), child._read
    child._read = lambda *asked: reads.append(1) or read(*asked)
    child.follow(NO_POLICIES)
    child.current()
    assert not reads, "without policies nobody asks"
    world.delays.policies.pause(tag="note")
    stamp = main.refresh().stamp
    for _ in range(2):
        child.follow(stamp)
        assert child.current().pauses("note", "default")
    assert len(reads) == 1
    late_main, late_child = (make_world().runtime.policy_cache for _ in range(2))
    assert late_main.stamp is None
    late_child.follow(late_main.stamp)
    assert late_child.current().pauses("note", "default")
    late_main.refresh()
    assert late_main.stamp == late_child.stamp


def test_a_process_without_policies_fails_if_it_reads_none(world: World, other: World) -> None:
    world.delays.policies.pause(tag="note")
    world.lower(seconds_between_policy_reads=0)
    cache = other.runtime.policy_cache
    unavailable = mock.patch.object(cache, "_read", raise_unavailable)
    with unavailable:
        for _ in range(2):
            with pytest.raises(e.StoreUnavailableError):
                cache.current()
    assert cache.current().pauses("note", "default")
    with unavailable:
        assert cache.current().pauses("note", "default")


def test_a_worker_without_policies_reports_this(world: World, monkeypatch: MonkeyPatch) -> None:
    p, store = world.table("policies"), world.store
    assert store.check() is None
    with monkeypatch.context() as away:
        away.setattr(store.database, "rows", raise_unavailable)
        with pytest.raises(e.StoreUnavailableError):
            store.check()
    with store.database.begin() as connection:
        p.drop(connection)
    try:
        says = r"policies cannot be read, in .*: .*delaytasks -A APP db upgrade"
        with pytest.raises(e.ConfigError, match=says):
            store.check()
    finally:
        with store.database.begin() as connection:
            p.create(connection)


def test_a_chunk_without_policies_runs_no_task(world: World, monkeypatch: MonkeyPatch) -> None:
    task, cache = world.put(), world.runtime.policy_cache
    with monkeypatch.context() as away:
        away.setattr(cache, "_read", raise_unavailable)
        report = run_chunk(world, task)
    assert (report.error, report.ran) == ("StoreUnavailableError: no route to host", 0)
    assert world.statuses([task]) == ["NOT_COMPLETE"]
    assert cache.stamp is None
    assert run_chunk(world, task).ran == 1
    assert world.statuses([task]) == ["DONE"]


# -- changes of policies --------------------------------------------------------------------------


def test_repeating_a_pause_resume_or_removal_changes_nothing(world: World) -> None:
    calls = world.delays.policies
    first = calls.pause(tag="note", actor="a")
    assert calls.pause(tag="note", actor="b") == first
    assert world.count("policy.changed") == 1
    assert calls.resume(tag="sms").version == calls.remove(queue="q").version == 0
    assert policies(world) == [("tag", "note", 0)]


def test_a_pause_keeps_the_limits_and_removing_the_policy_removes_both(world: World) -> None:
    calls = world.delays.policies
    calls.pause(tag="note")
    calls.set(tag="note", concurrency=10, concurrency_per_key=2, rate="100/s")
    calls.resume(tag="note")
    assert calls.set(tag="note", concurrency_per_key=None).limits == (10, None, 100, 1.0)
    known = world.runtime.policy_cache.refresh().limited
    assert known == {"note": world.store.policies.read()[0]}
    world.sweep_later()
    assert [policy.as_json()["rate"] for policy in calls.list()] == ["100/s"]
    assert calls.remove(tag="note").is_empty
    world.sweep_later()
    assert calls.list() == []


def test_a_pass_for_an_old_version_does_not_mark_a_newer_policy_as_applied(world: World) -> None:
    table, calls = world.store.policies, world.delays.policies
    versions = calls.pause(tag="note"), calls.resume(tag="note"), calls.pause(tag="note")
    for old in versions[:2]:
        table.applied([old])
        [policy] = table.read()
        assert (policy.version, policy.is_paused, policy.applied_version) == (3, True, None)
    table.applied(versions[2:])
    assert table.read()[0].is_applied


def test_simultaneous_changes_of_a_policy_are_all_applied(world: World) -> None:
    calls = world.delays.policies
    changes: list[Callable[[], Any]] = [
        lambda: calls.pause(tag="note"),
        lambda: calls.set(tag="note", concurrency=3),
        lambda: calls.set(tag="note", rate="5/m"),
    ]
    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(call) for call in changes * 3]:
            future.result(30)
    [policy] = world.store.policies.read()
    assert (policy.is_paused, policy.limits, policy.version) == (True, (3, None, 5, 60.0), 3)


def test_invalid_policies_are_refused(world: World) -> None:
    calls: Any = world.delays.policies
    for until in ("soon", -5, True, datetime(2030, 1, 1)):
        with invalid("until"):
            calls.pause(tag="note", until=until)
    for over in (0, "0s", world.now() - timedelta(seconds=9)):
        with invalid("until", match="is over.*'2h', or call resume"):
            calls.pause(tag="note", until=over)
    for call in (calls.pause, calls.resume, calls.remove):
        for arguments in ({}, {"tag": "a", "queue": "b"}):
            with invalid("tag", match="a tag or a queue"):
                call(**arguments)
        with invalid("tag"):
            call(tag=" ")
        with invalid("queue"):
            call(queue="a b")
    with invalid("concurrency", match="what"):
        calls.set(tag="note")
    with invalid("queue", match=r"'slow' can be paused.*limits are for tags"):
        calls.set(queue="slow", concurrency=3)
    for limit in (0, -1, True, 1.5, "5", 10**10):
        for name in ("concurrency", "concurrency_per_key"):
            with invalid(name, match=f"{name} is an integer"):
                calls.set(tag="note", **{name: limit})
    for rate in (*"100 0/s /s 5/ 5/0s 5/99d -5/s 5/x ٣/s 5/s/s".split(), 5, "9" * 99 + "/s"):
        with invalid("rate"):
            calls.set(tag="note", rate=rate)
    assert calls.list() == []


# -- resume ---------------------------------------------------------------------------------------


def test_after_a_resume_held_tasks_run_in_the_order_of_their_due_times(world: World) -> None:
    rows = [world.put(due_s=-late_s, body_json=str(late_s)) for late_s in (10, 50, 30, 20, 40)]
    pause(world)
    assert world.run(*rows).claimed == 0
    resume(world)
    assert world.statuses(rows) == ["NOT_COMPLETE"] * 5
    assert world.count("task.released") == 5
    world.drain()
    assert world.notes == [50, 40, 30, 20, 10]
    assert policies(world) == [], "a policy that says nothing is gone"
    [row] = world.store.database.rows(select(world.table("policies")))
    assert row.version == row.applied_version, "others may not have read yet that it says nothing"


def test_a_released_task_within_the_horizon_is_armed(world: World) -> None:
    near, *others = [world.put(due_s=due_s) for due_s in (20, HOUR, -5)]
    pause(world)
    world.broker.lose()
    resume(world)
    [entry] = world.broker.armed
    assert (entry.id, entry.version) == (near.id, near.version + 2)
    assert world.statuses([near, *others]) == ["NOT_COMPLETE"] * 3


@pytest.mark.slow
def test_held_tasks_are_released_in_steps_the_oldest_first(world: World, small_steps: None) -> None:
    places = [(priority, late_s) for priority in (0, 5) for late_s in (10, 30, 20)]
    rows = [world.put(due_s=-late_s, priority=priority) for priority, late_s in places]
    pause(world)
    sweep_until(world, lambda: world.count("task.held") >= 6)
    world.delays.policies.resume(tag="note")
    order: list[DelayedTask] = []

    def is_over() -> bool:
        waiting = [r for r in rows if world.read(r).status is Status.NOT_COMPLETE]
        order.extend(r for r in waiting if r not in order)
        return len(order) == 6

    sweep_until(world, is_over)
    assert [rows.index(row) for row in order] == [4, 5, 3, 1, 2, 0]


def test_a_tag_that_is_resumed_stays_held_in_a_queue_that_is_not(world: World) -> None:
    here, there = world.put(queue="slow"), world.put()
    world.delays.policies.pause(tag="note")
    pause(world, queue="slow")
    resume(world)
    assert world.statuses([here, there]) == ["HELD", "NOT_COMPLETE"]
    resume(world, queue="slow")
    assert world.statuses([here]) == ["NOT_COMPLETE"]


def test_a_worker_with_old_policies_runs_tasks_of_a_resumed_tag(world: World, other: World) -> None:
    world.delays.policies.pause(tag="note")
    stale = other.runtime.policy_cache
    stale.follow(stale.refresh().stamp)
    resume(world)
    task = world.put()
    other.run(task)
    assert (world.statuses([task]), other.notes) == (["DONE"], [{}])


def test_a_process_with_an_outdated_pause_holds_no_rows(world: World) -> None:
    task, rows = world.put(), world.store.paused_rows
    assert rows.hold([task.id]) == 0
    world.delays.policies.pause(queue="default")
    assert [rows.hold([task.id]) for _ in range(2)] == [1, 0]


def test_a_sweep_that_can_hold_no_near_row_ends(world: World, monkeypatch: MonkeyPatch) -> None:
    """The pause ended meanwhile, or other transactions have locked the rows."""
    world.delays.policies.pause(queue="default")
    near, steps, pauses = world.put(due_s=20), list[None](), world.runtime.pauses
    monkeypatch.setattr(pauses._rows, "hold", lambda ids: 0)
    known, now = world.runtime.policy_cache.refresh(), world.now()
    pauses.hold_near(known, now, now + timedelta(seconds=30), lambda: steps.append(None))
    assert (len(steps), world.statuses([near])) == (1, ["NOT_COMPLETE"])


def test_a_resume_between_looking_and_holding_leaves_none_held(world: World, other: World) -> None:
    if not world.has_row_locks:
        pytest.skip("SQLite lets one writer in at a time")
    tasks, resumed = [world.put(), world.put(tag="sms")], list[str]()
    for tag in ("note", "sms"):
        world.delays.policies.pause(tag=tag)

    def resume_first(*args: Any) -> None:
        if not resumed and args[2].startswith("UPDATE") and "yb_delay_task_message" in args[2]:
            resumed.append("note")
            other.delays.policies.resume(tag="note")

    event.listen(world.engine, "before_cursor_execute", resume_first)
    try:
        assert world.store.paused_rows.hold([task.id for task in tasks]) == 1
    finally:
        event.remove(world.engine, "before_cursor_execute", resume_first)
    assert (resumed, world.statuses(tasks)) == (["note"], ["NOT_COMPLETE", "HELD"])


def test_a_held_row_without_a_pause_is_released(world: World) -> None:
    task = world.put(Status.HELD)
    world.sweep_later()
    assert world.statuses([task]) == ["NOT_COMPLETE"]


def test_a_locked_row_is_released_after_its_transaction_has_ended(world: World) -> None:
    if not world.has_row_locks:
        return  # SQLite locks the database for each writer, so no other sweep runs
    locked, free = world.put(due_s=HOUR), world.put(due_s=HOUR)
    pause(world)
    with world.locked(locked):
        resume(world)
        assert world.statuses([free, locked]) == ["NOT_COMPLETE", "HELD"]
    world.sweep_later()
    assert world.statuses([locked]) == ["NOT_COMPLETE"]
    world.sweep_later()
    assert policies(world) == []


# -- steps, several processes and crashes ---------------------------------------------------------


def test_the_last_of_several_pauses_and_resumes_is_applied(world: World, small_steps: None) -> None:
    rows, calls = world.put_many(6, due_s=HOUR), world.delays.policies
    calls.pause(tag="note")
    sweep_until(world, lambda: world.count("task.held") >= 3)
    calls.resume(tag="note")
    sweep_until(world, lambda: world.count("task.released") >= 1)
    calls.pause(tag="note")
    sweep_until(world, lambda: calls.list()[0].is_applied)
    assert world.statuses(rows) == ["HELD"] * 6
    calls.remove(tag="note")
    sweep_until(world, lambda: not calls.list())
    assert world.statuses(rows) == ["NOT_COMPLETE"] * 6


@pytest.mark.parametrize(("verb", "move"), [("pause", "hold"), ("resume", "release")])
def test_a_sweep_continues_one_that_died(world: World, other: World, verb: str, move: str) -> None:
    rows, calls = world.put_many(5, due_s=HOUR), list[Any]()
    if verb == "resume":
        pause(world)
    work = getattr(world.store.paused_rows, move)

    def dies(ids: Any) -> Any:
        calls.append(ids)
        if len(calls) == 2:
            raise CrashError
        return work(ids)

    getattr(world.delays.policies, verb)(tag="note")
    world.lower(rows_of_a_pause_step=2)
    with mock.patch.object(world.store.paused_rows, move, dies), pytest.raises(CrashError):
        world.sweep_later()
    assert {*world.statuses(rows)} == {"HELD", "NOT_COMPLETE"}
    other.sweep_later()
    assert {*world.statuses(rows)} == {{"pause": "HELD", "resume": "NOT_COMPLETE"}[verb]}


def test_simultaneous_passes_count_each_row_once(world: World, make_world: MakeWorld) -> None:
    world.put_many(1500, due_s=HOUR)
    walkers = [swept_patiently(make_world()) for _ in range(3)]

    def walk(process: World) -> None:
        pauses = process.runtime.pauses
        pauses.walk(pauses.cache.refresh(), lambda: None)

    for verb in ("pause", "resume"):
        getattr(world.delays.policies, verb)(tag="note")
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(walk, walkers))
        for _ in range(10):
            walk(world)
    for name in ("task.held", "task.released"):
        assert sum(process.count(name) for process in (world, *walkers)) == 1500, name
    assert held(world) == 0


def test_all_of_many_rows_with_one_due_time_are_held_and_released(world: World) -> None:
    world.lower(rows_of_a_pause_query=3)
    at = world.now() + timedelta(hours=1)
    rows = [world.new_row(tag="sms" if n % 3 else "note", expected_time=at) for n in range(20)]
    rows += [world.new_row(expected_time=at + timedelta(seconds=n - 2)) for n in range(5)]
    world.store.tasks.new.insert_many(rows)
    pause(world)
    assert (held(world), world.counted()[Status.NOT_COMPLETE]) == (12, 13)
    resume(world)
    assert held(world) == 0
