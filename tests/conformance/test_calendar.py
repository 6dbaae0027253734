"""Hours that occur twice or never, and leap days: rows store UTC in every process time zone, and
no task is due early."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest

from delaytasks import NewTask
from delaytasks.core.clock import to_us
from delaytasks.core.filters import Filter
from delaytasks.core.ids import IdMaker
from delaytasks.storage.store import Store
from tests.recording import ManualClock, RunnerHarness

UTC = timezone.utc
BERLIN = ZoneInfo("Europe/Berlin")


def utc(*numbers: int) -> datetime:
    return datetime(*numbers, tzinfo=UTC)  # type: ignore[misc]


@pytest.fixture(params=["America/New_York", "Asia/Kolkata"])
def bench(
    request: pytest.FixtureRequest, store: Store, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunnerHarness]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield RunnerHarness(store)
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("when", "due"),
    [
        (datetime(2028, 10, 29, 2, 30, tzinfo=BERLIN, fold=0), utc(2028, 10, 29, 0, 30)),
        (datetime(2028, 10, 29, 2, 30, tzinfo=BERLIN, fold=1), utc(2028, 10, 29, 1, 30)),
        (
            datetime(2028, 3, 26, 2, 30, tzinfo=BERLIN),
            utc(2028, 3, 26, 1, 30),
        ),  # Berlin skips this hour
        (utc(2028, 3, 12, 7, 30), utc(2028, 3, 12, 7, 30)),  # New York skips 2:30
        (utc(2028, 2, 29, 23, 59, 59, 999_999), utc(2028, 2, 29, 23, 59, 59, 999_999)),
        (utc(2029, 2, 28, 23, 59, 59), utc(2029, 2, 28, 23, 59, 59)),
    ],
)
def test_an_instant_is_stored_as_it_is(bench: RunnerHarness, when: datetime, due: datetime) -> None:
    set_clock(bench, due - timedelta(days=1))
    task = bench.producer.schedule(NewTask("note", None, at=when), "reject", None)
    assert task.expected_time == due
    assert bench.now(task).expected_time == due
    assert bench.store.tasks.find(
        Filter(since=due, until=due + timedelta(microseconds=1)), 5
    ).tasks == [bench.now(task)]


@pytest.mark.parametrize(
    ("now", "delay_s", "due"),
    [
        (utc(2028, 2, 28, 23, 59, 59), 1, utc(2028, 2, 29)),
        (utc(2028, 2, 29, 12), 365 * 86400, utc(2029, 2, 28, 12)),
        (utc(2028, 3, 25, 12), 86400, utc(2028, 3, 26, 12)),  # 13:00 in Berlin, then 14:00
        (utc(2028, 12, 31, 23, 59, 59), 1, utc(2029, 1, 1)),
    ],
)
def test_a_delay_is_a_number_of_elapsed_seconds_on_any_date(
    bench: RunnerHarness, now: datetime, delay_s: float, due: datetime
) -> None:
    set_clock(bench, now)
    task = bench.producer.schedule(NewTask("note", None, delay=delay_s), "reject", None)
    assert bench.now(task).expected_time == due
    assert bench.claims.claim([bench.entry(task)]) == [], "not before the database's clock says so"


def set_clock(bench: RunnerHarness, now: datetime) -> None:
    clock = ManualClock(now)
    bench.producer._clock = clock
    bench.producer._make_id = IdMaker(lambda: to_us(clock.now()) // 1000)
