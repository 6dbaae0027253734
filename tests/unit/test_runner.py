"""Run and settle the rows of a chunk on SQLite, within its time and its lease."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from celery.exceptions import WorkerShutdown

from delaytasks import DelayTask, Status
from delaytasks.core.errors import StoreError, StoreUnavailableError
from delaytasks.core.interfaces import Entry, Settlement
from tests.recording import RunnerHarness
from tests.unit.conftest import Make
from tests.waiting import wait_until


def test_rows_are_run_and_settled_together(bench: RunnerHarness) -> None:
    tasks = [bench.schedule(body=n) for n in range(5)]
    settled: list[int] = []
    bench.claims.before_settle = lambda settlements: settled.append(len(settlements))
    report = bench.run(*tasks)
    assert (report.claimed, report.ran, report.early) == (5, 5, ())
    assert bench.ran == [0, 1, 2, 3, 4]
    assert bench.statuses(tasks) == ["DONE"] * 5
    assert settled == [5]
    done = bench.now(tasks[0])
    assert (done.attempts, done.version, done.worker, done.ip_address) == (
        1,
        2,
        "worker-1",
        "127.0.0.1",
    )
    assert done.execution_time is not None
    assert bench.events.counts["task.succeeded"] == 5


class UnsayableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


FAILURES = [
    ValueError("as asked"),
    ValueError("\x00 \ud800"),
    UnsayableError(),
    SystemExit(3),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_a_processor_that_raises_fails_only_its_row(
    bench: RunnerHarness, error: BaseException
) -> None:
    def fail(body: Any) -> None:
        raise error

    bench.registry.processor("fail")(fail)
    tasks = [bench.schedule(), bench.schedule("fail"), bench.schedule()]
    bench.run(*tasks)
    assert bench.statuses(tasks) == ["DONE", "FAILED", "DONE"]
    text = bench.now(tasks[1]).error or ""
    assert type(error).__name__ in text
    assert "\x00" not in text
    assert [fields["id"] for fields in bench.named("task.failed")] == [tasks[1].id]


def test_an_error_text_is_bounded(make: Make) -> None:
    bench = make(max_error_bytes=2000)

    def fail(body: Any) -> None:
        raise ValueError("é" * 100_000)

    bench.registry.processor("fail")(fail)
    task = bench.schedule("fail")
    bench.run(task)
    text = bench.now(task).error or ""
    assert len(text.encode()) <= 2000
    assert "characters left out" in text


def test_a_worker_that_stops_settles_finished_rows_and_gives_back_the_rest(
    bench: RunnerHarness,
) -> None:
    def stop(body: Any) -> None:
        raise WorkerShutdown(0)

    bench.registry.processor("stop")(stop)
    tasks = [
        bench.schedule(priority=9),
        bench.schedule("stop", priority=5),
        bench.schedule(),
        bench.schedule(),
    ]
    with pytest.raises(WorkerShutdown):
        bench.run(*tasks)
    assert bench.statuses(tasks) == ["DONE", "RUNNING", "NOT_COMPLETE", "NOT_COMPLETE"]
    assert [bench.now(task).attempts for task in tasks[2:]] == [0, 0]
    assert sorted(bench.timer.ids) == sorted(task.id for task in tasks[2:])


def test_the_highest_priority_runs_first_then_the_oldest(bench: RunnerHarness) -> None:
    tasks = [bench.schedule(body=f"{priority}", priority=priority) for priority in (0, 9, 5)]
    tasks.append(bench.schedule(body="older", priority=5))
    bench.change(tasks[-1], expected_time=bench.clock.now() - timedelta(seconds=60))
    bench.run(*tasks)
    assert bench.ran == ["9", "older", "5", "0"]


# -- time limits ---------------------------------------------------------------------------------


def test_finished_rows_are_settled_before_a_row_that_may_be_killed_begins(
    bench: RunnerHarness,
) -> None:
    seen: dict[int, list[str]] = {}

    def look(body: Any, task: DelayTask) -> None:
        seen[task.id] = bench.statuses(tasks)

    bench.registry.processor("look", time_limit=60)(look)
    bench.registry.processor("soft", soft_time_limit=60)(bench.ran.append)
    settled: list[int] = []
    bench.claims.before_settle = lambda settlements: settled.append(len(settlements))
    tasks = [
        bench.schedule(),
        bench.schedule("look"),
        bench.schedule("look"),
        bench.schedule("soft"),
    ]
    assert bench.run(*tasks).ran == 4
    assert seen == {
        tasks[1].id: ["DONE", "RUNNING", "RUNNING", "DONE"],
        tasks[2].id: ["DONE", "DONE", "RUNNING", "DONE"],
    }, "those with a hard limit run last, each when all before it is settled"
    assert settled == [2, 1, 1]


def test_a_row_that_was_about_to_begin_is_given_back_after_a_failed_settlement(
    bench: RunnerHarness,
) -> None:
    bench.registry.processor("hard", time_limit=60)(bench.ran.append)
    tasks = [bench.schedule(body="first"), bench.schedule("hard", "second")]
    # The second error is for the settlement of the single row.
    failures = iter([StoreError("refused")] * 2)

    def fail(settlements: Sequence[Settlement]) -> None:
        for error in failures:
            raise error

    bench.claims.before_settle = fail
    with pytest.raises(StoreError, match="refused"):
        bench.run(*tasks)
    assert bench.ran == ["first"]
    assert bench.statuses(tasks) == ["DONE", "NOT_COMPLETE"]


@pytest.mark.parametrize("limits", [{"soft_time_limit": 60}, {"time_limit": 60}])
def test_rows_with_time_limits_are_deferred_if_the_pool_cannot_keep_them(
    bench: RunnerHarness, limits: dict[str, Any]
) -> None:
    bench.registry.processor("limited", **limits)(bench.ran.append)
    tasks = [bench.schedule("limited", "never"), bench.schedule(body="free")]
    runner = bench.make_runner(keeps_time_limits=False)
    runner.run([bench.entry(task) for task in tasks])
    assert bench.ran == ["free"]
    left = bench.now(tasks[0])
    assert (left.status, left.attempts) == (Status.NOT_COMPLETE, 0)
    assert 4 < (left.expected_time - bench.clock.now()).total_seconds() <= 5
    assert "let a worker with -P prefork serve the queue default" in (left.error or "")
    assert [fields["tag"] for fields in bench.named("task.no_time_limits")] == ["limited"]


# -- the time budget and the lease ---------------------------------------------------------------


def test_after_the_time_budget_rows_are_given_back_and_results_settled_during_a_run(
    make: Make,
) -> None:
    bench = make(chunk_time_budget_s=0.1)
    began, goes_on = threading.Event(), threading.Event()

    def wait(body: Any) -> None:
        began.set()
        assert goes_on.wait(10)

    bench.registry.processor("wait")(wait)
    done = bench.schedule(priority=9)
    slow = bench.schedule("wait", priority=5)
    rest = [bench.schedule(body=n) for n in range(3)]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(bench.run, done, slow, *rest)
        try:
            assert began.wait(5)
            assert bench.statuses(rest) == ["RUNNING"] * 3, "all are ours within the box"
            wait_until(
                lambda: bench.statuses(rest) == ["NOT_COMPLETE"] * 3, 5, "the rest to be given back"
            )
            assert bench.statuses([done, slow]) == ["DONE", "RUNNING"]
            assert not running.done()
        finally:
            goes_on.set()
        assert running.result(5).ran == 2
    assert bench.statuses([slow]) == ["DONE"]
    assert [bench.now(task).attempts for task in rest] == [0, 0, 0], (
        "what did not start was no attempt"
    )
    assert sorted(bench.timer.armed) == sorted(Entry.of(bench.now(task)) for task in rest)
    assert bench.events.counts["chunk.gave_back"] == 3
    assert bench.events.counts["task.lease_lost"] == 0
    assert bench.ran == [None]
    assert bench.run(*(bench.now(task) for task in rest)).ran == 3, "and they run elsewhere"


def test_no_row_is_started_if_its_lease_may_be_over(make: Make) -> None:
    bench = make(lease_s=0.2, chunk_time_budget_s=0.05)
    tasks = [bench.schedule() for _ in range(3)]
    # The answer to the claim took longer than the lease.
    bench.claims.after_claim = lambda: threading.Event().wait(0.3) and None
    report = bench.run(*tasks)
    assert (report.ran, bench.ran) == (0, [])
    assert bench.statuses(tasks) == ["NOT_COMPLETE"] * 3


def test_a_settlement_is_tried_again_while_the_database_is_unavailable(
    bench: RunnerHarness,
) -> None:
    failures = [StoreUnavailableError("away"), StoreUnavailableError("away")]

    def fail(settlements: Sequence[Settlement]) -> None:
        if failures:
            raise failures.pop()

    bench.claims.before_settle = fail
    task = bench.schedule()
    bench.run(task)
    assert bench.statuses([task]) == ["DONE"]
    assert bench.events.counts["settle.waits"] == 2


def test_a_row_that_cannot_be_settled_does_not_affect_other_rows(bench: RunnerHarness) -> None:
    tasks = [bench.schedule() for _ in range(3)]

    def refuse(settlements: Sequence[Settlement]) -> None:
        if tasks[1].id in [settlement.task.id for settlement in settlements]:
            raise StoreError("refused")

    bench.claims.before_settle = refuse
    with pytest.raises(StoreError):
        bench.run(*tasks)
    assert bench.statuses(tasks) == ["DONE", "RUNNING", "DONE"]
    assert len(bench.ran) == 3
    assert (bench.events.counts["task.succeeded"], bench.events.counts["task.lease_lost"]) == (2, 0)
