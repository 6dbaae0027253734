"""Forecasts count what is due in each hour, and say whether the processes suffice."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from delaytasks import DelayTasks, NewTask, Status, forecast
from delaytasks.core.clock import UTC
from delaytasks.core.run_counts import RunCounts
from delaytasks.forecast import Forecast, TagForecast
from delaytasks.runtime import runtime_of
from delaytasks.statistics.statistics_table import StatisticsTable, Unwritten
from delaytasks.storage.store import Store
from tests.conformance.bulk_tasks import put
from tests.recording import delays_on, set_columns
from tests.refusals import invalid

HOUR_S, DAY_S = 3600.0, 86_400.0
EVEN, PEAK = 6000, 3000


def of_tag(found: Forecast, tag: str) -> TagForecast:
    [one] = [each for each in found.tags if each.tag == tag]
    return one


def dues(found: Forecast) -> dict[str, int]:
    return {tag.tag: tag.due for tag in found.tags}


def report_worker(
    delays: DelayTasks, name: str, queues: Sequence[str], concurrency: int = 2
) -> None:
    runtime_of(delays).store.workers.report(name, queues, "prefork", concurrency, 0)


def put_peak(delays: DelayTasks, tag: str, tasks: int, **options: Any) -> datetime:
    """Schedule tasks that are due together, in about two hours, and return this instant."""
    at = runtime_of(delays).clock.certain_now().replace(minute=30, second=0, microsecond=0)
    at += timedelta(hours=2)
    delays.schedule_many(NewTask(tag, n, at=at, **options) for n in range(tasks))
    return at


def measure(store: Store, tag: str, runs: int, duration_s: float, age: timedelta) -> None:
    """Store statistics as a worker writes them."""
    counts, at = RunCounts(), store.tasks.now() - age
    for _ in range(runs):
        counts.add_run(0.0, duration_s, None)
    unwritten = Unwritten()
    unwritten.add_run(int(at.timestamp()) // 60, tag, counts)
    table = StatisticsTable(store.database, store.schema)
    store.database.transaction(lambda c: table.add(c, unwritten, at))


# -- what is due ----------------------------------------------------------------------------------


def test_tasks_are_counted_by_hour_and_tag(delays: DelayTasks, store: Store) -> None:
    at = put_peak(delays, "mail", 30)
    put_peak(delays, "report", 5)
    delays.schedule_delay("report", {}, 3 * DAY_S)
    delays.schedule_delay("report", {}, 8 * DAY_S)
    found = delays.forecast()
    assert not found.is_estimate
    assert dues(found) == {"mail": 30, "report": 6}
    first, second = found.hours
    assert (first.due, first.due_by_tag) == (35, {"mail": 30, "report": 5})
    assert (second.due, second.due_by_tag) == (1, {"report": 1})
    assert first.start == at.replace(minute=0)
    assert dues(delays.forecast(days=1)) == {"mail": 30, "report": 5}
    json.dumps(found.as_json())


def test_an_empty_forecast_has_no_hours(delays: DelayTasks, store: Store) -> None:
    found = delays.forecast()
    assert (found.due, found.hours, found.tags) == (0, (), ())
    assert found.peak is found.first_full is None


def test_overdue_tasks_are_due_now_and_others_are_left_out(
    delays: DelayTasks, store: Store
) -> None:
    old = store.tasks.now() - timedelta(days=30)
    put(store, delays.get(delays.schedule_delay("overdue", {}, 60)), expected_time=old)
    for status in (Status.DONE, Status.FAILED, Status.CANCELLED, Status.RUNNING):
        task = delays.get(delays.schedule_delay("other", {}, 60))
        lease_until = store.tasks.now() + timedelta(hours=1)
        put(store, task, status=int(status), lease_until=lease_until, worker="w")
    found = delays.forecast()
    assert dues(found) == {"overdue": 1}
    assert found.hours[0].start <= found.made_at < found.hours[0].start + timedelta(hours=1)


def test_all_queues_and_priorities_are_counted(delays: DelayTasks, store: Store) -> None:
    for queue in ("default", "mail", "slow"):
        for priority in (0, 5, 9):
            delays.schedule_delay("tag", {}, HOUR_S, queue=queue, priority=priority)
    assert delays.forecast().due == 9


def test_paused_tasks_are_counted_and_keep_no_process_busy(
    delays: DelayTasks, store: Store
) -> None:
    put_peak(delays, "mail", 10)
    put_peak(delays, "report", 10, queue="slow")
    put_peak(delays, "other", 10)
    put(store, delays.find(tag="mail").tasks[0], status=int(Status.HELD))
    delays.policies.pause(tag="mail")
    delays.policies.pause(queue="slow")
    found = delays.forecast(processes=1)
    assert (found.due, found.paused) == (30, 20)
    assert found.hours[0].busy_s == pytest.approx(10 * forecast.ASSUMED_DURATION_S)


# -- very many rows -------------------------------------------------------------------------------


@pytest.fixture
def many(delays: DelayTasks, store: Store, monkeypatch: pytest.MonkeyPatch) -> DelayTasks:
    """Tasks that are due at any time of three days, and a peak, on a database with estimates."""
    if not store.database.can.estimates:
        pytest.skip("this database counts all rows")
    monkeypatch.setattr(forecast, "MAX_EXACT", 100)
    monkeypatch.setattr(forecast, "SAMPLED", 4000)
    delays.schedule_many(NewTask("even", n, 3600 + n * 43.2) for n in range(EVEN))
    at = runtime_of(delays).clock.certain_now().replace(microsecond=0) + timedelta(hours=30)
    delays.schedule_many(NewTask("peak", n, at=at) for n in range(PEAK))
    with store.database.auto.connect() as connection:
        word = "ANALYZE" if store.database.can.block_samples else "ANALYZE TABLE"
        connection.exec_driver_sql(f"{word} {store.schema.tasks.name}").close()
    return delays


def test_very_many_tasks_are_estimated(many: DelayTasks) -> None:
    found = many.forecast()
    assert found.is_estimate
    assert dues(found) == pytest.approx({"even": EVEN, "peak": PEAK}, rel=0.35)
    assert found.peak is not None
    assert next(iter(found.peak.due_by_tag)) == "peak"
    assert [hour.start for hour in found.hours if "peak" in hour.due_by_tag] == [found.peak.start]


def test_an_old_estimate_of_the_planner_does_not_lead_to_counting_all(
    many: DelayTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner believes that few rows wait, and counting gives up after `MAX_EXACT`."""
    monkeypatch.setattr(forecast, "estimate_rows", lambda *_: 150)
    assert many.forecast().is_estimate


