"""The clock, which follows the database, and the entries that wait until they are due."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta

import pytest

from tests.waiting import wait_until
from tests.world.clocks import TICK_US, Clock, Collector, Database, Host, SetClock, from_us


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def apart(clock: Clock, host: Host) -> float:
    return abs((clock.now() - host.right).total_seconds())


def test_the_clock_follows_the_database_and_measures_at_intervals(host: Host) -> None:
    database = Database(host)
    database.trips = [0.4, 0.3, 0.002]
    clock = database.clock()
    assert apart(clock, host) <= 0.002, "the fastest answer is used"
    ahead = host.wall - host.right.timestamp()
    assert clock.offset_s == pytest.approx(ahead, abs=0.01)
    for _ in range(50):
        clock.now_us()
    assert database.asked == 3
    host.advance(61)
    assert apart(clock, host) <= 0.002
    assert database.asked == 6
    clock.forget()
    clock.now_us()
    assert database.asked == 9


def test_without_the_database_the_clock_continues_and_measures_again(host: Host) -> None:
    database = Database(host)
    clock = database.clock()
    clock.now_us()
    # The connection attempt times out after five seconds.
    database.is_up, database.meanwhile = (False, lambda: host.advance(5))
    host.wall += 3600
    host.advance(100)
    for _ in range(20):
        assert apart(clock, host) < 1e-5
    assert database.asked == 3 + 1, "it does not ask at every call"
    database.is_up, database.meanwhile = (True, lambda: None)
    host.advance(2)
    clock.now_us()
    assert database.asked > 4


def test_without_inline_refreshes_only_refresh_if_due_measures(host: Host) -> None:
    database = Database(host)
    clock = database.clock(refreshes_inline=False)
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
    database.is_up, asked = True, database.asked
    clock.after_fork()
    host.advance(61)
    clock.now_us()
    assert database.asked == asked + 3, "a forked child measures for itself"


@pytest.mark.parametrize("refreshes_inline", [True, False])
def test_the_certain_time_is_measured_after_a_sleep(host: Host, refreshes_inline: bool) -> None:
    database = Database(host)
    clock = database.clock(refreshes_inline=refreshes_inline)
    assert clock.certain_now() == host.right
    # While the host slept, its monotonic clock stood still and the database's clock continued.
    host.wall += 8 * 3600
    database.ahead_s = 8 * 3600
    assert clock.certain_now() == host.right + timedelta(hours=8)
    host.wall += 3600
    database.ahead_s = 9 * 3600
    clock.refresh_if_due()
    assert clock.now() == host.right + timedelta(hours=9)
    host.wall += 0.4  # time synchronization makes such steps now and then
    asked = database.asked
    clock.certain_now()
    assert database.asked == asked


def test_without_a_database_the_hosts_own_clock_is_used(host: Host) -> None:
    assert Clock().now() == Clock().certain_now() == from_us(int(host.wall * 1e6))
    database = Database(host)
    database.is_up = False
    off = database.clock().now() - from_us(int(host.wall * 1e6))
    assert abs(off) < timedelta(milliseconds=1)


def test_threads_that_need_the_certain_time_fail_together(host: Host) -> None:
    database = Database(host)
    clock = database.clock()

    def time_out() -> None:
        wait_until(lambda: len(host.askers) == 8, 5, "all threads to ask")
        host.advance(5)
        database.is_up = False

    database.meanwhile = time_out
    with ThreadPoolExecutor(8) as pool:
        looks = [pool.submit(clock.certain_now) for _ in range(8)]
        assert all(isinstance(each.exception(5), ConnectionError) for each in looks)


# -- the timing wheel and the thread that turns it -------------------------------------------------


def test_an_earlier_entry_wakes_the_thread_and_a_stop_returns_the_others() -> None:
    clock = Clock()
    with closing(Collector(clock)) as collector:
        collector.add("far", 3600_000_000)
        wait_until(lambda: collector.sleeps, 5, "the thread to sleep")
        due_us = collector.add("near", 50_000)
        wait_until(lambda: collector.names, 10, "the near one", 0.001)
        assert 0 <= clock.now_us() - due_us < 500_000
        assert (collector.names, collector.close(), collector.close()) == (["near"], ["far"], [])


def test_a_clock_set_back_does_not_delay_new_entries() -> None:
    clock = SetClock()
    with closing(Collector(clock)) as collector:
        for names in (["first"], ["first", "second"]):
            collector.add(names[-1], 0)
            clock.us += TICK_US
            wait_until(lambda names=names: collector.names == names, 5, "the entry", 0.001)  # type: ignore[misc]
            clock.us -= 3600_000_000
