"""The statistics stage of a sweep: gauges, roll-up, purge."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import event

from delaytasks import DelayTasks, Status
from delaytasks.core.clock import UTC
from delaytasks.core.run_counts import RunCounts
from delaytasks.maintenance.statistics_stage import StatisticsStage
from delaytasks.runtime import runtime_of
from delaytasks.statistics import gauge_queries, maintenance
from delaytasks.statistics.gauge_queries import GaugeQueries
from delaytasks.statistics.maintenance import StatisticsMaintenance
from delaytasks.statistics.queries import StatisticsTable
from delaytasks.statistics.worker_counts import Unwritten
from delaytasks.storage.store import Store
from tests.conformance.bulk.bulk_tasks import put
from tests.manual_clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    """At half past twelve, so that no period of a test ends by the time of the day."""
    return ManualClock(datetime(2026, 6, 15, 12, 30, tzinfo=UTC))


@pytest.fixture
def kept(store: Store, delays: DelayTasks, clock: ManualClock) -> StatisticsMaintenance:
    return StatisticsMaintenance(delays.settings, store, clock)


def run(kept: StatisticsMaintenance) -> None:
    kept.run(lambda: None, 0.25)


def count(store: Store) -> Any:
    return GaugeQueries(store.database, store.schema).count(1.0, 60.0)


def test_gauges_count_the_tasks_of_each_status_and_the_workers(
    store: Store, delays: DelayTasks
) -> None:
    now = store.tasks.now()
    for queue, late_s in (("default", 0), ("default", 100), ("mail", 50), ("mail", -100)):
        task = delays.schedule_delay("a", None, "1h", queue=queue, priority=len(queue) - 4)
        put(store, task, expected_time=now - timedelta(seconds=late_s))
    for status, number in ((Status.RUNNING, 1), (Status.FAILED, 2), (Status.HELD, 3)):
        for _ in range(number):
            put(store, delays.schedule_delay("a", None, "1h"), status=int(status))
    store.workers.report("w1", ["default"], "prefork", 2, 0)
    found = count(store)
    assert (found.pending, found.running, found.failed, found.held) == (4, 1, 2, 3)
    assert found.overdue == 2 + (found.overdue == 3), "one is late by about the grace period"
    assert 100 <= found.oldest_overdue_s < 1000
    assert found.workers == 1


def test_an_empty_table_has_gauges(store: Store) -> None:
    found = count(store)
    assert (found.pending, found.overdue, found.oldest_overdue_s, found.workers) == (0, 0, 0, 0)


def test_no_statement_counts_more_rows_than_the_limit(
    store: Store, delays: DelayTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gauge_queries, "MAX_COUNTED_ROWS", 5)
    past = store.tasks.now() - timedelta(hours=1)
    for _ in range(20):
        put(store, delays.schedule_delay("a", None, "1h"), expected_time=past)
    statements: list[tuple[str, Any]] = []

    def note(_c: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        statements.append((statement, parameters))

    event.listen(store.database.auto, "before_cursor_execute", note)
    try:
        found = count(store)
    finally:
        event.remove(store.database.auto, "before_cursor_execute", note)
    assert found.overdue == 5
    assert found.pending >= 6, "the limit plus one, or the planner's estimate"
    task_table = store.schema.tasks.name
    counting = [s for s, _ in statements if "count(" in s.lower() and task_table in s]
    assert len(counting) >= 5
    assert all("LIMIT" in s.upper() for s in counting), counting


def test_gauges_are_written_once_a_minute_by_all_sweeps_together(
    store: Store, delays: DelayTasks, kept: StatisticsMaintenance, clock: ManualClock
) -> None:
    start = clock.now()
    other = StatisticsMaintenance(delays.settings, store, clock)
    for _ in range(3):
        for each in (kept, other):
            run(each)
        clock.advance(30)
    points = delays.statistics.gauges(since=start, until=start + timedelta(minutes=5))
    assert [point.start - start for point in points] == [timedelta(0), timedelta(minutes=1)]
    assert {point.gauges.sweep_s for point in points} == {0.25}


def test_minutes_are_packed_after_an_hour_rolled_up_after_two_days_and_hours_purged_after_a_year(
    store: Store,
    delays: DelayTasks,
    kept: StatisticsMaintenance,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(maintenance, "PURGE_S", 0.0)
    table, start = StatisticsTable(store.database, store.schema), clock.now()
    counts, unwritten = RunCounts(), Unwritten()
    counts.add_run(0.1, 0.1, None)
    unwritten.add_run(int(start.timestamp()) // 60, "a", counts)
    store.database.transaction(lambda c: table.add(c, unwritten, start))

    def periods() -> set[str]:
        begin = start - timedelta(days=2)
        return {row[0] for row in table.read(begin, start + timedelta(days=1), ["a"])}

    steps = ((0, {"minute"}), (0.05, {"hour"}), (1.9, {"hour"}), (0.2, {"day"}), (363, {"day"}))
    for days, expected in steps:
        clock.advance(days * 86_400)
        run(kept)
        assert periods() == expected
    clock.advance(3 * 86_400)
    run(kept)
    assert periods() == set()


def test_one_turn_rolls_up_a_few_hours_only(
    store: Store, kept: StatisticsMaintenance, clock: ManualClock
) -> None:
    table, start = StatisticsTable(store.database, store.schema), clock.now().replace(minute=0)
    for hour in range(5):
        counts, unwritten = RunCounts(), Unwritten()
        counts.add_run(0.1, 0.1, None)
        unwritten.add_run(int(start.timestamp()) // 60 + 60 * hour, "a", counts)
        store.database.transaction(lambda c, one=unwritten: table.add(c, one, start))  # type: ignore[misc]
    clock.advance(4 * 86_400)

    def left() -> int:
        end = start + timedelta(days=1)
        return sum(row[0] == "minute" for row in table.read(start, end, ["a"]))

    found = []
    for _ in range(3):
        run(kept)
        found.append(left())
    assert found == [2, 0, 0]


def test_the_stage_loads_the_package_only_when_it_is_due() -> None:
    calls: list[float] = []
    stage = StatisticsStage(lambda: lambda on_step, sweep_s: calls.append(sweep_s))
    stage.run(lambda: None, 0.0)
    stage.run(lambda: None, 0.0)
    assert len(calls) == 1


def test_a_sweep_keeps_statistics_unless_the_setting_is_off(
    store: Store, delays: DelayTasks
) -> None:
    runtime = runtime_of(delays)
    assert runtime.sweeper.sweep(0)
    assert len(delays.statistics.gauges(since="2h")) == 1
