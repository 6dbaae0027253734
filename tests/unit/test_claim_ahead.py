"""A process claims its next chunk and settles its last one while a chunk runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery.exceptions import WorkerShutdown

from delaytasks import DelayTask
from delaytasks.core.errors import StoreUnavailableError
from delaytasks.execution import runner
from delaytasks.execution.runner import Report
from tests.recording import RunnerHarness
from tests.unit.conftest import Make
from tests.waiting import wait_until

# -- in a backlog, a runner claims the next chunk while the current one runs ----------------------


LONG_S = 60.0


def drain(bench: RunnerHarness, limit: int = 1, continue_s: float = LONG_S) -> Report:
    return bench.runner.run_due("default", [0], limit, continue_s=continue_s)


def backlog(bench: RunnerHarness, rows: int, tag: str = "note") -> list[DelayTask]:
    return [bench.schedule(tag, body=number) for number in range(rows)]


def test_a_backlog_is_run_chunk_after_chunk_until_it_is_empty(bench: RunnerHarness) -> None:
    tasks = backlog(bench, 7)
    report = drain(bench, limit=2)
    assert (report.claimed, report.ran, report.is_full) == (7, 7, False)
    assert bench.ran == list(range(7))
    assert bench.statuses(tasks) == ["DONE"] * 7


def test_while_a_chunk_runs_the_previous_one_is_settled_and_one_more_is_claimed(make: Make) -> None:
    bench = make(_chunk_max=1)
    expected = ["DONE", "RUNNING", "RUNNING", "NOT_COMPLETE"]

    def look(body: int) -> None:
        if body == 1:
            wait_until(lambda: bench.statuses(tasks) == expected, 5, "the other thread")

    bench.registry.processor("look")(look)
    tasks = backlog(bench, 4, "look")
    assert drain(bench).ran == 4
    assert bench.statuses(tasks) == ["DONE"] * 4


def test_a_chunk_that_waits_for_a_slow_row_is_given_back(make: Make) -> None:
    bench = make(_chunk_time_budget_s=0.1, _chunk_max=1)
    goes_on = threading.Event()
    bench.registry.processor("slow")(lambda body: goes_on.wait(10))
    tasks = backlog(bench, 3, "slow")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(drain, bench)
        try:
            wait_until(lambda: bench.statuses(tasks)[1] == "RUNNING", 5, "the claim ahead")
            wait_until(lambda: bench.statuses(tasks)[1] == "NOT_COMPLETE", 5, "its return")
            assert bench.now(tasks[1]).attempts == 0
        finally:
            goes_on.set()
        running.result(5)
    assert bench.statuses(tasks[:1]) == ["DONE"]


def test_the_chunk_behind_a_row_that_is_known_to_be_slow_is_claimed_shortly_before_its_end(
    make: Make,
) -> None:
    bench = make(_chunk_time_budget_s=0.2, _chunk_max=1)
    is_claimed, seen = threading.Event(), list[bool]()

    def slow(number: int) -> None:
        if number == 0:
            time.sleep(1)  # the process learns this
            return
        is_claimed.clear()
        time.sleep(0.05)  # a claim that does not wait is done by now
        seen.extend([is_claimed.is_set(), is_claimed.wait(5)])

    bench.registry.processor("slow")(slow)
    bench.run(bench.schedule("slow", 0))
    bench.claims.after_claim = is_claimed.set
    tasks = [bench.schedule("slow", 1), bench.schedule()]
    drain(bench)
    assert seen == [False, True]
    assert bench.statuses(tasks) == ["DONE", "DONE"]


def test_other_tasks_that_wait_end_the_backlog_of_this_process(make: Make) -> None:
    bench = make(_chunk_max=1)
    others = [False, True]
    bench.runner = bench.make_runner(has_others=lambda: others.pop(0))
    tasks = backlog(bench, 4)
    report = drain(bench)
    assert (report.ran, report.is_full) == (2, True)
    assert bench.statuses(tasks) == ["DONE", "DONE", "NOT_COMPLETE", "NOT_COMPLETE"]


def test_nothing_is_claimed_ahead_of_a_row_that_may_end_the_process(make: Make) -> None:
    bench = make(_chunk_max=1)
    seen: list[list[str]] = []
    tasks: list[DelayTask] = []
    bench.registry.processor("limited", time_limit=60)(lambda _: seen.append(bench.statuses(tasks)))
    tasks += [bench.schedule(), bench.schedule("limited"), bench.schedule()]
    report = drain(bench)
    assert seen == [["DONE", "RUNNING", "NOT_COMPLETE"]]
    assert (report.ran, report.is_full) == (2, True)


def test_a_worker_that_stops_gives_back_the_rows_that_it_claimed_ahead(make: Make) -> None:
    bench = make(_chunk_max=1)

    def stop(body: Any) -> None:
        wait_until(lambda: bench.statuses(tasks)[2] == "RUNNING", 5, "the claim ahead")
        raise WorkerShutdown(0)

    bench.registry.processor("stop")(stop)
    tasks = [bench.schedule(), bench.schedule("stop"), bench.schedule(), bench.schedule()]
    with pytest.raises(WorkerShutdown):
        drain(bench)
    assert bench.statuses(tasks) == ["DONE", "RUNNING", "NOT_COMPLETE", "NOT_COMPLETE"]
    assert bench.now(tasks[2]).attempts == 0


def test_a_claim_ahead_that_fails_does_not_affect_the_chunk_that_runs(make: Make) -> None:
    bench = make(_chunk_max=1)
    claims: list[int] = []

    def fail_third() -> None:
        claims.append(1)
        if len(claims) == 3:
            raise StoreUnavailableError("away")

    bench.claims.after_claim = fail_third
    tasks = backlog(bench, 4)
    with pytest.raises(StoreUnavailableError):
        drain(bench)
    assert bench.statuses(tasks) == ["DONE", "DONE", "RUNNING", "NOT_COMPLETE"], (
        "the answer to the third claim was lost, so that its lease has to end"
    )


def test_a_settlement_that_fails_during_a_chunk_is_reported_and_the_chunk_is_settled(
    make: Make,
) -> None:
    bench = make(_chunk_max=1, lease=2, _chunk_time_budget_s=0.1)

    def fail_first(settlements: Sequence[Any]) -> None:
        if settlements[0].task.id == tasks[0].id:
            raise StoreUnavailableError("away")

    bench.claims.before_settle = fail_first
    tasks = backlog(bench, 3)
    with pytest.raises(StoreUnavailableError):
        drain(bench)
    assert bench.statuses(tasks) == ["RUNNING", "DONE", "NOT_COMPLETE"]


def test_rows_of_a_limited_tag_end_the_backlog_of_this_process(make: Make) -> None:
    bench = make(_chunk_max=1)
    bench.store.policies.set("tag", "limited", {"concurrency": 1}, "a test")
    bench.registry.processor("limited")(bench.ran.append)
    tasks = [bench.schedule("limited"), bench.schedule(), bench.schedule()]
    assert drain(bench).ran == 1
    assert bench.statuses(tasks) == ["DONE", "NOT_COMPLETE", "NOT_COMPLETE"]


# -- settling later -------------------------------------------------------------------------------


@pytest.fixture
def make_slow(make: Make, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Have chunks of empty processors settled later, too."""
    monkeypatch.setattr(runner, "SLOW_ROW_S", 0.0)
    return make


