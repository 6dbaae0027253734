"""A process counts every run once, by tag and outcome, with its lateness and duration."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest

from delaytasks import Cancel, Fail, Retry, Snooze
from delaytasks.core.run_counts import LATENESS_BOUNDS_S, RunCounts, bucket_of
from delaytasks.execution.runner import Report
from delaytasks.execution.settlement import MAX_FAILURE_GROUPS
from delaytasks.storage.store import Store
from tests.recording import RunnerHarness


@pytest.fixture
def harness(store: Store) -> RunnerHarness:
    return RunnerHarness(store)


def counts_of(report: Report) -> Mapping[str, RunCounts]:
    return {tag: RunCounts.of(stored) for tag, stored in report.statistics.tags}


def outcomes_of(report: Report, tag: str) -> dict[str, int]:
    return {name: count for name, count in counts_of(report)[tag].by_outcome().items() if count}


def test_each_outcome_is_counted(harness: RunnerHarness) -> None:
    def end(body: Any) -> object:
        if body == "raise":
            raise ValueError("broken")
        outcomes = {"fail": Fail("no"), "cancel": Cancel("no"), "snooze": Snooze("1h")}
        return {**outcomes, "retry": Retry("1h")}.get(body)

    harness.registry.processor("end")(end)
    harness.registry.processor("retried", retries="1h")(end)
    bodies = ["ok", "ok", "raise", "fail", "cancel", "snooze", "retry"]
    tasks = [harness.schedule("end", body) for body in bodies]
    report = harness.run(*tasks, harness.schedule("retried", "raise"), harness.schedule())
    assert outcomes_of(report, "end") == {
        "done": 2,
        "failed": 2,
        "cancelled": 1,
        "snoozed": 1,
        "retried": 1,
    }
    assert outcomes_of(report, "retried") == {"retried": 1}
    assert outcomes_of(report, "note") == {"done": 1}
    found = counts_of(report)
    assert {tag: one.started for tag, one in found.items()} == {"end": 7, "retried": 1, "note": 1}
    assert all(sum(one.duration) == one.started for one in found.values())


def test_a_report_has_only_what_was_counted_since_the_last_one(harness: RunnerHarness) -> None:
    assert outcomes_of(harness.run(harness.schedule()), "note") == {"done": 1}
    assert outcomes_of(harness.run(harness.schedule()), "note") == {"done": 1}
    assert harness.run().statistics.tags == ()


def test_a_drain_counts_too(harness: RunnerHarness) -> None:
    for _ in range(5):
        harness.schedule()
    assert outcomes_of(harness.runner.run_due("default", [0], 100), "note") == {"done": 5}


def test_a_batch_counts_each_task(harness: RunnerHarness) -> None:
    harness.registry.processor("batch", batch=10)(lambda tasks: None)
    report = harness.run(*[harness.schedule("batch") for _ in range(4)])
    assert outcomes_of(report, "batch") == {"done": 4}
    assert counts_of(report)["batch"].started == 4


def test_concurrent_tasks_are_each_counted_once(harness: RunnerHarness) -> None:
    harness.registry.processor("slots", in_flight=8)(lambda body: None)
    tasks = [harness.schedule("slots") for _ in range(50)]
    report = harness.run(*tasks)
    assert outcomes_of(report, "slots") == {"done": 50}
    assert counts_of(report)["slots"].started == 50


def test_the_lateness_is_that_of_the_due_time_and_decides_about_on_time(
    harness: RunnerHarness,
) -> None:
    harness.registry.processor("prompt", on_time="5s")(lambda body: None)
    late, prompt = harness.schedule("prompt"), harness.schedule("prompt")
    harness.change(late, expected_time=late.expected_time - timedelta(seconds=100))
    counts = counts_of(harness.run(late, prompt))["prompt"]
    assert (counts.on_time, counts.late) == (1, 1)
    assert counts.lateness[bucket_of(105, LATENESS_BOUNDS_S)] == 1
    assert 100 <= counts.lateness_s < 200


def test_a_tag_without_a_promise_is_neither_on_time_nor_late(harness: RunnerHarness) -> None:
    counts = counts_of(harness.run(harness.schedule()))["note"]
    assert (counts.on_time, counts.late) == (0, 0)


def test_an_expired_task_is_late_and_has_no_run(harness: RunnerHarness) -> None:
    harness.registry.processor("brief", on_time="1s", expires="2s")(lambda body: None)
    task = harness.schedule("brief")
    harness.change(task, expected_time=task.expected_time - timedelta(seconds=100))
    report = harness.run(task)
    assert outcomes_of(report, "brief") == {"expired": 1}
    counts = counts_of(report)["brief"]
    assert (counts.on_time, counts.late, counts.started) == (0, 1, 0)


def test_a_task_that_cannot_run_here_is_given_back_and_has_no_run(harness: RunnerHarness) -> None:
    report = harness.run(harness.schedule("unknown"))
    assert outcomes_of(report, "unknown") == {"given_back": 1}
    assert counts_of(report)["unknown"].started == 0


def test_a_settlement_that_changes_no_row_is_a_lost_lease(harness: RunnerHarness) -> None:
    task = harness.schedule()
    harness.claims.before_settle = lambda settlements: harness.change(task, version=99)
    report = harness.run(task)
    assert outcomes_of(report, "note") == {"lease_lost": 1}
    assert report.statistics.failures == ()


def test_failures_are_grouped_by_tag_and_pattern(harness: RunnerHarness) -> None:
    def fail(body: Any) -> None:
        raise KeyError(body)

    for tag in ("a", "b"):
        harness.registry.processor(tag)(fail)
    tasks = [harness.schedule(tag, body) for tag in "ab" for body in (1, 2, 3)]
    failures = harness.run(*tasks).statistics.failures
    assert {(one.tag, one.pattern, one.runs) for one in failures} == {
        (tag, "* in fail\n*KeyError: *", 3) for tag in "ab"
    }
    assert {one.task_id for one in failures} <= {task.id for task in tasks}
    assert all("KeyError" in one.error for one in failures)


def test_the_groups_of_one_report_are_bounded(harness: RunnerHarness) -> None:
    def fail(body: str) -> None:
        raise RuntimeError(body)

    harness.registry.processor("various")(fail)
    letters = [chr(ord("a") + number) * 3 for number in range(26)]
    report = harness.run(*[harness.schedule("various", letter) for letter in letters])
    assert len(report.statistics.failures) == MAX_FAILURE_GROUPS
    assert outcomes_of(report, "various") == {"failed": 26}


def test_several_threads_lose_no_count(harness: RunnerHarness) -> None:
    tasks = [harness.schedule() for _ in range(60)]
    reports: list[Report] = []
    entries = [harness.entry(task) for task in tasks]

    def run(number: int) -> None:
        for entry in entries[number::3]:
            reports.append(harness.runner.run([entry]))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = RunCounts()
    for report in reports:
        for _, stored in report.statistics.tags:
            total.add_stored(stored)
    assert (total.started, total.outcome("done")) == (60, 60)


def test_nothing_is_counted_if_the_setting_is_off(store: Store) -> None:
    harness = RunnerHarness(store, statistics=False)
    assert harness.run(harness.schedule()).statistics.tags == ()
