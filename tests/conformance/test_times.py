"""Due times on any date, and times that are spread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from delaytasks import DelayedTask, DelayTasks, NewTask
from tests.conformance.bulk_tasks import counts
from tests.world import MakeWorld, MonkeyPatch, World
from tests.world.recording import ManualClock

# Hours that occur twice or never, and leap days: rows store UTC in every process time zone,
# and no task is due early


UTC = timezone.utc
BERLIN = ZoneInfo("Europe/Berlin")


def utc(*numbers: int) -> datetime:
    return datetime(*numbers, tzinfo=UTC)  # type: ignore[misc]


@pytest.fixture(params=["America/New_York", "Asia/Kolkata"])
def world(request: Any, make_world: MakeWorld, monkeypatch: MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield make_world()
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
def test_an_instant_is_stored_as_it_is(world: World, when: datetime, due: datetime) -> None:
    world.set_clock(ManualClock(due - timedelta(days=1)))
    task = world.delays.schedule_delay("note", None, at=when)
    assert task.expected_time == due
    assert world.read(task).expected_time == due
    until = due + timedelta(microseconds=1)
    assert world.delays.find(since=due, until=until).tasks == [world.read(task)]


@pytest.mark.parametrize(
    ("now", "delay_s", "due"),
    [
        (utc(2028, 2, 28, 23, 59, 59), 1, utc(2028, 2, 29)),
        (utc(2028, 2, 29, 12), 365 * 86400, utc(2029, 2, 28, 12)),
        (utc(2028, 3, 25, 12), 86400, utc(2028, 3, 26, 12)),  # 13:00 in Berlin, then 14:00
        (utc(2028, 12, 31, 23, 59, 59), 1, utc(2029, 1, 1)),
    ],
)
def test_a_delay_counts_elapsed_seconds(world: World, now: Any, delay_s: float, due: Any) -> None:
    world.set_clock(ManualClock(now))
    task = world.delays.schedule_delay("note", None, delay_s)
    assert world.read(task).expected_time == due
    assert world.claim(task) == [], "not before the database's clock says so"


# `jitter` distributes due times over a period, for new tasks and for those of a peak


NINE = datetime(2031, 1, 31, 9, tzinfo=timezone.utc)
TEN_MINUTES = timedelta(minutes=10)


def offsets_s(delays: DelayTasks, since: datetime = NINE, tag: str = "mail") -> list[float]:
    """Return how long after `since` the tasks are due, in order."""
    found = delays.find(tag=tag, limit=1000)
    return [(task.due - since).total_seconds() for task in found]


def is_uniform(offsets: list[float], period_s: float) -> bool:
    """Return whether each quarter of the period has between 15 % and 35 % of the times.

    A uniform distribution of 400 times fails this with a probability below one in 100,000.
    """
    quarters = [0, 0, 0, 0]
    for offset in offsets:
        quarters[int(offset / period_s * 4)] += 1
    return all(0.15 < count / len(offsets) < 0.35 for count in quarters)


def test_many_tasks_of_one_call_are_spread_uniformly(delays: DelayTasks) -> None:
    delays.schedule_many(NewTask("mail", n, at=NINE, jitter="10m") for n in range(400))
    offsets = offsets_s(delays)
    assert min(offsets) >= 0
    assert max(offsets) < 600
    assert is_uniform(offsets, 600), offsets


def test_a_call_that_is_repeated_gets_the_same_time(delays: DelayTasks) -> None:
    id = delays.new_id()
    by_id = [delays.schedule_delay("mail", {}, at=NINE, id=id, jitter=TEN_MINUTES) for _ in (1, 2)]
    assert len({task.expected_time for task in by_id}) == 1
    again: Any = {"key": "k", "on_conflict": "replace", "jitter": TEN_MINUTES}
    by_key = [delays.schedule_delay("mail", n, at=NINE, **again) for n in range(3)]
    assert len({task.expected_time for task in by_key}) == 1
    assert by_id[0].expected_time != by_key[0].expected_time


def test_a_delay_counts_the_seconds_up_to_the_spread_time(delays: DelayTasks) -> None:
    task = delays.schedule_delay("mail", {}, 60, jitter=60)
    assert task.create_time is not None
    delay_s = (task.expected_time - task.create_time).total_seconds()
    assert 60 <= delay_s < 120
    assert delay_s <= task.delay_s < delay_s + 1


@pytest.fixture
def peak(delays: DelayTasks) -> Callable[[int], list[DelayedTask]]:
    def make(size: int) -> list[DelayedTask]:
        delays.schedule_many(NewTask("mail", n, at=NINE) for n in range(size))
        time.sleep(0.003)  # the clocks of some databases count milliseconds
        return list(delays.find(tag="mail", limit=1000))

    return make


def test_a_peak_is_spread(delays: DelayTasks, peak: Any) -> None:
    peak(400)
    other = delays.schedule_delay("other", {}, at=NINE)
    filters: Any = {"tag": "mail", "since": NINE, "until": NINE + timedelta(minutes=1)}
    result = delays.bulk.reschedule(jitter="10m", actor="ann", **filters)
    assert counts(result) == (400, 400, 0)
    offsets = offsets_s(delays)
    assert is_uniform(offsets, 600), offsets
    assert delays.get(other).due == NINE
    [entry] = delays.bulk.log(limit=1)
    assert (entry.action, entry.actor, entry.state) == ("reschedule", "ann", "done")
    assert entry.filter["to"] == "spread over 600.0 s"


def test_overdue_tasks_are_spread_from_now_on(world: World) -> None:
    world.put_many(20, -86400.0)
    time.sleep(0.003)
    now = world.now()
    assert world.delays.bulk.reschedule(jitter=3600, tag="note").changed == 20
    offsets = offsets_s(world.delays, now, "note")
    assert min(offsets) >= 0
    assert 600 < max(offsets) < 3660


def test_a_repeated_spread_with_one_start_moves_none_twice(delays: DelayTasks, peak: Any) -> None:
    peak(5)
    first = delays.bulk.reschedule(jitter="10m", tag="mail")
    before = offsets_s(delays)
    again = delays.bulk.reschedule(jitter="10m", tag="mail", updated_until=first.started)
    assert counts(again) == (0, 0, 0)
    assert offsets_s(delays) == before
