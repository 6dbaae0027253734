"""A task that cannot run here is retried after a tenth of its lateness, within limits."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from delaytasks import DelayTask, Retry, Snooze
from delaytasks.core.text import DEFER_MAX_S, DEFER_MIN_S
from tests.recording import RunnerHarness

TWO_DAYS = timedelta(days=2)


def wait_s(bench: RunnerHarness, task: DelayTask) -> float:
    """Return the time until the next attempt, in seconds."""
    return (bench.now(task).expected_time - bench.clock.now()).total_seconds()


def made_long_ago(bench: RunnerHarness, tag: str = "unknown", **options: object) -> DelayTask:
    task = bench.schedule(tag, delay=60, **options)
    assert task.create_time is not None
    bench.change(task, create_time=task.create_time - TWO_DAYS)
    return bench.now(task)


def make_due(bench: RunnerHarness, task: DelayTask, late_s: float) -> DelayTask:
    """Move the due time as a reschedule, a touch, a retry or a snooze does."""
    bench.change(task, expected_time=bench.clock.now() - timedelta(seconds=late_s))
    return bench.now(task)


@pytest.mark.parametrize(
    ("late_s", "expected_s"),
    [(1, DEFER_MIN_S), (40, DEFER_MIN_S), (600, 60), (3000, 300), (90_000, DEFER_MAX_S)],
)
def test_the_deferral_counts_from_the_due_time(
    bench: RunnerHarness, late_s: float, expected_s: float
) -> None:
    task = make_due(bench, made_long_ago(bench), late_s)
    bench.run(task)
    assert wait_s(bench, task) == pytest.approx(expected_s, abs=1)
    assert bench.now(task).due == task.due, "a deferral keeps the due time"


def test_the_next_deferral_counts_from_the_same_due_time(bench: RunnerHarness) -> None:
    task = make_due(bench, made_long_ago(bench), 600)
    bench.run(task)
    again = make_due(bench, task, 1)
    assert again.due == task.due, "the row has a due time of its own since the first deferral"
    bench.run(again)
    assert wait_s(bench, task) == pytest.approx(60, abs=2)


@pytest.mark.parametrize(
    "outcome", [lambda: Retry(after=1), lambda: Snooze(1)], ids=["retry", "snooze"]
)
def test_a_task_that_ran_before_its_processor_vanished_is_tried_again_soon(
    bench: RunnerHarness, outcome: Callable[[], object]
) -> None:
    bench.registry.processor("gone", retries="1s 1s")(lambda body: outcome())
    task = make_due(bench, made_long_ago(bench, "gone"), 1)
    bench.run(task)
    del bench.registry._processors["gone"]
    task = make_due(bench, task, 1)
    bench.run(task)
    assert wait_s(bench, task) == pytest.approx(DEFER_MIN_S, abs=1)


def test_the_deferral_for_time_limits_counts_from_the_due_time(bench: RunnerHarness) -> None:
    bench.registry.processor("limited", time_limit=10)(lambda body: None)
    bench.runner = bench.make_runner(keeps_time_limits=False)
    task = make_due(bench, made_long_ago(bench, "limited"), 1)
    bench.run(task)
    assert wait_s(bench, task) == pytest.approx(DEFER_MIN_S, abs=1)
    assert "can not keep time limits" in (bench.now(task).error or "")
