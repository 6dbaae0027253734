"""The clock, which follows the database."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest

from delaytasks.core import clock as clock_module
from delaytasks.core.clock import Clock, TokenBuckets, from_us, to_us
from tests.waiting import wait_until

UTC = timezone.utc
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


class FakeTime:
    """The host's two clocks. The wall clock may be wrong and may be set."""

    def __init__(self) -> None:
        self.at = 1000.0
        self.wall = 1_700_000_000.0
        self.askers: set[int] = set()

    def monotonic(self) -> float:
        self.askers.add(threading.get_ident())
        return self.at

    def time_ns(self) -> int:
        return int(self.wall * 1e9)

    def advance(self, seconds: float) -> None:
        self.at += seconds
        self.wall += seconds


class FakeDatabase:
    """A database with a correct clock, whose answers take some time."""

    def __init__(self, host: FakeTime) -> None:
        self.host, self.asked, self.insisted, self.is_up = host, 0, 0, True
        self.meanwhile: Callable[[], object] = lambda: None
        self.trips = [0.0]
        # The database's clock gained this time while the host slept.
        self.ahead_s = 0.0

    def now(self, insists: bool = False) -> datetime:
        self.asked += 1
        self.insisted += insists
        self.meanwhile()
        if not self.is_up:
            raise ConnectionError("down")
        trip = self.trips[self.asked % len(self.trips)]
        self.host.advance(trip / 2)
        told = NOON + timedelta(seconds=self.host.at - 1000 + self.ahead_s)
        self.host.advance(trip / 2)
        return told


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    host = FakeTime()
    monkeypatch.setattr(clock_module, "time", host)
    return host


def right(host: FakeTime) -> datetime:
    return NOON + timedelta(seconds=host.at - 1000)


def apart(clock: Clock, host: FakeTime) -> float:
    return abs((clock.now() - right(host)).total_seconds())


def test_the_clock_follows_the_database_and_not_the_host(host: FakeTime) -> None:
    clock = Clock(FakeDatabase(host).now)
    assert apart(clock, host) < 1e-5
    host.advance(30)
    assert apart(clock, host) < 1e-5
    ahead = host.wall - right(host).timestamp()
    assert clock.offset_s == pytest.approx(ahead, abs=1e-3)


def test_the_clock_is_measured_at_intervals_and_the_fastest_answer_is_used(host: FakeTime) -> None:
    database = FakeDatabase(host)
    database.trips = [0.4, 0.3, 0.002]
    clock = Clock(database.now, refresh_s=60)
    assert apart(clock, host) <= 0.002
    assert database.asked == 3
    for _ in range(50):
        clock.now_us()
    assert database.asked == 3
    host.advance(61)
    clock.now_us()
    assert database.asked == 6
    clock.forget()
    clock.now_us()
    assert database.asked == 9


def test_while_the_database_is_unavailable_the_clock_continues_and_measures_again(
    host: FakeTime,
) -> None:
    database = FakeDatabase(host)
    clock = Clock(database.now, refresh_s=60)
    clock.now_us()
    database.is_up = False
    host.wall += 3600
    host.advance(100)
    assert apart(clock, host) < 1e-5
    asked = database.asked
    clock.now_us()
    assert database.asked == asked  # the clock does not ask the database at every call
    database.is_up = True
    host.advance(2)
    clock.now_us()
    assert database.asked > asked


def test_the_clock_also_waits_after_a_failure_that_took_long(host: FakeTime) -> None:
    database = FakeDatabase(host)
    clock = Clock(database.now, refresh_s=60)
    clock.now_us()
    # The connection attempt times out after five seconds.
    database.is_up, database.meanwhile = (False, lambda: host.advance(5))
    host.advance(61)
    for _ in range(20):
        clock.now_us()
    assert database.asked == 3 + 1


