"""Forecasts count what is due in each hour, and say whether the processes suffice."""

from __future__ import annotations

import json
import os
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import text

from delaytasks import Forecast, NewTask, Status
from tests.refusals import invalid
from tests.world import MonkeyPatch, World

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
EVEN, PEAK = 6000, 3000
#: The duration of a task of which nothing is known.
ASSUMED_S = 0.05


def of_tag(found: Forecast, tag: str) -> Any:
    [one] = [each for each in found.tags if each.tag == tag]
    return one


def dues(found: Forecast) -> dict[str, int]:
    return {tag.tag: tag.due for tag in found.tags}


def put_peak(world: World, tag: str, tasks: int, **options: Any) -> datetime:
    """Schedule tasks that are due together, in about two hours, and return this instant."""
    at = world.now().replace(minute=30, second=0, microsecond=0) + 2 * HOUR
    world.delays.schedule_many(NewTask(tag, n, at=at, **options) for n in range(tasks))
    return at


# -- what is due ----------------------------------------------------------------------------------


def test_tasks_are_counted_by_hour_and_tag(world: World) -> None:
    at = put_peak(world, "mail", 30)
    put_peak(world, "report", 5)
    for days in (3, 8):
        world.delays.schedule_delay("report", {}, days * DAY)
    found = world.delays.forecast()
    assert not found.is_estimate
    assert dues(found) == {"mail": 30, "report": 6}
    first, second = found.hours
    assert (first.due, first.due_by_tag) == (35, {"mail": 30, "report": 5})
    assert (second.due, second.due_by_tag) == (1, {"report": 1})
    assert first.start == at.replace(minute=0)
    assert dues(world.delays.forecast(days=1)) == {"mail": 30, "report": 5}
    json.dumps(found.as_json())


def test_an_empty_forecast_has_no_hours(world: World) -> None:
    found = world.delays.forecast()
    assert (found.due, found.hours, found.tags) == (0, (), ())
    assert found.peak is found.first_full is None


def test_overdue_tasks_are_due_now_and_others_are_left_out(world: World) -> None:
    world.put(due_s=-30 * 86_400, tag="overdue")
    for status in (Status.DONE, Status.FAILED, Status.CANCELLED, Status.RUNNING):
        world.put(status, due_s=60)
    found = world.delays.forecast()
    assert dues(found) == {"overdue": 1}
    assert found.hours[0].start <= found.made_at < found.hours[0].start + HOUR


# -- very many rows -------------------------------------------------------------------------------


def test_very_many_tasks_are_estimated(world: World) -> None:
    """They are due at any time of three days, and together at one time."""
    if not world.can.block_samples:
        return  # this database counts all rows
    world.lower(tasks_counted_exactly=100, tasks_sampled=4000)
    world.delays.schedule_many(NewTask("even", n, 3600 + n * 43.2) for n in range(EVEN))
    at = world.now().replace(microsecond=0) + 30 * HOUR
    world.delays.schedule_many(NewTask("peak", n, at=at) for n in range(PEAK))
    with world.begin() as connection:
        connection.execute(text(f"ANALYZE {world.table().name}"))
    found = world.delays.forecast()
    assert found.is_estimate
    assert dues(found) == pytest.approx({"even": EVEN, "peak": PEAK}, rel=0.35)
    assert found.peak is not None
    assert next(iter(found.peak.due_by_tag)) == "peak"
    assert [hour.start for hour in found.hours if "peak" in hour.due_by_tag] == [found.peak.start]


def test_the_tasks_of_a_day_are_counted_up_to_a_limit(world: World) -> None:
    world.lower(tasks_counted=20)
    for days in (0.5, 2.5, 2.6):
        world.delays.schedule_many(NewTask("mail", n, days * 86_400) for n in range(15))
    found = world.delays.forecast()
    assert (found.due, found.is_estimate) == (35, True)
    assert not world.delays.forecast(1).is_estimate


# -- processes ------------------------------------------------------------------------------------


def test_an_hour_that_needs_more_time_than_the_processes_have_is_named(world: World) -> None:
    world.measure("mail", 30, 9.0, HOUR)
    world.serve("a", "default")
    world.serve("b", "default")
    at = put_peak(world, "mail", 4000)
    found = world.delays.forecast()
    full = found.first_full
    assert full is found.peak is found.hours[0]
    assert (full.busy_s, full.processes) == (9000, 4)
    assert (full.utilization, full.needed_processes) == (2.5, 10)
    assert world.headline(found) == (
        f"From {at:%H}:00: 4,000 tasks of mail keep 4 processes busy for 2h30m. 10 processes would "
        "run them within the hour."
    )
    assert world.delays.forecast(processes=10).first_full is None


