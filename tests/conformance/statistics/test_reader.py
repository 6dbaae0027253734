"""`delays.statistics` on each database: series, totals, on-time shares and failures."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from delaytasks import DelayTasks, InvalidQueryError
from delaytasks.core.run_counts import FailureCount, RunCounts
from delaytasks.statistics.reading import StepRange, count_rows, run_counts
from delaytasks.statistics.statistics_table import StatisticsTable, Unwritten
from delaytasks.storage.store import Store

NOON = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


@pytest.fixture
def table(store: Store) -> StatisticsTable:
    return StatisticsTable(store.database, store.schema)


def write(table: StatisticsTable, store: Store, at: datetime, tag: str, *latenesses: float) -> None:
    counts = RunCounts()
    counts.add_outcome("done", len(latenesses))
    for lateness_s in latenesses:
        counts.add_run(lateness_s, 0.2, 5.0 if tag == "prompt" else None)
    unwritten = Unwritten()
    unwritten.add_run(int(at.timestamp()) // 60, tag, counts)
    store.database.transaction(lambda c: table.add(c, unwritten, at))


def test_a_series_has_every_step_and_adds_the_tags_up(
    delays: DelayTasks, store: Store, table: StatisticsTable
) -> None:
    write(table, store, NOON, "a", 0.1, 0.1)
    write(table, store, NOON + 4 * MINUTE, "b", 0.1)
    write(table, store, NOON + 12 * MINUTE, "a", 0.1)
    points = delays.statistics.series(since=NOON, until=NOON + 15 * MINUTE, step="5m")
    assert [(one.start, one.total.done) for one in points] == [
        (NOON, 3),
        (NOON + 5 * MINUTE, 0),
        (NOON + 10 * MINUTE, 1),
    ]
    assert {tag: one.started for tag, one in points[0].tags.items()} == {"a": 2, "b": 1}
    only = delays.statistics.series(since=NOON, until=NOON + 5 * MINUTE, step="5m", tags=["b"])
    assert [one.total.done for one in only] == [1]


def test_the_rows_of_a_range_are_counted_up_to_a_limit(
    delays: DelayTasks, store: Store, table: StatisticsTable
) -> None:
    for minute in range(4):
        for tag in "abc":
            write(table, store, NOON - minute * MINUTE, tag, 0.1)
    since, until = NOON - 2 * MINUTE, NOON + HOUR
    assert count_rows(store, since, until, 100) == len(list(table.read(since, until, None))) == 9
    assert count_rows(store, since, until, 5) == 5


def test_the_end_of_a_range_is_exclusive_and_its_beginning_is_rounded_down(
    delays: DelayTasks, store: Store, table: StatisticsTable
) -> None:
    for offset in (-1, 0, 9, 10):
        write(table, store, NOON + offset * MINUTE, "a", 0.1)
    since = NOON + timedelta(seconds=30)
    points = delays.statistics.series(since=since, until=NOON + 10 * MINUTE, step="10m")
    assert [(one.start, one.total.done) for one in points] == [(NOON, 2)]
    assert delays.statistics.totals(since=since, until=NOON + 10 * MINUTE)["a"].done == 2


def test_the_totals_of_a_range_need_one_count_for_each_tag(
    delays: DelayTasks, store: Store, table: StatisticsTable
) -> None:
    for minute in (0, 5, 59):
        write(table, store, NOON + minute * MINUTE, "a", 0.1)
        write(table, store, NOON + minute * MINUTE, "b", 0.1)
    until = NOON + 50 * MINUTE
    steps = StepRange.of(until, NOON, until, "1m", is_series=False)
    [by_tag] = run_counts(store, steps, None).values()
    assert {tag: counts.started for tag, counts in by_tag.items()} == {"a": 2, "b": 2}


def test_a_range_is_the_same_in_every_time_zone(
    delays: DelayTasks, store: Store, table: StatisticsTable
) -> None:
    write(table, store, NOON, "a", 0.1)
    east = timezone(timedelta(hours=9))
    points = delays.statistics.series(
        since=NOON.astimezone(east), until=(NOON + HOUR).astimezone(east), step="1h"
    )
    assert [(one.start, one.total.done) for one in points] == [(NOON, 1)]
    assert points[0].start.tzinfo is timezone.utc


def test_a_duration_is_a_range_before_now(
    delays: DelayTasks, store: Store, table: StatisticsTable
) -> None:
    now = store.tasks.now()
    write(table, store, now - 10 * MINUTE, "a", 0.1)
    write(table, store, now - 2 * HOUR, "a", 0.1)
    assert delays.statistics.totals()["a"].done == 1
    assert delays.statistics.totals(since="3h")["a"].done == 2
    assert sum(one.total.done for one in delays.statistics.series(since="3h")) == 2


def test_quantiles_come_from_the_histograms_of_the_range(
    delays: DelayTasks, store: Store, table: StatisticsTable
) -> None:
    write(table, store, NOON, "a", *[0.02] * 98)
    write(table, store, NOON + MINUTE, "a", 50, 50)
    total = delays.statistics.totals(since=NOON, until=NOON + HOUR)["a"]
    assert 0.01 <= (total.lateness_quantile(0.5) or 0) <= 0.025
    assert 30 <= (total.lateness_quantile(0.99) or 0) <= 60
    assert 0.1 <= (total.duration_quantile(0.5) or 0) <= 0.25
    assert total.lateness_s == pytest.approx(98 * 0.02 + 100)
    assert total.on_time_share is None


def test_the_share_on_time_is_exact_though_the_bounds_of_the_histogram_are_not(
    delays: DelayTasks, store: Store, table: StatisticsTable
) -> None:
    delays.processor("prompt", on_time="5s")(lambda body: None)
    write(table, store, NOON, "prompt", *[4.999] * 997, 5.001, 5.002, 9)
    write(table, store, NOON, "other", 1)
    span: dict[str, Any] = {"since": NOON, "until": NOON + HOUR}
    [one] = delays.statistics.on_time(**span, target=0.99)
    assert (one.tag, one.promised_s, one.on_time, one.late) == ("prompt", 5, 997, 3)
    assert one.share == 0.997
    assert one.budget == pytest.approx(10)
    assert one.budget_left == pytest.approx(0.7)
    [strict] = delays.statistics.on_time(**span, target=0.999)
    assert strict.budget_left == pytest.approx(-2)
    with pytest.raises(InvalidQueryError, match="target"):
        delays.statistics.on_time(target=1)


def test_failure_groups_are_read_and_select_their_tasks(
    delays: DelayTasks, store: Store, table: StatisticsTable
) -> None:
    group = Unwritten()
    hour = int(NOON.timestamp()) // 3600
    pattern = "* in charge\n*ValueError: order * not found*"
    group.add_failure(hour, FailureCount("a", pattern, 3, 17, "the error"))
    store.database.transaction(lambda c: table.add(c, group, NOON))
    [found] = delays.statistics.failures(tag="a")
    assert (found.runs, found.task_id, found.error) == (3, 17, "the error")
    assert found.hours == {NOON: 3}
    assert found.first_at == found.last_at == NOON
    assert found.filters == {"tag": "a", "error": pattern}
    assert delays.statistics.failures(tag="b") == []
    assert delays.statistics.failures(since=NOON + MINUTE) == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"step": "90s"}, "whole minutes"),
        ({"step": 0}, "whole minutes"),
        ({"since": NOON, "until": NOON}, "empty"),
        ({"since": "3d"}, "two days"),
        ({"since": NOON - 9 * DAY, "until": NOON}, "longer step"),
        ({"tags": "mail"}, "list"),
    ],
)
def test_a_wrong_range_is_refused(delays: DelayTasks, options: Any, reason: str) -> None:
    with pytest.raises(InvalidQueryError, match=reason):
        delays.statistics.series(**options)


def test_coroutines_have_twins(delays: DelayTasks, store: Store, table: StatisticsTable) -> None:
    write(table, store, NOON, "a", 0.1)

    async def read() -> int:
        return (await delays.statistics.atotals(since=NOON, until=NOON + HOUR))["a"].done

    assert asyncio.run(read()) == 1
