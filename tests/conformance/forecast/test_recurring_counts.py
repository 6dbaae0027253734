"""Forecasts include the occurrences of recurring schedules that have no tasks yet."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime, timedelta

import pytest

from delaytasks import DelayTasks
from delaytasks.core.clock import UTC
from delaytasks.forecast import recurring_counts
from delaytasks.runtime import runtime_of
from delaytasks.storage.store import Store


def dues(delays: DelayTasks, days: float = 7) -> dict[str, int]:
    return {tag.tag: tag.due for tag in delays.forecast(days).tags}


def test_occurrences_without_tasks_are_counted(delays: DelayTasks, store: Store) -> None:
    delays.recurring.set("daily", "report", cron="0 9 * * *", tz="UTC")
    delays.recurring.set("hourly", "sync", every="1h", queue="slow")
    forecast = delays.forecast()
    assert dues(delays) == {"report": 7, "sync": 168}
    assert not forecast.is_estimate
    nines = [step.start for step in forecast.steps if "report" in step.due_by_tag]
    assert {at.hour for at in nines} == {9}
    assert {pool.queues for pool in forecast.pools} == {("default", "slow")}


def test_an_occurrence_that_has_a_task_is_counted_once(delays: DelayTasks, store: Store) -> None:
    start = store.tasks.now().replace(microsecond=0) + timedelta(seconds=20)
    delays.recurring.set("hourly", "sync", every="1h", start=start)
    runtime_of(delays).sweeper.sweep(0)
    assert len(delays.find(tag="sync").tasks) == 1
    assert dues(delays, 1) == {"sync": 24}


def test_paused_and_ended_schedules_are_left_out(delays: DelayTasks, store: Store) -> None:
    delays.recurring.set("daily", "report", cron="0 9 * * *", tz="UTC")
    delays.recurring.pause("daily")
    assert dues(delays) == {}


def test_schedules_of_thousands_of_tenants_are_counted_together(
    delays: DelayTasks, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurring_counts, "SCHEDULES_PAGE", 4)
    for n in range(11):
        delays.recurring.set(f"daily-{n}", "report", n, cron="0 9 * * *", tz="UTC")
    forecast = delays.forecast(1, rate=1, workers=1, processes=1)
    assert [(step.due, step.late_s) for step in forecast.steps if step.due] == [(11, 10)]


def test_jitter_spreads_the_tasks(delays: DelayTasks, store: Store) -> None:
    for n in range(60):
        delays.recurring.set(f"daily-{n}", "report", n, cron="0 9 * * *", tz="UTC", jitter="10m")
    forecast = delays.forecast(1, rate=1, workers=1, processes=1)
    assert forecast.due == 60
    assert forecast.late_s is not None
    assert forecast.late_s < 5


def test_a_schedule_with_very_many_occurrences_is_estimated(
    delays: DelayTasks, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurring_counts, "MAX_OCCURRENCES", 100)
    delays.recurring.set("often", "sync", every="10s")
    forecast = delays.forecast(1)
    assert forecast.is_estimate
    assert forecast.due == pytest.approx(8640, rel=0.01)
    assert forecast.late_s is not None
    assert forecast.late_s < 1


def test_a_timing_that_cannot_be_read_stops_no_forecast(delays: DelayTasks, store: Store) -> None:
    delays.recurring.set("daily", "report", cron="0 9 * * *", tz="UTC")
    delays.recurring.set("broken", "sync", cron="0 9 * * *", tz="UTC")
    r = store.schema.recurring
    with store.database.begin() as connection:
        connection.execute(r.update().where(r.c.name == "broken").values(timing="nonsense"))
    assert dues(delays)["report"] == 7


def test_a_missed_occurrence_counts_as_due_now(delays: DelayTasks, store: Store) -> None:
    delays.recurring.set("hourly", "sync", every="1h", start=datetime(2020, 1, 1, tzinfo=UTC))
    r = store.schema.recurring
    with store.database.begin() as connection:
        connection.execute(r.update().values(next_at=store.tasks.now() - timedelta(hours=3)))
    assert dues(delays, 1) == {"sync": 25}


def test_a_forecast_without_schedules_imports_nothing_of_them(
    store: Store, database_url: str
) -> None:
    code = (
        "import sys; from celery import Celery; from delaytasks import DelayTasks;"
        f"d = DelayTasks(Celery('a'), database_url={database_url!r}, table_prefix='s_');"
        "assert 'delaytasks.forecast' not in sys.modules; d.forecast();"
        "print([m for m in sys.modules if m.startswith('delaytasks.recurrence')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