def test_without_inline_refreshes_only_refresh_if_due_measures(host: FakeTime) -> None:
    database = FakeDatabase(host)
    clock = Clock(database.now, refresh_s=60, refreshes_inline=False)
    assert clock.now_us() == int(host.wall * 1e6), "until something is known"
    assert database.asked == 0
    clock.refresh_if_due()
    host.advance(61)
    clock.forget()
    assert apart(clock, host) < 1e-5
    assert database.asked == 3
    clock.refresh_if_due()
    clock.refresh_if_due()
    assert database.asked == 6
    database.is_up = False
    host.advance(61)
    clock.refresh_if_due()  # a failed refresh raises no error in the calling loop
    assert apart(clock, host) < 1e-5


def test_a_forked_child_measures_for_itself(host: FakeTime) -> None:
    database = FakeDatabase(host)
    clock = Clock(database.now, refresh_s=60, refreshes_inline=False)
    clock.refresh_if_due()
    clock.after_fork()
    host.advance(61)
    clock.now_us()
    assert database.asked == 6


@pytest.mark.parametrize("refreshes_inline", [True, False])
def test_after_the_host_slept_the_certain_time_is_measured_again(
    host: FakeTime, refreshes_inline: bool
) -> None:
    database = FakeDatabase(host)
    clock = Clock(database.now, refreshes_inline=refreshes_inline)
    assert clock.certain_now() == right(host)
    # While the host slept, its monotonic clock stood still and the database's clock continued.
    host.wall += 8 * 3600
    database.ahead_s = 8 * 3600
    assert clock.certain_now() == right(host) + timedelta(hours=8)
    host.wall += 3600
    database.ahead_s = 9 * 3600
    clock.refresh_if_due()
    assert clock.now() == right(host) + timedelta(hours=9)
    host.wall += 0.4  # time synchronization makes such steps now and then
    asked = database.asked
    clock.certain_now()
    assert database.asked == asked


def test_without_a_database_the_hosts_own_clock_is_used(host: FakeTime) -> None:
    assert Clock().now() == Clock().certain_now() == from_us(int(host.wall * 1e6))
    database = FakeDatabase(host)
    database.is_up = False
    assert abs(Clock(database.now).now() - from_us(int(host.wall * 1e6))) < timedelta(
        milliseconds=1
    )


def test_threads_that_need_the_certain_time_fail_together(host: FakeTime) -> None:
    database = FakeDatabase(host)
    clock = Clock(database.now)

    def time_out() -> None:
        wait_until(lambda: len(host.askers) == 8, 5, "all threads to ask")
        host.advance(5)
        database.is_up = False

    database.meanwhile = time_out
    with ThreadPoolExecutor(8) as pool:
        looks = [pool.submit(clock.certain_now) for _ in range(8)]
        assert all(isinstance(each.exception(5), ConnectionError) for each in looks)
    assert database.asked == 1


def test_microseconds_since_1970_and_back_lose_nothing() -> None:
    for instant in (
        NOON,
        NOON + timedelta(microseconds=1),
        datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC),
    ):
        assert from_us(to_us(instant)) == instant


def test_the_monotonic_clock_continues_while_the_host_is_suspended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lease ends by the database's clock, which goes on."""
    host = SimpleNamespace(monotonic=lambda: 5.0, clock_gettime={7: 3605.0}.__getitem__)
    monkeypatch.setattr(clock_module, "time", host)
    monkeypatch.setattr(clock_module, "_BOOTTIME", 7)
    assert clock_module.monotonic() == 3605.0
    monkeypatch.setattr(clock_module, "_BOOTTIME", None)
    assert clock_module.monotonic() == 5.0, "the next best clock, where there is no such clock"


def test_of_many_keys_the_bucket_that_was_used_longest_ago_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TokenBuckets, "MOST_KEYS", 2)
    buckets = TokenBuckets(1, 1, lambda: 0.0)
    assert [buckets.take(key) for key in "abc"] == [0, 0, 0]
    assert (buckets.take("c"), buckets.take("a")) == (1, 0)