def test_only_live_workers_or_assumed_ones_count(world: World, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    put_peak(world, "mail", 10)
    world.serve("a", "default")
    world.serve("b", "default")
    world.silence(2_600_000, "b")
    assert world.delays.forecast().processes == 2
    world.delete("workers")
    found = world.delays.forecast()
    assert found.processes == 7
    assert any("No worker is alive" in note for note in found.notes)


# -- durations ------------------------------------------------------------------------------------


def test_the_mean_duration_is_that_of_the_last_days(world: World) -> None:
    world.measure("mail", 30, 0.1, HOUR)
    world.measure("mail", 10, 0.5, DAY)
    world.measure("old", 1000, 0.1, 30 * DAY)
    world.measure("few", 3, 0.1, HOUR)
    for tag in ("mail", "old", "few"):
        put_peak(world, tag, 1)
    found = world.delays.forecast()
    mail = of_tag(found, "mail")
    assert mail.is_measured
    assert mail.duration_s == pytest.approx(0.2)
    for tag in ("old", "few"):
        one = of_tag(found, tag)
        assert (one.duration_s, one.is_measured) == (ASSUMED_S, False)
    assert any("few, old" in note for note in found.notes)


def test_tasks_that_run_together_share_a_process(world: World) -> None:
    world.delays.processor("batch", batch=10)(lambda tasks: None)
    world.delays.processor("concurrent", in_flight=4)(lambda body: None)
    for tag in ("batch", "concurrent"):
        world.measure(tag, 100, 0.4, HOUR)
        put_peak(world, tag, 1)
    found = world.delays.forecast()
    assert of_tag(found, "batch").duration_s == pytest.approx(0.04)
    assert of_tag(found, "concurrent").duration_s == pytest.approx(0.1)


# -- recurring schedules --------------------------------------------------------------------------


def test_occurrences_without_tasks_are_counted(world: World) -> None:
    recurring = world.delays.recurring
    for name in "abc":
        recurring.set(name, "report", cron="0 9 * * *", tz="UTC")
    recurring.set("hourly", "sync", every="1h", queue="slow")
    recurring.set("paused", "never", every="1h")
    recurring.pause("paused")
    found = world.delays.forecast()
    assert dues(found) == {"report": 21, "sync": 168}
    assert not found.is_estimate
    nines = [hour for hour in found.hours if "report" in hour.due_by_tag]
    assert {hour.start.hour for hour in nines} == {9}


def test_an_occurrence_that_has_a_task_is_counted_once(world: World) -> None:
    start = world.now().replace(microsecond=0) + timedelta(seconds=20)
    world.delays.recurring.set("hourly", "sync", every="1h", start=start)
    assert world.sweep()
    assert len(world.delays.find(tag="sync").tasks) == 1
    assert dues(world.delays.forecast(1)) == {"sync": 24}


def test_schedules_with_very_many_occurrences_are_estimated(world: World) -> None:
    world.lower(occurrences_computed=100)
    world.delays.recurring.set("often", "sync", every="10s")
    found = world.delays.forecast(1)
    assert found.is_estimate
    assert found.due == pytest.approx(8640, rel=0.01)
    assert all(hour.due == pytest.approx(360, abs=2) for hour in found.hours[1:-1])


def test_missed_occurrences_are_due_now_and_a_broken_timing_stops_no_forecast(world: World) -> None:
    start = datetime(2020, 1, 1, tzinfo=timezone.utc)
    world.delays.recurring.set("hourly", "sync", every="1h", start=start)
    world.delays.recurring.set("broken", "report", cron="0 9 * * *", tz="UTC")
    world.set_columns("recurring", next_at=world.now() - 3 * HOUR)
    world.set_columns("recurring", {"name": "broken"}, timing="nonsense")
    assert dues(world.delays.forecast(1)) == {"sync": 25}


# -- calls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [0, True, 2.5])
@pytest.mark.parametrize("days", [0, "7", float("nan"), 10_000, 1])
def test_wrong_arguments_are_refused(world: World, days: Any, processes: Any) -> None:
    with invalid("processes" if days == 1 else "days"):
        world.delays.forecast(days, processes=processes)