def busy_bench(make: Make, **changes: Any) -> RunnerHarness:
    """Return a harness whose main process has tasks for this process."""
    bench = make(**changes)
    bench.runner = bench.make_runner(may_detach=True, has_others=lambda: True)
    return bench


@pytest.mark.parametrize("tag", ["note", "concurrent"])
def test_a_chunk_reports_before_it_is_settled_and_the_next_one_runs_meanwhile(
    make_slow: Make, tag: str
) -> None:
    bench, may_settle = busy_bench(make_slow), threading.Event()
    bench.registry.processor("concurrent", in_flight=2)(bench.ran.append)
    first, second = bench.schedule(tag, body=1), bench.schedule(tag, body=2)

    def hold_first(settlements: Sequence[Any]) -> None:
        if settlements[0].task.id == first.id:
            assert may_settle.wait(10)

    bench.claims.before_settle = hold_first
    try:
        assert bench.run(first).ran == 1
        assert bench.run(second).ran == 1
        assert bench.ran == [1, 2]
        assert bench.statuses([first]) == ["RUNNING"]
    finally:
        may_settle.set()
    wait_until(lambda: bench.statuses([first, second]) == ["DONE"] * 2, 5, "the settlements")


def test_a_process_that_ends_waits_for_its_settlements(make_slow: Make) -> None:
    bench, may_settle = busy_bench(make_slow), threading.Event()
    bench.claims.before_settle = lambda _: may_settle.wait(10)
    task = bench.schedule()
    bench.run(task)
    with ThreadPoolExecutor(1) as pool:
        finished = pool.submit(bench.runner.finish)
        assert not finished.done()
        may_settle.set()
        finished.result(5)
    assert bench.statuses([task]) == ["DONE"]


