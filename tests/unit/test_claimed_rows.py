"""A runner handles claimed rows, and entries whose rows it cannot claim."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from delaytasks import Status
from delaytasks.core.clock import monotonic
from delaytasks.core.interfaces import Entry
from delaytasks.execution import runner
from tests.conformance.store_rows import RUNNING
from tests.recording import RunnerHarness
from tests.unit.conftest import Make

#: The tolerance for retry delays, which depend on the time of the measurement.
MOMENT = timedelta(seconds=0.2)


# -- tags without a processor --------------------------------------------------------------------
AGES = [(0.0, 5.0), (30.0, 5.0), (100.0, 10.0), (3600.0, 360.0), (24 * 3600.0, 600.0)]


@pytest.mark.parametrize(("age_s", "wait_s"), AGES)
def test_a_task_without_a_processor_waits_a_tenth_of_its_age_and_never_fails(
    bench: RunnerHarness, age_s: float, wait_s: float
) -> None:
    task = bench.schedule("nobody")
    since = bench.clock.now() - timedelta(seconds=age_s)
    bench.change(task, create_time=since, expected_time=since)
    before = bench.clock.now()
    bench.run(bench.now(task))
    after = bench.now(task)
    assert (after.status, after.attempts, after.version) == (Status.NOT_COMPLETE, 0, 2)
    assert "no such processor, tag=nobody (this worker knows: note)" in (after.error or "")
    ended = bench.clock.now()
    assert before - MOMENT <= after.expected_time - timedelta(seconds=wait_s) <= ended + MOMENT
    assert bench.named("task.no_processor")[0]["tag"] == "nobody"
    near = wait_s <= (bench.settings.horizon_s or 0)
    assert bench.timer.ids == ([task.id] if near else []), "armed again when it is near"


# -- rows with a lost lease ----------------------------------------------------------------------


def test_recovered_rows_get_a_share_of_the_time_of_a_backlog(
    bench: RunnerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = 0.0
    monkeypatch.setattr(runner, "monotonic", lambda: monotonic() + passed)

    def wait(seconds: float) -> None:
        nonlocal passed
        bench.ran.append(f"waits {seconds:g}")
        passed += seconds

    bench.registry.processor("wait")(wait)
    abandoned = [bench.schedule("wait", 60), bench.schedule(body="lapsed")]
    for lapses, task in enumerate(abandoned, 1):
        bench.change(task, lapses=lapses)
    for number in range(20):
        bench.schedule(body=number)

    def drain(most: int) -> list[Any]:
        bench.ran.clear()
        assert bench.runner.run_due("default", [0], most).is_full
        return bench.ran

    assert drain(2) == [0, 1], "that there are some is not known yet"
    passed += runner.RECOVERED_S
    assert drain(3) == [2, 3, "waits 60"]
    passed += 59
    assert drain(2) == [4, 5], "others have half of the time"
    passed += 2
    assert drain(1) == ["lapsed"]
    passed += runner.RECOVERED_S
    assert drain(2) == [6], "there was none"
    assert drain(2) == [7, 8]


def test_a_recovered_row_that_is_held_is_not_counted_for_the_next_chunk(
    bench: RunnerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = 0.0
    monkeypatch.setattr(runner, "monotonic", lambda: monotonic() + passed)
    bench.store.policies.set("tag", "limited", {"concurrency": 1}, "a test")
    bench.registry.processor("limited")(bench.ran.append)
    running, lapsed = bench.schedule("limited"), bench.schedule("limited")
    bench.claims.claim([bench.entry(running)])
    bench.change(lapsed, lapses=1)
    for number in range(4):
        bench.schedule(body=number)
    assert bench.runner.run_due("default", [0], 2).is_full
    passed += runner.RECOVERED_S
    assert bench.runner.run_due("default", [0], 2).is_full
    assert bench.statuses([lapsed]) == ["HELD"]
    assert not bench.runner.run_due("default", [0], 2).is_full, "one row was left"


# -- entries that the claim does not return ------------------------------------------------------


def test_an_early_entry_is_returned_with_the_due_time_of_its_row(bench: RunnerHarness) -> None:
    task = bench.schedule(delay=20)
    report = bench.runner.run([Entry.of(task)._replace(due_us=0)])
    assert report.early == (Entry.of(task),)
    assert (report.claimed, bench.ran) == (0, [])
    assert bench.events.counts["entry.dropped"] == 0


def test_an_entry_that_is_early_within_the_clock_tolerance_is_waited_for(
    bench: RunnerHarness,
) -> None:
    for _ in range(20):
        task = bench.schedule(delay=0.02)
        report = bench.run(task)
        assert (report.ran, report.early, bench.statuses([task])) == (1, (), ["DONE"])
        done = bench.now(task)
        assert done.execution_time is not None
        assert done.execution_time >= task.expected_time, "and not run early"


def test_an_entry_beyond_the_horizon_is_dropped(make: Make) -> None:
    bench = make(horizon_s=10)
    task = bench.schedule(delay=60)
    report = bench.run(task)
    assert (report.early, bench.events.counts["entry.dropped"]) == ((), 1)
    forever = make(horizon_s=None)
    task = forever.schedule(delay=86400)
    assert [entry.id for entry in forever.run(task).early] == [task.id]


def test_entries_of_rows_that_changed_are_dropped_and_counted(bench: RunnerHarness) -> None:
    cancelled, moved, running, done, held = (bench.schedule() for _ in range(5))
    good = bench.schedule(body="good")
    bench.store.tasks.cancel(cancelled.id)
    bench.store.tasks.reschedule(moved.id, bench.clock.now())
    bench.change(running, **RUNNING)
    bench.change(done, status=int(Status.DONE))
    bench.change(held, status=int(Status.HELD))
    unknown = replace(good, id=good.id + 1)
    report = bench.run(cancelled, moved, running, done, held, unknown, good)
    assert (report.ran, report.early, bench.ran) == (1, (), ["good"])
    assert bench.named("entry.dropped") == [{"count": 6}]


def test_a_stale_entry_does_not_replace_the_current_one(bench: RunnerHarness) -> None:
    task = bench.schedule(delay=20)
    entry = Entry.of(task)
    for order in ([entry, entry._replace(version=7)], [entry._replace(version=7), entry]):
        assert bench.runner.run(order).early == (entry,)


def test_the_reported_duration_of_a_chunk_is_the_time_of_its_processors(
    bench: RunnerHarness,
) -> None:
    bench.claims.after_claim = lambda: threading.Event().wait(0.2) and None
    bench.claims.before_settle = lambda settlements: threading.Event().wait(0.2) and None
    began = time.monotonic()
    report = bench.run(*[bench.schedule() for _ in range(3)])
    assert report.seconds < 0.1 < 0.4 < time.monotonic() - began
