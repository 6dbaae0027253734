"""Due times on any date, and times that are spread."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from delaytasks import DelayTasks, NewTask
from tests.conformance.bulk_tasks import counts
from tests.world import MakeWorld, MonkeyPatch, World
from tests.world.recording import ManualClock

# Hours that occur twice or never, and leap days: rows store UTC in every process time zone,
# and no task is due early


UTC = timezone.utc
BERLIN = ZoneInfo("Europe/Berlin")
DAY_S = 86_400


def utc(*numbers: int) -> datetime:
    return datetime(*numbers, tzinfo=UTC)  # type: ignore[misc]


@pytest.fixture(params=["America/New_York", "Asia/Kolkata"])
def world(request: Any, make_world: MakeWorld, monkeypatch: MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield make_world()
    monkeypatch.undo()
    time.tzset()


INSTANTS = [
    (datetime(2028, 10, 29, 2, 30, tzinfo=BERLIN, fold=0), utc(2028, 10, 29, 0, 30)),
    (datetime(2028, 10, 29, 2, 30, tzinfo=BERLIN, fold=1), utc(2028, 10, 29, 1, 30)),
    # Berlin skips this hour, and New York skips the next one.
    (datetime(2028, 3, 26, 2, 30, tzinfo=BERLIN), utc(2028, 3, 26, 1, 30)),
    (utc(2028, 3, 12, 7, 30), utc(2028, 3, 12, 7, 30)),
    (utc(2028, 2, 29, 23, 59, 59, 999_999), utc(2028, 2, 29, 23, 59, 59, 999_999)),
    (utc(2029, 1, 1), utc(2029, 1, 1)),
]


@pytest.mark.parametrize(("when", "due"), INSTANTS)
def test_an_instant_is_stored_as_it_is_and_a_delay_counts_elapsed_seconds(
    world: World, when: datetime, due: datetime
) -> None:
    world.set_clock(ManualClock(due - timedelta(seconds=DAY_S)))
    at = world.delays.schedule_delay("note", None, at=when)
    tasks = [at, world.delays.schedule_delay("note", None, DAY_S)]
    for task in tasks:
        assert task.expected_time == world.read(task).expected_time == due
    until = due + timedelta(microseconds=1)
    assert world.delays.find(since=due, until=until).tasks == [world.read(one) for one in tasks]
    assert world.claim(*tasks) == [], "not before the database's clock says so"


# `jitter` distributes due times over a period, for new tasks and for those of a peak


NINE = utc(2031, 1, 31, 9)
TEN_MINUTES = timedelta(minutes=10)


def offsets_s(delays: DelayTasks, tag: str) -> list[float]:
    """Return how long after nine the tasks are due, in order."""
    return [(task.due - NINE).total_seconds() for task in delays.find(tag=tag, limit=1000)]


def is_uniform(offsets: list[float]) -> bool:
    """Return whether each quarter of ten minutes has between 60 and 140 of 400 times, and no time
    is outside.

    A uniform distribution fails this with a probability below one in 100,000.
    """
    quarters = Counter(int(offset // 150) for offset in offsets)
    return {*quarters} == {0, 1, 2, 3} and all(60 < each < 140 for each in quarters.values())


def test_new_tasks_and_those_of_a_peak_are_spread_uniformly_and_once(delays: DelayTasks) -> None:
    delays.schedule_many(NewTask("mail", n, at=NINE, jitter="10m") for n in range(400))
    assert is_uniform(offsets_s(delays, "mail"))
    delays.schedule_many(NewTask("peak", n, at=NINE) for n in range(400))
    other = delays.schedule_delay("other", {}, at=NINE)
    time.sleep(0.003)  # the clocks of some databases count milliseconds
    filters: Any = {"tag": "peak", "since": NINE, "until": NINE + timedelta(minutes=1)}
    result = delays.bulk.reschedule(jitter="10m", **filters)
    assert counts(result) == (400, 400, 0)
    assert is_uniform(offsets := offsets_s(delays, "peak"))
    assert delays.get(other).due == NINE
    assert delays.bulk.log()[0].filter["to"] == "spread over 600.0 s"
    again = delays.bulk.reschedule(jitter="10m", tag="peak", updated_until=result.started)
    assert counts(again) == (0, 0, 0)
    assert offsets_s(delays, "peak") == offsets


def test_a_repeated_call_gets_the_same_time(delays: DelayTasks) -> None:
    id = delays.new_id()
    by_id = [delays.schedule_delay("mail", {}, at=NINE, id=id, jitter=TEN_MINUTES) for _ in (1, 2)]
    again: Any = {"key": "k", "on_conflict": "replace", "jitter": TEN_MINUTES}
    by_key = [delays.schedule_delay("mail", n, at=NINE, **again) for n in range(3)]
    times = [{task.expected_time for task in tasks} for tasks in (by_id, by_key)]
    assert [len(each) for each in (*times, times[0] | times[1])] == [1, 1, 2]
