"""A process claims its next chunk and settles its last one while a chunk runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import WorkerShutdown

from delaytasks import DelayedTask, StoreUnavailableError
from delaytasks.execution import runner
from delaytasks.execution.runner import Report
from tests.waiting import wait_until
from tests.world import MakeWorld, World

# -- in a backlog, a runner claims the next chunk while the current one runs ----------------------


LONG_S = 60.0


def drain(world: World, limit: int = 1, continue_s: float = LONG_S) -> Report:
    return world.drain(most=limit, continue_s=continue_s)


def backlog(world: World, rows: int, tag: str = "note") -> list[DelayedTask]:
    return [world.schedule(tag, body=number) for number in range(rows)]


def test_a_backlog_is_run_chunk_after_chunk_until_it_is_empty(world: World) -> None:
    tasks = backlog(world, 7)
    report = drain(world, limit=2)
    assert (report.claimed, report.ran, report.is_full) == (7, 7, False)
    assert world.notes == list(range(7))
    assert world.statuses(tasks) == ["DONE"] * 7


def test_while_a_chunk_runs_the_previous_one_is_settled_and_one_more_is_claimed(
    make_world: MakeWorld,
) -> None:
    world = make_world(_chunk_max=1)
    expected = ["DONE", "RUNNING", "RUNNING", "NOT_COMPLETE"]

    def look(body: int) -> None:
        if body == 1:
            wait_until(lambda: world.statuses(tasks) == expected, 5, "the other thread")

    world.delays.processor("look")(look)
    tasks = backlog(world, 4, "look")
    assert drain(world).ran == 4
    assert world.statuses(tasks) == ["DONE"] * 4


def test_a_chunk_that_waits_for_a_slow_row_is_given_back(make_world: MakeWorld) -> None:
    world = make_world(_chunk_time_budget_s=0.1, _chunk_max=1)
    goes_on = threading.Event()
    world.delays.processor("slow")(lambda body: goes_on.wait(10))
    tasks = backlog(world, 3, "slow")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(drain, world)
        try:
            wait_until(lambda: world.statuses(tasks)[1] == "RUNNING", 5, "the claim ahead")
            wait_until(lambda: world.statuses(tasks)[1] == "NOT_COMPLETE", 5, "its return")
            assert world.read(tasks[1]).runs == 0
        finally:
            goes_on.set()
        running.result(5)
    assert world.statuses(tasks[:1]) == ["DONE"]


def test_the_chunk_behind_a_row_that_is_known_to_be_slow_is_claimed_shortly_before_its_end(
    make_world: MakeWorld,
) -> None:
    world = make_world(_chunk_time_budget_s=0.2, _chunk_max=1)
    is_claimed, seen = threading.Event(), list[bool]()

    def slow(number: int) -> None:
        if number == 0:
            time.sleep(1)  # the process learns this
            return
        is_claimed.clear()
        time.sleep(0.05)  # a claim that does not wait is done by now
        seen.extend([is_claimed.is_set(), is_claimed.wait(5)])

    world.delays.processor("slow")(slow)
    world.run(world.schedule("slow", 0))
    world.after_claim = is_claimed.set
    tasks = [world.schedule("slow", 1), world.schedule()]
    drain(world)
    assert seen == [False, True]
    assert world.statuses(tasks) == ["DONE", "DONE"]


def test_other_tasks_that_wait_end_the_backlog_of_this_process(make_world: MakeWorld) -> None:
    world = make_world(_chunk_max=1)
    others = [False, True]
    world.worker(others_wait=SimpleNamespace(is_so=lambda: others.pop(0)))
    tasks = backlog(world, 4)
    report = drain(world)
    assert (report.ran, report.is_full) == (2, True)
    assert world.statuses(tasks) == ["DONE", "DONE", "NOT_COMPLETE", "NOT_COMPLETE"]


def test_nothing_is_claimed_ahead_of_a_row_that_may_end_the_process(make_world: MakeWorld) -> None:
    world = make_world(_chunk_max=1)
    seen: list[list[str]] = []
    tasks: list[DelayedTask] = []
    world.delays.processor("limited", time_limit=60)(lambda _: seen.append(world.statuses(tasks)))
    tasks += [world.schedule(), world.schedule("limited"), world.schedule()]
    report = drain(world)
    assert seen == [["DONE", "RUNNING", "NOT_COMPLETE"]]
    assert (report.ran, report.is_full) == (2, True)


def test_a_worker_that_stops_gives_back_the_rows_that_it_claimed_ahead(
    make_world: MakeWorld,
) -> None:
    world = make_world(_chunk_max=1)

    def stop(body: Any) -> None:
        wait_until(lambda: world.statuses(tasks)[2] == "RUNNING", 5, "the claim ahead")
        raise WorkerShutdown(0)

    world.delays.processor("stop")(stop)
    tasks = [world.schedule(), world.schedule("stop"), world.schedule(), world.schedule()]
    with pytest.raises(WorkerShutdown):
        drain(world)
    assert world.statuses(tasks) == ["DONE", "RUNNING", "NOT_COMPLETE", "NOT_COMPLETE"]
    assert world.read(tasks[2]).runs == 0


def test_a_claim_ahead_that_fails_does_not_affect_the_chunk_that_runs(
    make_world: MakeWorld,
) -> None:
    world = make_world(_chunk_max=1)
    claims: list[int] = []

    def fail_third() -> None:
        claims.append(1)
        if len(claims) == 3:
            raise StoreUnavailableError("away")

    world.after_claim = fail_third
    tasks = backlog(world, 4)
    with pytest.raises(StoreUnavailableError):
        drain(world)
    assert world.statuses(tasks) == ["DONE", "DONE", "RUNNING", "NOT_COMPLETE"], (
        "the answer to the third claim was lost, so that its lease has to end"
    )


def test_a_settlement_that_fails_during_a_chunk_is_reported_and_the_chunk_is_settled(
    make_world: MakeWorld,
) -> None:
    world = make_world(_chunk_max=1, lease=2, _chunk_time_budget_s=0.1)

    def fail_first(settlements: Sequence[Any]) -> None:
        if settlements[0].task.id == tasks[0].id:
            raise StoreUnavailableError("away")

    world.before_settle = fail_first
    tasks = backlog(world, 3)
    with pytest.raises(StoreUnavailableError):
        drain(world)
    assert world.statuses(tasks) == ["RUNNING", "DONE", "NOT_COMPLETE"]


def test_rows_of_a_limited_tag_end_the_backlog_of_this_process(make_world: MakeWorld) -> None:
    world = make_world(_chunk_max=1)
    world.store.policies.set("tag", "limited", {"concurrency": 1}, "a test")
    world.delays.processor("limited")(world.notes.append)
    tasks = [world.schedule("limited"), world.schedule(), world.schedule()]
    assert drain(world).ran == 1
    assert world.statuses(tasks) == ["DONE", "NOT_COMPLETE", "NOT_COMPLETE"]


# -- settling later -------------------------------------------------------------------------------


@pytest.fixture
def make_slow(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> MakeWorld:
    """Have chunks of empty processors settled later, too."""
    monkeypatch.setattr(runner, "SLOW_ROW_S", 0.0)
    return make_world


def busy_bench(make_world: MakeWorld, **changes: Any) -> World:
    """Return a harness whose main process has tasks for this process."""
    world = make_world(**changes)
    world.worker(may_detach=True, others_wait=SimpleNamespace(is_so=lambda: True))
    return world


@pytest.mark.parametrize("tag", ["note", "concurrent"])
def test_a_chunk_reports_before_it_is_settled_and_the_next_one_runs_meanwhile(
    make_slow: MakeWorld, tag: str
) -> None:
    world, may_settle = busy_bench(make_slow), threading.Event()
    world.delays.processor("concurrent", in_flight=2)(world.notes.append)
    first, second = world.schedule(tag, body=1), world.schedule(tag, body=2)

    def hold_first(settlements: Sequence[Any]) -> None:
        if settlements[0].task.id == first.id:
            assert may_settle.wait(10)

    world.before_settle = hold_first
    try:
        assert world.run(first).ran == 1
        assert world.run(second).ran == 1
        assert world.notes == [1, 2]
        assert world.statuses([first]) == ["RUNNING"]
    finally:
        may_settle.set()
    wait_until(lambda: world.statuses([first, second]) == ["DONE"] * 2, 5, "the settlements")


def test_a_process_that_ends_waits_for_its_settlements(make_slow: MakeWorld) -> None:
    world, may_settle = busy_bench(make_slow), threading.Event()
    world.before_settle = lambda _: may_settle.wait(10)
    task = world.schedule()
    world.run(task)
    with ThreadPoolExecutor(1) as pool:
        finished = pool.submit(world.worker().finish)
        assert not finished.done()
        may_settle.set()
        finished.result(5)
    assert world.statuses([task]) == ["DONE"]


def test_a_recovered_row_waits_for_the_settlement_since_it_may_kill_the_process(
    make_slow: MakeWorld,
) -> None:
    world, seen = busy_bench(make_slow), list[list[str]]()
    other = world.schedule()
    world.delays.processor("poison")(lambda _: seen.append(world.statuses([other])))
    recovered = world.schedule("poison")
    world.change(recovered, lapses=1)
    world.run(other)
    world.run(world.read(recovered))
    assert seen == [["DONE"]]


def test_a_chunk_whose_tag_has_a_waitlist_is_settled_before_it_reports(
    make_slow: MakeWorld,
) -> None:
    world, threads = busy_bench(make_slow), list[threading.Thread]()
    world.store.policies.set("tag", "limited", {"concurrency": 1}, "a test")
    world.delays.processor("limited")(world.notes.append)
    world.before_settle = lambda _: threads.append(threading.current_thread())
    tasks = [world.schedule("limited"), world.schedule("limited")]
    world.run(*tasks)
    assert set(threads) == {threading.current_thread()}
    assert world.statuses(tasks) == ["DONE"] * 2


@pytest.mark.parametrize("options", [{"may_detach": False}, {"is_so": lambda: False}])
def test_otherwise_a_chunk_is_settled_when_it_reports(
    make_slow: MakeWorld, options: dict[str, Any]
) -> None:
    world = make_slow()
    may_detach, is_so = options.get("may_detach", True), options.get("is_so", lambda: True)
    world.worker(may_detach=may_detach, others_wait=SimpleNamespace(is_so=is_so))
    task = world.schedule()
    world.run(task)
    assert world.statuses([task]) == ["DONE"]


def test_at_most_one_chunk_is_settled_later(make_slow: MakeWorld) -> None:
    world, may_settle = busy_bench(make_slow), threading.Event()
    tasks = [world.schedule(body=number) for number in range(4)]

    def hold_first(settlements: Sequence[Any]) -> None:
        if settlements[0].task.id == tasks[0].id:
            assert may_settle.wait(10)

    world.before_settle = hold_first
    try:
        for task in tasks:
            world.run(task)
        assert world.statuses(tasks[1:]) == ["DONE"] * 3
        assert world.statuses(tasks[:1]) == ["RUNNING"]
    finally:
        may_settle.set()
    wait_until(lambda: world.statuses(tasks) == ["DONE"] * 4, 5, "the first settlement")


def test_a_chunk_of_quick_rows_is_settled_before_it_reports(
    make_slow: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SLOW_ROW_S", 10.0)
    world, threads = busy_bench(make_slow), list[threading.Thread]()
    world.before_settle = lambda _: threads.append(threading.current_thread())
    world.run(world.schedule())
    assert threads == [threading.current_thread()]