def test_a_recovered_row_waits_for_the_settlement_since_it_may_kill_the_process(
    make_slow: Make,
) -> None:
    bench, seen = busy_bench(make_slow), list[list[str]]()
    other = bench.schedule()
    bench.registry.processor("poison")(lambda _: seen.append(bench.statuses([other])))
    recovered = bench.schedule("poison")
    bench.change(recovered, lapses=1)
    bench.run(other)
    bench.run(bench.now(recovered))
    assert seen == [["DONE"]]


def test_a_chunk_whose_tag_has_a_waitlist_is_settled_before_it_reports(make_slow: Make) -> None:
    bench, threads = busy_bench(make_slow), list[threading.Thread]()
    bench.store.policies.set("tag", "limited", {"concurrency": 1}, "a test")
    bench.registry.processor("limited")(bench.ran.append)
    bench.claims.before_settle = lambda _: threads.append(threading.current_thread())
    tasks = [bench.schedule("limited"), bench.schedule("limited")]
    bench.run(*tasks)
    assert set(threads) == {threading.current_thread()}
    assert bench.statuses(tasks) == ["DONE"] * 2


@pytest.mark.parametrize("options", [{"may_detach": False}, {"has_others": lambda: False}])
def test_otherwise_a_chunk_is_settled_when_it_reports(
    make_slow: Make, options: dict[str, Any]
) -> None:
    bench = make_slow()
    default = {"may_detach": True, "has_others": lambda: True}
    bench.runner = bench.make_runner(**{**default, **options})
    task = bench.schedule()
    bench.run(task)
    assert bench.statuses([task]) == ["DONE"]


def test_at_most_one_chunk_is_settled_later(make_slow: Make) -> None:
    bench, may_settle = busy_bench(make_slow), threading.Event()
    tasks = [bench.schedule(body=number) for number in range(4)]

    def hold_first(settlements: Sequence[Any]) -> None:
        if settlements[0].task.id == tasks[0].id:
            assert may_settle.wait(10)

    bench.claims.before_settle = hold_first
    try:
        for task in tasks:
            bench.run(task)
        assert bench.statuses(tasks[1:]) == ["DONE"] * 3
        assert bench.statuses(tasks[:1]) == ["RUNNING"]
    finally:
        may_settle.set()
    wait_until(lambda: bench.statuses(tasks) == ["DONE"] * 4, 5, "the first settlement")


def test_a_chunk_of_quick_rows_is_settled_before_it_reports(
    make_slow: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SLOW_ROW_S", 10.0)
    bench, threads = busy_bench(make_slow), list[threading.Thread]()
    bench.claims.before_settle = lambda _: threads.append(threading.current_thread())
    bench.run(bench.schedule())
    assert threads == [threading.current_thread()]
