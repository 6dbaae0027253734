"""Metrics of the database and of producers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import delete

from delaytasks import DelayTasks, NewTask
from delaytasks.core import loop as latest
from delaytasks.core.workers import ServiceTimes
from delaytasks.metrics.process import ProducerMetrics
from delaytasks.metrics.prometheus import exporter_app, registry_of
from delaytasks.metrics.snapshot import DatabaseMetrics
from delaytasks.operations.state import MAX_EXPLAINED_GROUPS
from delaytasks.runtime import runtime_of
from delaytasks.storage.claims import Claims
from delaytasks.storage.store import Store
from delaytasks.storage.types import db_now_plus
from tests.recording import delays_on, set_columns

# The metrics of a database, as Prometheus gets them


def scraped(delays: DelayTasks) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the values that a scrape of a new exporter finds."""
    app = exporter_app(delays)
    request = {"REQUEST_METHOD": "GET", "PATH_INFO": "/metrics", "QUERY_STRING": ""}
    body = b"".join(app(request, lambda *_: None))
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


class Values:
    def __init__(self, delays: DelayTasks) -> None:
        self._values = scraped(delays)

    def of(self, name: str, **labels: str) -> float | None:
        """Return a value."""
        return self._values.get((f"delaytasks_{name}", frozenset(labels.items())))

    def of_forecast(self, name: str) -> float | None:
        return self._values.get((f"delaytasks_forecast_{name}", frozenset()))

    def all(self, name: str) -> Iterator[Mapping[str, str]]:
        return (dict(labels) for found, labels in self._values if found == f"delaytasks_{name}")


def make_late(store: Store, seconds: float) -> None:
    """Make all waiting tasks late by this time."""
    set_columns(store, "tasks", expected_time=db_now_plus(-seconds))


def test_a_scrape_counts_tasks_by_status_and_shows_the_oldest_overdue_one(
    delays: DelayTasks, store: Store, claims: Claims
) -> None:
    for _ in range(3):
        delays.schedule_delay("mail", {}, 0, queue="letters")
    make_late(store, 90)
    claims.claim_due("letters", [0], 1)
    delays.schedule_delay("mail", {}, 3600)
    values = Values(delays)
    assert values.of("tasks", status="NOT_COMPLETE") == 3
    assert values.of("tasks", status="RUNNING") == 1
    assert values.of("tasks", status="FAILED") == 0
    assert values.of("overdue_tasks") == 2
    assert 90 <= (values.of("oldest_overdue_seconds") or 0) < 300
    assert values.of("overdue_tasks_by_tag", queue="letters", tag="mail") == 2
    assert values.of("queue_workers", queue="letters") == 0
    assert values.of("database_up") == 1


def test_without_overdue_tasks_their_age_is_zero(delays: DelayTasks) -> None:
    delays.schedule_delay("mail", {}, 60)
    values = Values(delays)
    assert values.of("oldest_overdue_seconds") == 0
    assert values.of("overdue_tasks") == 0
    assert list(values.all("overdue_tasks_by_tag")) == []


def test_the_number_of_tags_with_a_label_is_bounded(delays: DelayTasks, store: Store) -> None:
    delays.schedule_many((f"t{n}", {}, 0) for n in range(MAX_EXPLAINED_GROUPS + 5))
    make_late(store, 90)
    assert len(list(Values(delays).all("overdue_tasks_by_tag"))) == MAX_EXPLAINED_GROUPS


def test_a_worker_that_does_not_report_is_not_counted(delays: DelayTasks, store: Store) -> None:
    store.workers.report("quiet", ["default"], "prefork", 2, 0)
    store.workers.report("alive", ["default", "mail"], "prefork", 2, 250_000)
    set_columns(store, "workers", {"name": "quiet"}, seen_at=db_now_plus(-1000))
    values = Values(delays)
    assert values.of("workers") == 1
    assert values.of("queue_workers", queue="default") == 1
    assert values.of("queue_workers", queue="mail") == 1
    assert (values.of("worker_seen_seconds", worker="quiet") or 0) >= 1000
    assert values.of("worker_clock_offset_seconds", worker="alive") == 0.25


def test_a_worker_without_its_broker_and_a_silent_beat_are_shown(
    delays: DelayTasks, store: Store
) -> None:
    store.workers.report("well", ["default"], "prefork", 2, 0, services=ServiceTimes(beat_s=500))
    lacking = ServiceTimes(broker_down_s=120, timer_down_s=100, beat_s=0)
    store.workers.report("cut off", ["default"], "prefork", 2, 0, services=lacking)
    values = Values(delays)
    for name, down_s in (("broker", 120), ("timer", 100)):
        assert values.of(f"worker_{name}_down_seconds", worker="well") == 0
        assert (values.of(f"worker_{name}_down_seconds", worker="cut off") or 0) >= down_s
    assert (values.of("beat_age_seconds") or 0) >= 500, "a worker without a broker hears nothing"


