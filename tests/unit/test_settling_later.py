"""If other tasks wait, a chunk of entries is settled while the process takes its next chunk."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from delaytasks.execution import runner
from tests.recording import RunnerHarness
from tests.unit.conftest import Make
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def all_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have chunks of empty processors settled later, too."""
    monkeypatch.setattr(runner, "SLOW_ROW_S", 0.0)


def busy_bench(make: Make, **changes: Any) -> RunnerHarness:
    """Return a harness whose main process has tasks for this process."""
    bench = make(**changes)
    bench.runner = bench.make_runner(may_detach=True, has_others=lambda: True)
    return bench


def test_a_chunk_reports_before_it_is_settled_and_the_next_one_runs_meanwhile(make: Make) -> None:
    bench, may_settle = busy_bench(make), threading.Event()
    first, second = bench.schedule(body=1), bench.schedule(body=2)

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


def test_a_process_that_ends_waits_for_its_settlements(make: Make) -> None:
    bench, may_settle = busy_bench(make), threading.Event()
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
    make: Make,
) -> None:
    bench, seen = busy_bench(make), list[list[str]]()
    other = bench.schedule()
    bench.registry.processor("poison")(lambda _: seen.append(bench.statuses([other])))
    recovered = bench.schedule("poison")
    bench.change(recovered, lapses=1)
    bench.run(other)
    bench.run(bench.now(recovered))
    assert seen == [["DONE"]]


def test_a_chunk_whose_tag_has_a_waitlist_is_settled_before_it_reports(make: Make) -> None:
    bench, threads = busy_bench(make), list[threading.Thread]()
    bench.store.policies.set("tag", "limited", {"concurrency": 1}, "a test")
    bench.registry.processor("limited")(bench.ran.append)
    bench.claims.before_settle = lambda _: threads.append(threading.current_thread())
    tasks = [bench.schedule("limited"), bench.schedule("limited")]
    bench.run(*tasks)
    assert set(threads) == {threading.current_thread()}
    assert bench.statuses(tasks) == ["DONE"] * 2


@pytest.mark.parametrize("options", [{"may_detach": False}, {"has_others": lambda: False}])
def test_otherwise_a_chunk_is_settled_when_it_reports(make: Make, options: dict[str, Any]) -> None:
    bench = make()
    default = {"may_detach": True, "has_others": lambda: True}
    bench.runner = bench.make_runner(**{**default, **options})
    task = bench.schedule()
    bench.run(task)
    assert bench.statuses([task]) == ["DONE"]


def test_at_most_one_chunk_is_settled_later(make: Make) -> None:
    bench, may_settle = busy_bench(make), threading.Event()
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


def test_a_chunk_of_concurrent_rows_is_settled_while_the_next_one_runs(make: Make) -> None:
    bench, may_settle = busy_bench(make), threading.Event()
    bench.registry.processor("wait", in_flight=2)(bench.ran.append)
    first, second = bench.schedule("wait", 1), bench.schedule("wait", 2)

    def hold_first(settlements: Sequence[Any]) -> None:
        if settlements[0].task.id == first.id:
            assert may_settle.wait(10)

    bench.claims.before_settle = hold_first
    try:
        bench.run(first)
        bench.run(second)
        assert bench.ran == [1, 2]
        assert bench.statuses([first]) == ["RUNNING"]
    finally:
        may_settle.set()
    wait_until(lambda: bench.statuses([first, second]) == ["DONE"] * 2, 5, "the settlements")


def test_a_chunk_of_quick_rows_is_settled_before_it_reports(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SLOW_ROW_S", 10.0)
    bench, threads = busy_bench(make), list[threading.Thread]()
    bench.claims.before_settle = lambda _: threads.append(threading.current_thread())
    bench.run(bench.schedule())
    assert threads == [threading.current_thread()]