# -- processes ------------------------------------------------------------------------------------


def test_an_hour_that_needs_more_time_than_the_processes_have_is_named(
    delays: DelayTasks, store: Store
) -> None:
    measure(store, "mail", 30, 9.0, timedelta(hours=1))
    report_worker(delays, "a", ["default"], 2)
    report_worker(delays, "b", ["default"], 2)
    at = put_peak(delays, "mail", 4000)
    found = delays.forecast()
    full = found.first_full
    assert full is found.peak is found.hours[0]
    assert (full.busy_s, full.processes, full.queue) == (9000, 4, None)
    assert (full.utilization, full.needed_processes) == (2.5, 10)
    said = forecast.headline(found, lambda start: f"{start:%H:%M}")
    assert said == (
        f"From {at:%H}:00: 4,000 tasks of mail keep 4 processes busy for 2h30m. 10 processes would "
        "run them within the hour."
    )
    assert delays.forecast(processes=10).first_full is None


def test_a_queue_with_workers_of_its_own_is_judged_by_them(
    delays: DelayTasks, store: Store
) -> None:
    measure(store, "slow", 30, 36.0, timedelta(hours=1))
    put_peak(delays, "slow", 200, queue="slow")
    put_peak(delays, "mail", 1, queue="mail")
    put_peak(delays, "lost", 5, queue="lost")
    report_worker(delays, "a", ["slow"], 1)
    report_worker(delays, "b", ["mail"], 99)
    found = delays.forecast()
    assert found.processes == 100
    [hour] = found.hours
    assert (hour.due, hour.busy_s, hour.processes, hour.queue) == (206, 7200, 1, "slow")
    assert "1 process that serve the queue slow busy" in forecast.headline(found, str)
    assert "No worker serves the queues lost." in found.notes


def test_only_live_workers_count_and_without_any_the_processes_are_assumed(
    delays: DelayTasks, store: Store
) -> None:
    put_peak(delays, "mail", 10)
    runtime_of(delays).celery.conf.worker_concurrency = 7
    report_worker(delays, "a", ["default"], 2)
    report_worker(delays, "b", ["default"], 2)
    w = store.schema.workers
    old = store.tasks.now() - timedelta(days=30)
    set_columns(store, "workers", {"name": "b"}, seen_at=old)
    assert delays.forecast().processes == 2
    with store.database.begin() as connection:
        connection.execute(w.delete())
    found = delays.forecast()
    assert found.processes == 7
    assert any("No worker is alive" in note for note in found.notes)


# -- durations ------------------------------------------------------------------------------------