def test_a_sweep_sets_its_age(delays: DelayTasks, store: Store) -> None:
    with store.database.begin() as connection:
        connection.execute(delete(store.schema.sweeps))
    assert Values(delays).of("sweep_age_seconds", sweep_partition="0") == float("inf")
    runtime_of(delays).sweeper.sweep(0)
    age_s = Values(delays).of("sweep_age_seconds", sweep_partition="0")
    assert age_s is not None
    assert age_s < 600


def test_a_lease_that_has_ended_is_counted(
    delays: DelayTasks, store: Store, claims: Claims
) -> None:
    delays.schedule_delay("mail", {}, 0)
    make_late(store, 10)
    claims.claim_due("default", [0], 1)
    assert Values(delays).of("expired_leases") == 0
    set_columns(store, "tasks", lease_until=db_now_plus(-600))
    assert Values(delays).of("expired_leases") == 1


def test_the_peak_of_the_next_week_is_forecast(
    delays: DelayTasks, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latest, "FIRST_WAIT_S", 60.0)
    values = Values(delays)
    assert values.of_forecast("peak_utilization") == values.of_forecast("peak_tasks") == 0
    assert values.of_forecast("peak_in_seconds") is None
    store.workers.report("alive", ["default"], "prefork", 2, 0)
    at = store.tasks.now() + timedelta(days=2)
    delays.schedule_many(NewTask("mail", n, at=at) for n in range(3000))
    delays.schedule_delay("mail", {}, 60)
    delays.schedule_many([NewTask("mail", {}, at=at, queue="unserved")])
    values = Values(delays)
    # Two processes need 50 ms for each of 3,000 tasks.
    assert values.of_forecast("peak_utilization") == pytest.approx(75 / 3600)
    assert values.of_forecast("peak_tasks") == 3001
    assert 46 * 3600 <= (values.of_forecast("peak_in_seconds") or 0) <= 48 * 3600
    assert 0 <= (values.of_forecast("age_seconds") or -1) < 300


def test_scrapes_in_quick_succession_read_the_database_once(delays: DelayTasks) -> None:
    source = DatabaseMetrics(runtime_of(delays), rest_s=timedelta(hours=1).total_seconds())
    registry = registry_of(source)
    before = registry.get_sample_value("delaytasks_tasks", {"status": "NOT_COMPLETE"})
    delays.schedule_delay("mail", {}, 60)
    after = registry.get_sample_value("delaytasks_tasks", {"status": "NOT_COMPLETE"})
    assert before == after == 0


@pytest.mark.quick
def test_a_database_that_does_not_answer_is_down(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("nothing")
    delays = delays_on(f"sqlite:///{folder / 'empty.sqlite3'}")
    values = Values(delays)
    assert values.of("database_up") == 0
    assert values.of("workers") is None
    assert values.of_forecast("age_seconds") is None
    delays.close()


# The metrics of a process that schedules tasks


def counts(metrics: ProducerMetrics) -> dict[str, Any]:
    [family] = metrics.families()
    return {sample.labels[0]: sample.value for sample in family.samples}


def test_each_tag_is_counted_however_its_tasks_are_scheduled(delays: DelayTasks) -> None:
    delays.schedule_delay("before", {}, "1h")
    metrics = ProducerMetrics.of(delays)
    delays.schedule_delay("mail", {}, "1h")
    delays.schedule_many([NewTask(tag, {}, "1h") for tag in ("mail", "mail", "invoice")])
    assert counts(metrics) == {"mail": 3, "invoice": 1}


def test_a_task_that_exists_is_not_counted_again(delays: DelayTasks) -> None:
    metrics = ProducerMetrics.of(delays)
    for _ in range(2):
        delays.schedule_delay("mail", {}, "1h", key="a", on_conflict="keep")
    assert counts(metrics) == {"mail": 1}


def test_tags_beyond_the_limit_are_counted_as_one() -> None:
    metrics = ProducerMetrics(max_tags=2)
    for tag in ("a", "b", "c", "d", "a"):
        metrics("task.scheduled", {"tag": tag})
    assert counts(metrics) == {"a": 2, "b": 1, "(other)": 2}
