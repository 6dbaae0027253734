"""The speed of a tag comes from the statistics of the workers, and falls back on a given rate."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from delaytasks import DelayTasks
from delaytasks.core.run_counts import RunCounts
from delaytasks.runtime import runtime_of
from delaytasks.statistics.queries import StatisticsTable
from delaytasks.statistics.worker_counts import Unwritten
from delaytasks.storage.store import Store
from tests.conformance.forecast.test_forecasts import of_tag, put_peak
from tests.recording import delays_on


def measure(store: Store, tag: str, runs: int, duration_s: float, age: timedelta) -> None:
    """Store statistics as a worker writes them."""
    counts, at = RunCounts(), store.tasks.now() - age
    for _ in range(runs):
        counts.add_run(0.0, duration_s, None)
    unwritten = Unwritten()
    unwritten.add_run(int(at.timestamp()) // 60, tag, counts)
    table = StatisticsTable(store.database, store.schema)
    store.database.transaction(lambda c: table.add(c, unwritten, at))


def test_measured_durations_are_used_and_named(delays: DelayTasks, store: Store) -> None:
    measure(store, "mail", 30, 0.1, timedelta(hours=1))
    measure(store, "mail", 10, 0.5, timedelta(days=2))
    put_peak(delays, "mail", 100)
    mail = of_tag(delays.forecast(rate=999, workers=1, processes=1), "mail")
    assert mail.rate_source == "measured"
    # The mean duration is 0.2 s, and a chunk of one row costs 8 ms more.
    assert mail.rate == pytest.approx(1 / 0.208)
    assert mail.late_s == pytest.approx(99 * 0.208, rel=0.01)


@pytest.mark.quick
def test_a_database_without_tables_of_statistics_has_forecasts(tmp_path: Path) -> None:
    delays = delays_on(f"sqlite:///{tmp_path / 'a.sqlite3'}")
    schema = runtime_of(delays).store.schema
    with runtime_of(delays).store.database.begin() as connection:
        schema.metadata.create_all(connection)
        schema.statistics.drop(connection)
    put_peak(delays, "mail", 1)
    assert of_tag(delays.forecast(rate=10), "mail").rate_source == "given"
    delays.close()


def test_old_or_few_runs_do_not_count(delays: DelayTasks, store: Store) -> None:
    measure(store, "old", 1000, 0.1, timedelta(days=30))
    measure(store, "few", 3, 0.1, timedelta(hours=1))
    put_peak(delays, "old", 1)
    put_peak(delays, "few", 1)
    forecast = delays.forecast(rate=10)
    assert [of_tag(forecast, tag).rate_source for tag in ("old", "few")] == ["given", "given"]


def test_tasks_that_run_together_share_a_process(delays: DelayTasks, store: Store) -> None:
    delays.processor("batch", batch=10)(lambda tasks: None)
    delays.processor("concurrent", in_flight=4)(lambda body: None)
    delays.processor("alone")(lambda body: None)
    for tag in ("batch", "concurrent", "alone"):
        measure(store, tag, 100, 0.4, timedelta(hours=1))
        put_peak(delays, tag, 1)
    forecast = delays.forecast()
    assert of_tag(forecast, "batch").rate == pytest.approx(1 / (0.04 + 0.0064))
    assert of_tag(forecast, "concurrent").rate == pytest.approx(1 / 0.108)
    assert of_tag(forecast, "alone").rate == pytest.approx(1 / 0.408)


def test_a_concurrency_limit_counts_the_duration_of_a_run(delays: DelayTasks, store: Store) -> None:
    delays.processor("limited", in_flight=4)(lambda body: None)
    measure(store, "limited", 100, 0.5, timedelta(hours=1))
    put_peak(delays, "limited", 100)
    delays.set_policy(tag="limited", concurrency=2)
    limited = of_tag(delays.forecast(workers=10, processes=10), "limited")
    assert limited.most_per_s == 4
    assert limited.late_s == pytest.approx(24.75, rel=0.01)
