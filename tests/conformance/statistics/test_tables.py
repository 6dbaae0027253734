"""The tables of statistics: adding counts, and purging them."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta, timezone

import pytest

from delaytasks import DelayTasks
from delaytasks.core.clock import from_us
from delaytasks.core.run_counts import FailureCount, RunCounts
from delaytasks.runtime import runtime_of
from delaytasks.statistics import statistics_table
from delaytasks.statistics.statistics_table import MINUTE_US, StatisticsTable, Unwritten
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


def minutes(table: StatisticsTable) -> dict[tuple[datetime, str], RunCounts]:
    begin, end = NOON - timedelta(days=4000), NOON + timedelta(days=1000)
    return {(row.start, row.tag): row.counts for row in table.read(begin, end, None)}


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
    [group] = table.failure_groups(None, None, 10)
    assert group.runs == 4 * writes


def test_a_failure_group_shows_the_failure_of_the_latest_hour(
    store: Store, table: StatisticsTable
) -> None:
    hour, mine = minute_of(NOON) // 60, some(NOON, a=3)
    mine.add_failure(hour - 1, FailureCount("a", "broken*", 1, 1, "rare and old"))
    mine.add_failure(hour, FailureCount("a", "broken*", 5, 2, "frequent and new"))
    add(store, table, mine)
    [group] = table.failure_groups(None, None, 10)
    assert (group.task_id, group.sample, group.runs) == (2, "frequent and new", 6)


def test_old_minutes_and_old_groups_are_purged(store: Store, table: StatisticsTable) -> None:
    later = NOON + timedelta(hours=1)
    for at, pattern in ((NOON, "old*"), (later, "new*")):
        one = some(at, a=1)
        one.add_failure(1, FailureCount("a", pattern, 1, 1, "broken"))
        add(store, table, one, at)
    table.purge(NOON + statistics_table.COUNTS_KEPT + timedelta(minutes=1))
    assert list(minutes(table)) == [(later, "a")]
    table.purge(NOON + statistics_table.GROUPS_KEPT + timedelta(minutes=1))
    assert [group.pattern for group in table.failure_groups(None, None, 10)] == ["new*"]


def test_a_sweep_purges_once_an_hour_unless_the_setting_is_off(
    store: Store, delays: DelayTasks, table: StatisticsTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeper = runtime_of(delays).sweeper
    for _ in range(2):
        add(store, table, some(NOON.replace(year=2020), a=1))
        monkeypatch.setattr(type(sweeper._sweeps), "begin_sweep", lambda *_: NOON)
        assert sweeper.sweep(0)
    assert len(minutes(table)) == 1, "the second sweep has purged nothing"


def test_the_number_of_groups_is_bounded(
    store: Store, table: StatisticsTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics_table, "MAX_STORED_GROUPS", 3)
    for number in range(5):
        one = Unwritten()
        one.add_failure(1, FailureCount("a", f"{number}*", 1, 1, "broken"))
        add(store, table, one, NOON + timedelta(minutes=number))
    table.purge(NOON)
    assert [group.pattern for group in table.failure_groups(None, None, 10)] == [
        "4*",
        "3*",
        "2*",
    ]


def test_one_write_has_the_largest_groups(
    store: Store, table: StatisticsTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics_table, "MAX_GROUPS_PER_WRITE", 2)
    unwritten = Unwritten()
    for number in (1, 3, 2):
        unwritten.add_failure(1, FailureCount("a", f"{number}*", number, number, "broken"))
    add(store, table, unwritten)
    assert {group.pattern for group in table.failure_groups(None, None, 10)} == {"2*", "3*"}


def test_a_group_has_its_first_and_last_time_its_last_task_and_its_hours(
    store: Store, table: StatisticsTable
) -> None:
    for number in range(60):
        one = Unwritten()
        one.add_failure(1000 + number, FailureCount("a", "x*", 2, number, f"x{number}"))
        add(store, table, one, NOON + timedelta(hours=number))
    [group] = table.failure_groups("a", NOON, 10)
    assert (group.runs, group.task_id, group.sample) == (120, 59, "x59")
    assert (group.first_at, group.last_at) == (NOON, NOON + timedelta(hours=59))
    hours = statistics_table.hour_counts_of(group.hours)
    assert hours == dict.fromkeys(range(1012, 1060), 2), "the last 48 hours"


def test_the_largest_times_of_a_minute_are_kept(store: Store, table: StatisticsTable) -> None:
    for lateness_s in (0.1, 101.0, 0.3):
        unwritten = Unwritten()
        unwritten.add_run(minute_of(NOON), "a", runs(10, lateness_s))
        add(store, table, unwritten)
    [counts] = minutes(table).values()
    assert (counts.lateness_max_s, counts.duration_max_s) == (101.0, 0.2)


def test_values_of_another_program_are_no_error(store: Store, table: StatisticsTable) -> None:
    with store.database.begin() as connection:
        written = {"start": NOON, "tag": "a", "counts": "nonsense"}
        connection.execute(store.schema.statistics.insert(), [written])
    assert [one.started for one in minutes(table).values()] == [0]
    add(store, table, some(NOON, a=1))
    assert [one.started for one in minutes(table).values()] == [1]


def test_minutes_are_utc(store: Store, table: StatisticsTable) -> None:
    add(store, table, some(NOON, a=1))
    [(start, _)] = minutes(table)
    assert start == from_us(minute_of(NOON) * MINUTE_US) == NOON
    assert start.tzinfo is timezone.utc
