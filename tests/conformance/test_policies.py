"""Pauses and limits of tags and queues, on every database."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from sqlalchemy import event

import delaytasks as e
from delaytasks import DelayedTask, Status
from delaytasks.model.policies import PolicyCache
from tests.world import NO_POLICIES, MakeWorld, World, run_chunk

HOUR = 3600.0


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    return swept_patiently(make_world())


@pytest.fixture
def other(make_world: MakeWorld) -> World:
    """Another process on the same tables."""
    return swept_patiently(make_world())


def swept_patiently(world: World) -> World:
    """Let a sweep release all rows even if the machine stalls for seconds."""
    world.lower(share_of_a_release=12)
    world.delays.processor("sms")(world.notes.append)
    return world


def pause(world: World, *due: DelayedTask, **options: Any) -> Any:
    """Pause the tag `note`, or what the options name, and let a worker claim what is due."""
    policy = world.delays.policies.pause(**(options or {"tag": "note"}))
    world.runtime.policy_cache.refresh()
    world.run(*due)
    return policy


def resume(world: World, **options: Any) -> None:
    world.delays.policies.resume(**(options or {"tag": "note"}))
    world.sweep_later()


def held(world: World) -> int:
    return world.counted()[Status.HELD]


def policies(world: World) -> list[tuple[str, str, int]]:
    return [(each.kind, each.name, each.held or 0) for each in world.delays.policies.list()]


def raise_unavailable(*_: Any) -> list[Any]:
    raise e.StoreUnavailableError("no route to host")


# -- pause ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tag", "queue"])
def test_a_pause_holds_the_tasks_that_fall_due_and_no_others(world: World, kind: str) -> None:
    of = {"tag": "sms"} if kind == "tag" else {"queue": "slow"}
    times = [{"due_s": due_s, "priority": n % 2} for n, due_s in enumerate((-5, -5, 15, HOUR))]
    paused = [world.put(**of, **at) for at in times]
    paused += [world.put(tag="sms", queue="slow", key=key) for key in "ab"]
    others = [world.put(**at) for at in times]
    recovered = world.put(**of, lapses=1)
    policy = world.delays.policies.pause(**of, actor="me")
    assert (policy.kind, policy.name, policy.is_paused, policy.updated_by) == (
        kind, *of.values(), True, "me",
    )  # fmt: skip
    assert {paused[2].id, others[2].id} == {*world.sweep_later()}, "claims hold what is armed"
    for queue in ("default", "slow"):
        world.drain(queue)
        world.drain(queue)  # the recovered row
    assert world.statuses(paused) == ["HELD"] * 2 + ["NOT_COMPLETE"] * 2 + ["HELD"] * 2
    assert world.statuses(others) == ["DONE"] * 2 + ["NOT_COMPLETE"] * 2
    assert (world.read(recovered).status, world.read(recovered).lapses) == (Status.HELD, 1)
    assert {world.read(task).runs for task in (*paused, recovered)} == {0}
    assert world.count("task.held") == held(world) == 5
    assert policies(world) == [(kind, *of.values(), 5)]
    first = world.now() - timedelta(hours=1)
    world.change(paused[0], due_time=first)
    assert world.delays.policies.list()[0].held_since == first


def test_a_pause_with_an_end_lasts_until_the_sweep_after_it(world: World, other: World) -> None:
    tasks = [world.put(due_s=due_s) for due_s in (-5, -6)]
    until = pause(world, *tasks, tag="note", until="1h").paused_until
    world.delays.policies.set(tag="note", concurrency=3)
    assert HOUR - 60 < (until - world.now()).total_seconds() <= HOUR + 1
    world.sweep_later()
    assert world.statuses(tasks) == ["HELD"] * 2
    version = world.table("policies").c.version + 1
    world.set_columns("policies", paused_until=world.now(), version=version)
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
    task, calls = world.put(), world.delays.policies
    in_a_day = world.now() + timedelta(days=1)
    assert calls.pause(**name, until="2h", actor="ann").paused_until is not None
    assert calls.pause(**name, until=in_a_day, actor="ben").paused_until == in_a_day
    kept = calls.pause(**name, until="1h", actor="a processor")
    assert (kept.paused_until, kept.updated_by, kept.version) == (in_a_day, "ben", 2)
    for until in (None, "2d"):
        assert calls.pause(**name, until=until, actor="ann").paused_until is None
    world.run(task)
    world.sweep_later()
    assert (world.statuses([task]), len(calls.list())) == (["HELD"], 1)
    assert calls.resume(**name).paused_until is None
    world.sweep_later()
    assert (world.statuses([task]), calls.list()) == (["NOT_COMPLETE"], [])
    calls.pause(**name, until="2h")
    assert calls.remove(**name).paused_until is None


def test_a_claim_that_has_lost_its_lease_holds_no_row(world: World) -> None:
    task = world.put()
    [stale] = world.claim(task)
    world.lapse(task)
    [claimed] = world.worker("worker-2").claim_alone(world.read(task))
    world.delays.policies.pause(tag="note")
    assert (world.hold_back(stale), world.statuses([task])) == (set(), ["RUNNING"])
    assert (world.hold_back(claimed), world.statuses([task])) == ({task.id}, ["HELD"])


def test_a_full_chunk_of_paused_rows_asks_for_another_one(world: World) -> None:
    rows = world.put_many(7)
    world.delays.policies.pause(tag="note")
    assert [world.drain(most=5).is_full for _ in range(2)] == [True, False]
    assert world.statuses(rows) == ["HELD"] * 7


# -- the policies that a process knows ------------------------------------------------------------


def test_a_process_applies_a_pause_within_about_a_second(world: World, other: World) -> None:
    cache = other.runtime.policy_cache
    assert not cache.current().paused_tags
    world.delays.policies.pause(tag="note")
    assert not cache.current().paused_tags, "it reads once a second"
    cache._read_at -= 1
    assert cache.current().pauses("note", "default")
    world.lower(seconds_between_policy_reads=0)
    with mock.patch.object(cache, "_read", raise_unavailable):
        assert cache.current().pauses("note", "default"), "and keeps them if it cannot read"


def test_a_process_that_has_never_read_policies_runs_no_task(world: World) -> None:
    task, cache = world.put(), world.runtime.policy_cache
    with mock.patch.object(cache, "_read", raise_unavailable):
        for _ in range(2):
            with pytest.raises(e.StoreUnavailableError):
                cache.current()
        report = run_chunk(world, task)
    assert (report.error, report.ran) == ("StoreUnavailableError: no route to host", 0)
    assert world.statuses([task]) == ["NOT_COMPLETE"]
    assert cache.stamp is None
    assert run_chunk(world, task).ran == 1


def test_a_worker_without_policies_reports_this(world: World) -> None:
    p, store = world.table("policies"), world.store
    p.drop(world.engine)
    try:
        says = r"yb_delay_policy cannot be read, in .*: .*delaytasks -A APP db upgrade"
        with pytest.raises(e.ConfigError, match=says):
            store.check()
    finally:
        p.create(world.engine)


# -- changes of policies --------------------------------------------------------------------------


def test_a_pause_keeps_the_limits_and_removing_the_policy_removes_both(world: World) -> None:
    calls = world.delays.policies
    paused = calls.pause(tag="note", actor="a")
    assert calls.pause(tag="note", actor="b") == paused, "repeating it changes nothing"
    assert calls.resume(tag="sms").version == calls.remove(queue="q").version == 0
    assert (world.count("policy.changed"), policies(world)) == (1, [("tag", "note", 0)])
    calls.set(tag="note", concurrency=10, concurrency_per_key=2, rate="100/s")
    calls.resume(tag="note")
    assert calls.set(tag="note", concurrency_per_key=None).limits == (10, None, 100, 1.0)
    known = world.runtime.policy_cache.refresh().limited
    assert known == {"note": world.store.policies.read()[0]}
    assert [policy.as_json()["rate"] for policy in calls.list()] == ["100/s"]
    assert not calls.remove(tag="note").has_limits
    assert calls.list() == []


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


# -- resume ---------------------------------------------------------------------------------------


def test_held_tasks_are_released_in_steps_the_oldest_first(world: World) -> None:
    world.lower(rows_of_a_release=1, share_of_a_release=-1)  # a sweep releases one row
    places = [(9, -HOUR), *((priority, late_s) for priority in (0, 5) for late_s in (10, 30, 20))]
    rows = [world.put(Status.HELD, due_s=-late_s, priority=at) for at, late_s in places]
    order: list[int] = []
    for _ in range(100):
        world.sweep_later()
        waiting = [n for n, row in enumerate(world.statuses(rows)) if row == "NOT_COMPLETE"]
        order.extend(n for n in waiting if n not in order)
        if len(order) == len(rows):
            break
    assert order == [0, 5, 6, 4, 2, 3, 1]


def test_a_tag_that_is_resumed_stays_held_in_a_queue_that_is_not(world: World) -> None:
    here, there = world.put(queue="slow"), world.put()
    world.delays.policies.pause(tag="note")
    pause(world, here, there, queue="slow")
    resume(world)
    assert world.statuses([here, there]) == ["HELD", "NOT_COMPLETE"]
    resume(world, queue="slow")
    assert world.statuses([here]) == ["NOT_COMPLETE"]


def test_a_held_row_without_a_pause_is_released(world: World, other: World) -> None:
    cases = (world, "NOT_COMPLETE"), (world, "HELD"), (other, "NOT_COMPLETE")
    for process, expected in cases:
        task = world.put(Status.HELD, due_s=20)
        armed = process.sweep_later()
        assert world.statuses([task]) == [expected], "it is looked for once in a while"
        assert (task.id in armed) is (expected == "NOT_COMPLETE")


def test_a_locked_row_is_released_after_its_transaction_has_ended(world: World) -> None:
    if not world.has_row_locks:
        return  # SQLite locks the database for each writer, so no other sweep runs
    world.lower(seconds_between_searches=0)
    locked, free = world.put(Status.HELD), world.put(Status.HELD)
    with world.locked(locked):
        world.sweep_later()
        assert world.statuses([free, locked]) == ["NOT_COMPLETE", "HELD"]
    world.sweep_later()
    assert world.statuses([locked]) == ["NOT_COMPLETE"]


# -- steps, several processes and crashes ---------------------------------------------------------


def test_simultaneous_releases_count_each_row_once(world: World, make_world: MakeWorld) -> None:
    world.put_many(1500, due_s=HOUR)
    world.set_columns("tasks", status=int(Status.HELD))
    workers = [swept_patiently(make_world()) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda worker: worker.runtime.sweeper.release_resumed(), workers))
    world.sweep_later()
    assert sum(worker.count("task.released") for worker in (world, *workers)) == 1500
    assert held(world) == 0


def test_rows_with_one_due_time_are_released_past_those_that_stay_held(world: World) -> None:
    world.lower(rows_of_a_release=3, held_rows_of_a_page=4)
    at = world.now() + timedelta(hours=1)
    rows = [world.new_row(tag="sms" if n % 3 else "note", expected_time=at) for n in range(20)]
    rows += [world.new_row(expected_time=at + timedelta(seconds=n - 2)) for n in range(5)]
    world.store.tasks.new.insert_many(rows)
    world.set_columns("tasks", status=int(Status.HELD))
    world.delays.policies.pause(tag="sms")
    world.sweep_later()
    assert (held(world), world.counted()[Status.NOT_COMPLETE]) == (13, 12)
    resume(world, tag="sms")
    assert held(world) == 0


# -- workers read changed policies and miss no change: no late commit, and no change by SQL --------


MANY = 60


class PolicyReader(PolicyCache):
    """The policies that a process knows, and how many each read has returned."""

    def __init__(self, world: World) -> None:
        self.read: list[int] = []

        def read(known: Any) -> Any:
            found = world.store.policies.unless_known(known)
            self.read.append(0 if found.policies is None else len(found.policies.all))
            return found

        super().__init__(read)

    @property
    def limits(self) -> dict[str, int | None]:
        return {policy.name: policy.concurrency for policy in self.known.all}


@pytest.fixture
def reader(world: World) -> PolicyReader:
    return PolicyReader(world)


def insert_limits(world: World, count: int = MANY, **values: Any) -> None:
    """Insert policies by SQL."""
    usual = {"kind": "tag", "is_paused": False, "concurrency": 5, "version": 1, **values}
    world.insert("policies", *({**usual, "name": f"p{number:05}"} for number in range(count)))


def limit(world: World, tag: str, concurrency: int) -> None:
    world.delays.policies.set(tag=tag, concurrency=concurrency)


def test_policies_are_read_when_one_has_changed(world: World, reader: PolicyReader) -> None:
    child, of_a_starting_worker = PolicyReader(world), PolicyReader(world)
    child.follow(NO_POLICIES)
    assert child.read == [], "without policies nobody asks"
    insert_limits(world)
    reader.refresh()
    reader.refresh()
    child.follow(reader.stamp)
    limit(world, "p00007", 9)
    limit(world, "new", 1)
    reader.refresh()
    assert reader.limits == {f"p{n:05}": 9 if n == 7 else 5 for n in range(MANY)} | {"new": 1}
    assert reader.read == [MANY, 0, MANY + 1]
    for _ in range(3):
        child.follow(reader.stamp)
    of_a_starting_worker.follow(None)
    assert child.read == [MANY, MANY + 1], "and only if it is needed"
    assert child.known.all == of_a_starting_worker.known.all == reader.known.all


#: Changes of a table in which `mail` is paused, and the tags that are paused afterwards. The count
#: and the versions are equal by chance after a failover that has lost changes.
CHANGES: dict[str, tuple[Callable[[World], object], set[str]]] = {
    "insert": (lambda world: insert_limits(world, 1, is_paused=True), {"mail", "p00000"}),
    "delete": (lambda world: world.delete("policies", name="mail"), set()),
    "update": (lambda world: change_sms(world, version=2), {"mail", "sms"}),
    # SQLite counts milliseconds, so this time must differ from the time of the previous change.
    "equal versions": (
        lambda world: change_sms(world, update_time=world.now() + timedelta(seconds=1)),
        {"mail", "sms"},
    ),
}


def change_sms(world: World, **values: Any) -> None:
    world.set_columns("policies", {"name": "sms"}, is_paused=True, **values)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_by_sql_is_found(world: World, reader: PolicyReader, name: str) -> None:
    change, paused = CHANGES[name]
    limit(world, "sms", 1)
    world.delays.policies.pause(tag="mail")
    reader.refresh()
    child = PolicyReader(world)
    child.follow(reader.stamp)
    change(world)
    reader.refresh()
    child.follow(reader.stamp)
    assert reader.known.paused_tags == child.known.paused_tags == paused


def test_a_change_that_is_committed_late_is_read_too(world: World, reader: PolicyReader) -> None:
    """A later change of another policy must not become visible before this change."""
    limit(world, "first", 1)
    reader.refresh()
    will_commit, may_commit = threading.Event(), threading.Event()

    def dawdle(_connection: Any) -> None:
        if threading.current_thread().name.startswith("slow"):
            will_commit.set()
            assert may_commit.wait(30)

    event.listen(world.engine, "commit", dawdle)
    with ThreadPoolExecutor(1, "slow") as slow, ThreadPoolExecutor(1) as quick:
        late = slow.submit(limit, world, "late", 2)
        assert will_commit.wait(30)
        other = quick.submit(limit, world, "other", 3)
        for _ in range(20):
            if not other.done():
                reader.refresh()
        may_commit.set()
        late.result(30)
        other.result(30)
    event.remove(world.engine, "commit", dawdle)
    reader.refresh()
    assert reader.limits == {"first": 1, "late": 2, "other": 3}