def test_the_mean_duration_is_that_of_the_last_week(delays: DelayTasks, store: Store) -> None:
    measure(store, "mail", 30, 0.1, timedelta(hours=1))
    measure(store, "mail", 10, 0.5, timedelta(days=1))
    measure(store, "old", 1000, 0.1, timedelta(days=30))
    measure(store, "few", 3, 0.1, timedelta(hours=1))
    for tag in ("mail", "old", "few"):
        put_peak(delays, tag, 1)
    found = delays.forecast()
    mail = of_tag(found, "mail")
    assert mail.is_measured
    assert mail.duration_s == pytest.approx(0.2)
    for tag in ("old", "few"):
        one = of_tag(found, tag)
        assert (one.duration_s, one.is_measured) == (forecast.ASSUMED_DURATION_S, False)
    assert any("few, old" in note for note in found.notes)


def test_tasks_that_run_together_share_a_process(delays: DelayTasks, store: Store) -> None:
    delays.processor("batch", batch=10)(lambda tasks: None)
    delays.processor("concurrent", in_flight=4)(lambda body: None)
    for tag in ("batch", "concurrent"):
        measure(store, tag, 100, 0.4, timedelta(hours=1))
        put_peak(delays, tag, 1)
    found = delays.forecast()
    assert of_tag(found, "batch").duration_s == pytest.approx(0.04)
    assert of_tag(found, "concurrent").duration_s == pytest.approx(0.1)


def test_limits_are_named_as_left_out(delays: DelayTasks, store: Store) -> None:
    put_peak(delays, "limited", 1)
    delays.policies.set(tag="limited", concurrency_per_key=1)
    assert "The limits of tags are left out: limited." in delays.forecast().notes


@pytest.mark.quick
def test_a_database_without_tables_of_statistics_has_forecasts(tmp_path: Path) -> None:
    delays = delays_on(f"sqlite:///{tmp_path / 'a.sqlite3'}")
    store = runtime_of(delays).store
    with store.database.begin() as connection:
        store.schema.metadata.create_all(connection)
        store.schema.statistics.drop(connection)
    put_peak(delays, "mail", 1)
    assert not of_tag(delays.forecast(), "mail").is_measured
    delays.close()


# -- recurring schedules --------------------------------------------------------------------------


def test_occurrences_without_tasks_are_counted(delays: DelayTasks, store: Store) -> None:
    for name in "abc":
        delays.recurring.set(name, "report", cron="0 9 * * *", tz="UTC")
    delays.recurring.set("hourly", "sync", every="1h", queue="slow")
    delays.recurring.set("paused", "never", every="1h")
    delays.recurring.pause("paused")
    found = delays.forecast()
    assert dues(found) == {"report": 21, "sync": 168}
    assert not found.is_estimate
    nines = [hour for hour in found.hours if "report" in hour.due_by_tag]
    assert {hour.start.hour for hour in nines} == {9}


def test_an_occurrence_that_has_a_task_is_counted_once(delays: DelayTasks, store: Store) -> None:
    start = store.tasks.now().replace(microsecond=0) + timedelta(seconds=20)
    delays.recurring.set("hourly", "sync", every="1h", start=start)
    runtime_of(delays).sweeper.sweep(0)
    assert len(delays.find(tag="sync").tasks) == 1
    assert dues(delays.forecast(1)) == {"sync": 24}


def test_schedules_with_very_many_occurrences_are_estimated(
    delays: DelayTasks, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecast, "MAX_OCCURRENCES", 100)
    delays.recurring.set("often", "sync", every="10s")
    found = delays.forecast(1)
    assert found.is_estimate
    assert found.due == pytest.approx(8640, rel=0.01)
    assert all(hour.due == pytest.approx(360, abs=2) for hour in found.hours[1:-1])


def test_missed_occurrences_are_due_now_and_a_broken_timing_stops_no_forecast(
    delays: DelayTasks, store: Store
) -> None:
    delays.recurring.set("hourly", "sync", every="1h", start=datetime(2020, 1, 1, tzinfo=UTC))
    delays.recurring.set("broken", "report", cron="0 9 * * *", tz="UTC")
    r = store.schema.recurring
    with store.database.begin() as connection:
        connection.execute(r.update().values(next_at=store.tasks.now() - timedelta(hours=3)))
        connection.execute(r.update().where(r.c.name == "broken").values(timing="nonsense"))
    assert dues(delays.forecast(1)) == {"sync": 25}


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


# -- calls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"days": 0},
        {"days": "7"},
        {"days": float("nan")},
        {"days": 10_000},
        {"processes": 0},
        {"processes": True},
        {"processes": 2.5},
    ],
)
def test_wrong_arguments_are_refused(
    delays: DelayTasks, store: Store, options: dict[str, Any]
) -> None:
    with invalid(next(iter(options))):
        delays.forecast(**options)
