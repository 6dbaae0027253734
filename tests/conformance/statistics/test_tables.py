"""The tables of statistics: adding counts, rolling them up, purging them."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import func, select

from delaytasks.core.clock import from_us
from delaytasks.core.run_counts import FailureCount, RunCounts
from delaytasks.statistics import failure_groups
from delaytasks.statistics.gauges import Gauges, unpacked_gauges
from delaytasks.statistics.periods import DAY, GAUGES, HOUR, MINUTE, total_in
from delaytasks.statistics.queries import StatisticsTable
from delaytasks.statistics.results import RunTotals
from delaytasks.statistics.stored_counts import counts_of, minute_text, unpacked_counts
from delaytasks.statistics.worker_counts import MINUTE_US, Unwritten
from delaytasks.storage.store import Store

NOON = datetime(2030, 3, 1, 12, tzinfo=timezone.utc)


@pytest.fixture
def table(store: Store) -> StatisticsTable:
    return StatisticsTable(store.database, store.schema)


def minute_of(instant: datetime) -> int:
    return int(instant.timestamp()) // 60


def runs(number: int = 1, lateness_s: float = 0.1) -> RunCounts:
    counts = RunCounts()
    counts.add_outcome("done", number)
    for _ in range(number):
        counts.add_run(lateness_s, 0.2, 5.0)
    return counts


def some(at: datetime, **tags: int) -> Unwritten:
    unwritten = Unwritten()
    for tag, number in tags.items():
        unwritten.add_run(minute_of(at), tag, runs(number))
    return unwritten


def add(store: Store, table: StatisticsTable, unwritten: Unwritten, now: datetime = NOON) -> None:
    store.database.transaction(lambda c: table.add(c, unwritten, now))


def rows(table: StatisticsTable, period: str, tags: list[str] | None = None) -> list[Any]:
    """Return start, tag, counts and parts of the rows of a period."""
    begin, end = NOON - timedelta(days=1000), NOON + timedelta(days=1000)
    return sorted(row[1:5] for row in table.read(begin, end, tags) if row[0] == period)


def minutes(table: StatisticsTable) -> dict[tuple[datetime, str], RunCounts]:
    return {(start, tag): counts_of(text) for start, tag, text, _ in rows(table, MINUTE)}


def packed(table: StatisticsTable, period: str) -> dict[tuple[datetime, str], dict[int, RunCounts]]:
    return {(start, tag): unpacked_counts(parts) for start, tag, _, parts in rows(table, period)}


def started(table: StatisticsTable, period: str) -> dict[tuple[datetime, str], dict[int, int]]:
    return {
        key: {number: one.started for number, one in parts.items()}
        for key, parts in packed(table, period).items()
    }


def pack_all(table: StatisticsTable, period: str, before: datetime) -> list[int]:
    numbers = []
    while number := table.pack(period, before):
        numbers.append(number)
    return numbers


def roll_up(table: StatisticsTable, before: datetime) -> None:
    pack_all(table, MINUTE, before)
    pack_all(table, HOUR, before)


def test_counts_are_added_to_what_other_workers_have_written(
    store: Store, table: StatisticsTable
) -> None:
    add(store, table, some(NOON, a=2, b=1))
    add(store, table, some(NOON, a=3))
    found = minutes(table)
    assert {key: one.started for key, one in found.items()} == {(NOON, "a"): 5, (NOON, "b"): 1}
    assert found[NOON, "a"].outcome("done") == found[NOON, "a"].on_time == 5


def test_workers_that_write_simultaneously_lose_nothing(
    store: Store, table: StatisticsTable
) -> None:
    writes, failures = 20, list[BaseException]()

    def work(number: int) -> None:
        mine = some(NOON, a=1, b=1, **{f"only-{number}": 1})
        mine.add_failure(minute_of(NOON) // 60, FailureCount("a", "broken*", 1, number, "broken"))
        for _ in range(writes):
            try:
                add(store, table, mine)
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    found = minutes(table)
    assert found[NOON, "a"].started == found[NOON, "b"].started == 4 * writes
    assert found[NOON, "only-3"].started == writes
    [group] = table.failure_groups.read(None, None, 10)
    assert group.runs == 4 * writes


def test_a_failure_group_shows_the_failure_of_the_latest_hour(
    store: Store, table: StatisticsTable
) -> None:
    hour, mine = minute_of(NOON) // 60, some(NOON, a=3)
    mine.add_failure(hour - 1, FailureCount("a", "broken*", 1, 1, "rare and old"))
    mine.add_failure(hour, FailureCount("a", "broken*", 5, 2, "frequent and new"))
    add(store, table, mine)
    [group] = table.failure_groups.read(None, None, 10)
    assert (group.task_id, group.sample, group.runs) == (2, "frequent and new", 6)


def test_minutes_are_packed_hour_by_hour_and_hours_day_by_day_across_midnight(
    store: Store, table: StatisticsTable
) -> None:
    midnight = NOON.replace(hour=0)
    before, yesterday = midnight + timedelta(hours=1), midnight - timedelta(days=1)
    for offset in (-61, -60, -1, 0, 1, 59, 60):
        add(store, table, some(midnight + timedelta(minutes=offset), a=1))
    assert pack_all(table, MINUTE, before) == [1, 2, 3], "one hour at a time, the oldest first"
    assert list(minutes(table)) == [(before, "a")], "the last minute is not older than `before`"
    assert started(table, HOUR) == {
        (midnight - timedelta(hours=2), "a"): {59: 1},
        (midnight - timedelta(hours=1), "a"): {0: 1, 59: 1},
        (midnight, "a"): {0: 1, 1: 1, 59: 1},
    }
    assert pack_all(table, HOUR, before) == [2, 1], "one day at a time"
    assert started(table, HOUR) == {}
    assert started(table, DAY) == {(yesterday, "a"): {22: 1, 23: 2}, (midnight, "a"): {0: 3}}


def test_packing_loses_no_count(store: Store, table: StatisticsTable) -> None:
    total = RunCounts()
    for minute in range(0, 60, 7):
        counts = runs(minute + 1, lateness_s=minute / 4)
        counts.add_outcome("failed", 3)
        total.add(counts)
        unwritten = Unwritten()
        unwritten.add_run(minute_of(NOON) + minute, "a", counts)
        add(store, table, unwritten)
    roll_up(table, NOON + timedelta(hours=1))
    [hours] = packed(table, DAY).values()
    assert hours[12].as_list() == total.as_list()


def test_a_minute_that_is_written_late_is_added_to_its_hour(
    store: Store, table: StatisticsTable
) -> None:
    later = NOON + timedelta(days=3)
    for _ in range(2):
        add(store, table, some(NOON, a=1))
        pack_all(table, MINUTE, later)
    assert started(table, HOUR) == {(NOON, "a"): {0: 2}}
    pack_all(table, HOUR, later)
    add(store, table, some(NOON, a=1))
    roll_up(table, later)
    assert started(table, DAY) == {(NOON.replace(hour=0), "a"): {12: 3}}


def test_gauges_of_a_minute_are_written_once_and_rolled_up_as_means(table: StatisticsTable) -> None:
    assert table.write_gauges(NOON, Gauges(pending=10, workers=2))
    assert not table.write_gauges(NOON, Gauges(pending=99))
    assert table.has_gauges(NOON)
    table.write_gauges(NOON + timedelta(minutes=1), Gauges(pending=20, workers=2))
    assert not minutes(table), "gauges are no tag"
    [first, _] = rows(table, MINUTE, [GAUGES])
    assert Gauges.of(first[2]) == Gauges(pending=10, workers=2)
    roll_up(table, NOON + timedelta(hours=1))
    [day] = rows(table, DAY, [GAUGES])
    assert unpacked_gauges(day[3]) == {12: Gauges(pending=15, workers=2)}


def test_old_days_and_old_groups_are_purged(store: Store, table: StatisticsTable) -> None:
    add(store, table, some(NOON, a=1))
    add(store, table, some(NOON + timedelta(days=1), a=1))
    roll_up(table, NOON + timedelta(days=3))
    old, new = Unwritten(), Unwritten()
    old.add_failure(1, FailureCount("a", "old*", 1, 1, "old"))
    new.add_failure(1, FailureCount("a", "new*", 1, 1, "new"))
    add(store, table, old, NOON)
    add(store, table, new, NOON + timedelta(days=1))
    assert table.purge(NOON.replace(hour=0) + timedelta(days=1)) == 2
    assert [start for start, _ in packed(table, DAY)] == [NOON.replace(hour=0) + timedelta(days=1)]
    assert [group.pattern for group in table.failure_groups.read(None, None, 10)] == ["new*"]


def test_the_number_of_groups_is_bounded(
    store: Store, table: StatisticsTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_groups, "MAX_STORED_GROUPS", 3)
    for number in range(5):
        one = Unwritten()
        one.add_failure(1, FailureCount("a", f"{number}*", 1, 1, "broken"))
        add(store, table, one, NOON + timedelta(minutes=number))
    table.purge(NOON - timedelta(days=1))
    assert [group.pattern for group in table.failure_groups.read(None, None, 10)] == [
        "4*",
        "3*",
        "2*",
    ]


def test_one_write_has_the_largest_groups(
    store: Store, table: StatisticsTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_groups, "MAX_GROUPS_PER_WRITE", 2)
    unwritten = Unwritten()
    for number in (1, 3, 2):
        unwritten.add_failure(1, FailureCount("a", f"{number}*", number, number, "broken"))
    add(store, table, unwritten)
    assert {group.pattern for group in table.failure_groups.read(None, None, 10)} == {"2*", "3*"}


def test_a_group_has_its_first_and_last_time_its_last_task_and_its_hours(
    store: Store, table: StatisticsTable
) -> None:
    for number in range(60):
        one = Unwritten()
        one.add_failure(1000 + number, FailureCount("a", "x*", 2, number, f"x{number}"))
        add(store, table, one, NOON + timedelta(hours=number))
    [group] = table.failure_groups.read("a", NOON, 10)
    assert (group.runs, group.task_id, group.sample) == (120, 59, "x59")
    assert (group.first_at, group.last_at) == (NOON, NOON + timedelta(hours=59))
    hours = failure_groups.hour_counts_of(group.hours)
    assert hours == dict.fromkeys(range(1012, 1060), 2), "the last 48 hours"


def test_the_largest_times_of_a_minute_are_those_of_its_hour_and_its_day(
    store: Store, table: StatisticsTable
) -> None:
    for minute, lateness_s in ((0, 0.1), (0, 101.0), (7, 0.3)):
        unwritten, at = Unwritten(), NOON + timedelta(minutes=minute)
        unwritten.add_run(minute_of(at), "a", runs(10, lateness_s))
        add(store, table, unwritten)
    begin, end = NOON - timedelta(days=1), NOON + timedelta(days=1)

    def totals() -> tuple[float, float, float | None]:
        found = [one for row in table.read(begin, end, ["a"]) if (one := total_in(row))]
        total = RunTotals.total(map(RunTotals.of, found))
        return total.lateness_max_s, total.duration_max_s, total.lateness_quantile(0.99)

    for period in (MINUTE, HOUR, DAY):
        lateness_max_s, duration_max_s, p99 = totals()
        assert (lateness_max_s, duration_max_s) == (101.0, 0.2), period
        assert p99 is not None
        assert 60 < p99 <= 101, period
        table.pack(period, NOON + timedelta(days=2)) if period != DAY else None


def test_runs_of_an_earlier_version_are_as_late_as_their_bucket(
    store: Store, table: StatisticsTable
) -> None:
    add(store, table, some(NOON, a=1))  # 0.1 s late
    s = store.schema.statistics
    with store.database.begin() as connection:  # it does not know the columns of the largest times
        text = minute_text(runs(2, lateness_s=101.0))
        connection.execute(s.update().where(s.c.tag == "a").values(counts=text))
    [row] = table.read(NOON, NOON + timedelta(minutes=1), ["a"])
    assert (row.lateness_max_s, row.minute().lateness_max_s) == (0.1, 300.0)


def test_values_of_another_program_are_no_error(store: Store, table: StatisticsTable) -> None:
    s = store.schema.statistics
    written = [
        {"period": MINUTE, "start": NOON, "tag": "a", "counts": "nonsense", "parts": None},
        {"period": DAY, "start": NOON, "tag": "a", "counts": None, "parts": b"nonsense"},
    ]
    with store.database.begin() as connection:
        connection.execute(s.insert(), written)
    assert [one.started for one in minutes(table).values()] == [0]
    assert list(packed(table, DAY).values()) == [{}]
    add(store, table, some(NOON, a=1))
    roll_up(table, NOON + timedelta(days=3))
    with store.database.begin() as connection:
        assert connection.execute(select(func.count()).select_from(s)).scalar_one() == 2


def test_minutes_are_utc(store: Store, table: StatisticsTable) -> None:
    add(store, table, some(NOON, a=1))
    [(start, _)] = minutes(table)
    assert start == from_us(minute_of(NOON) * MINUTE_US) == NOON
    assert start.tzinfo is timezone.utc
