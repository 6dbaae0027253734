"""Forecasts count what is due in each hour, and say whether the processes suffice."""

from __future__ import annotations

import json
import os
from collections import Counter
from datetime import datetime, timedelta
from typing import Any

from delaytasks import Forecast, NewTask, Status
from tests.world import MonkeyPatch, World
from tests.world.run_counts import Counts

HOUR, DAY = timedelta(hours=1), timedelta(days=1)


def dues(found: Forecast) -> dict[str, int]:
    return dict(sum((Counter(hour.due_by_tag) for hour in found.hours), Counter[str]()))


def put_peak(world: World, tag: str, tasks: int, **options: Any) -> datetime:
    """Schedule tasks that are due together, in about two hours, and return this instant."""
    at = world.now().replace(minute=30, second=0, microsecond=0) + 2 * HOUR
    world.delays.schedule_many(NewTask(tag, n, at=at, **options) for n in range(tasks))
    return at


def measure(world: World, *runs: tuple[str, int, float, timedelta]) -> None:
    """Store the statistics of runs of a tag: their number, duration and age."""
    counts = Counts(world)
    for tag, number, duration_s, ago in runs:
        counts.add_runs(world.now() - ago, tag, *[0.0] * number, duration_s=duration_s)
    counts.write()


# -- what is due ----------------------------------------------------------------------------------


def test_tasks_are_counted_by_hour_and_tag(world: World) -> None:
    empty = world.delays.forecast()
    assert (empty.due, empty.hours, empty.peak, empty.first_full) == (0, (), None, None)
    for status in set(Status) - {Status.NOT_COMPLETE, Status.HELD}:
        world.put(status, due_s=60)
    at = put_peak(world, "mail", 30)
    put_peak(world, "report", 5)
    for days in (3, 8):
        world.delays.schedule_delay("report", {}, days * DAY)
    found = world.delays.forecast()
    assert not found.is_cut
    assert dues(found) == {"mail": 30, "report": 6}
    first, second = found.hours
    assert (first.due, first.due_by_tag) == (35, {"mail": 30, "report": 5})
    assert (second.due, second.due_by_tag) == (1, {"report": 1})
    assert first.start == at.replace(minute=0)
    json.dumps(found.as_json())
    world.put(due_s=-30 * 86_400, tag="overdue")
    now = world.delays.forecast(days=1).hours[0]
    assert (now.start, now.due_by_tag) == (at.replace(minute=0) - 2 * HOUR, {"overdue": 1})
    world.lower(tasks_counted=20)
    found = world.delays.forecast()
    assert (found.due, found.is_cut) == (20, True)


# -- processes ------------------------------------------------------------------------------------


def test_an_hour_that_needs_more_time_than_the_live_processes_have_is_named(
    world: World, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    measure(world, ("mail", 30, 9.0, HOUR))
    for name in "abc":
        world.serve(name, "default")
    world.silence(2_600_000, "c")
    put_peak(world, "mail", 4000)
    found = world.delays.forecast()
    full = found.first_full
    assert full is found.peak is found.hours[0]
    assert (full.busy_s, full.processes) == (9000, 4)
    assert (full.utilization, full.needed_processes) == (2.5, 10)
    assert world.delays.forecast(processes=10).first_full is None
    world.delete("workers")
    assert world.delays.forecast().processes == 7


# -- durations ------------------------------------------------------------------------------------


def test_durations_are_means_of_the_last_days_that_tasks_in_one_process_share(world: World) -> None:
    world.delays.processor("batch", batch=10)(lambda tasks: None)
    world.delays.processor("concurrent", in_flight=4)(lambda body: None)
    runs = [("mail", 30, 0.1, HOUR), ("mail", 10, 0.5, DAY), ("old", 1000, 0.1, 30 * DAY)]
    runs += [("few", 3, 0.1, HOUR), ("batch", 100, 0.4, HOUR), ("concurrent", 100, 0.4, HOUR)]
    measure(world, *runs)
    expected = {"mail": 0.2, "batch": 0.04, "concurrent": 0.1, "old": 0.05, "few": 0.05}
    for tag in expected:
        put_peak(world, tag, 1)
    found = world.delays.forecast()
    assert {tag: round(each, 6) for tag, each in found.durations_s.items()} == expected
    assert any("measurements: few, old." in note for note in found.notes)


# -- recurring schedules --------------------------------------------------------------------------


def test_occurrences_are_counted_once_with_and_without_a_task(world: World) -> None:
    recurring = world.delays.recurring
    for name in "abc":
        recurring.set(name, "report", cron="0 9 * * *", tz="UTC")
    start = world.now().replace(microsecond=0) + timedelta(seconds=20)
    recurring.set("hourly", "sync", every="1h", start=start, queue="slow")
    recurring.set("paused", "never", every="1h")
    recurring.pause("paused")
    assert world.sweep()
    assert len(world.delays.find(tag="sync").tasks) == 1
    found = world.delays.forecast()
    assert dues(found) == {"report": 21, "sync": 168}
    assert not found.is_cut
    nines = [hour for hour in found.hours if "report" in hour.due_by_tag]
    assert {hour.start.hour for hour in nines} == {9}
    world.lower(occurrences_computed=100)
    assert world.delays.forecast().is_cut
