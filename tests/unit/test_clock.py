"""The clock, which follows the database, and the entries that wait until they are due."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta

import pytest

from tests.waiting import wait_until
from tests.world.clocks import TICK_US, Clock, Collector, Database, Host, SetClock, from_us


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def apart(clock: Clock, host: Host) -> float:
    return abs((clock.now() - host.right).total_seconds())


def test_the_clock_follows_the_database_and_not_the_host(host: Host) -> None:
    clock = Database(host).clock()
    assert apart(clock, host) < 1e-5
    host.advance(30)
    assert apart(clock, host) < 1e-5
    ahead = host.wall - host.right.timestamp()
    assert clock.offset_s == pytest.approx(ahead, abs=1e-3)


def test_the_clock_is_measured_at_intervals_and_the_fastest_answer_is_used(host: Host) -> None:
    database = Database(host)
    database.trips = [0.4, 0.3, 0.002]
    clock = database.clock()
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


def test_without_the_database_the_clock_continues_and_measures_again(host: Host) -> None:
    database = Database(host)
    clock = database.clock()
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


def test_the_clock_also_waits_after_a_failure_that_took_long(host: Host) -> None:
    database = Database(host)
    clock = database.clock()
    clock.now_us()
    # The connection attempt times out after five seconds.
    database.is_up, database.meanwhile = (False, lambda: host.advance(5))
    host.advance(61)
    for _ in range(20):
        clock.now_us()
    assert database.asked == 3 + 1


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


def test_a_forked_child_measures_for_itself(host: Host) -> None:
    database = Database(host)
    clock = database.clock(refreshes_inline=False)
    clock.refresh_if_due()
    clock.after_fork()
    host.advance(61)
    clock.now_us()
    assert database.asked == 6


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

Start = Callable[[Clock], Collector]


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:

        def start(clock: Clock) -> Collector:
            collector = Collector(clock)
            stack.callback(collector.stop)
            collector.start()
            return collector

        yield start


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def collector(start: Start, clock: SetClock) -> Collector:
    """A thread whose clock a test sets."""
    return start(clock)


def wait_for(collector: Collector, *names: str) -> None:
    wait_until(lambda: collector.names == [*names], 5, "the entries", 0.001)


def test_entries_are_delivered_when_they_are_due_and_never_early(start: Start) -> None:
    collector = start(Clock())
    due = {f"{n}": collector.add(f"{n}", 1000 * (n * 37 % 200) + n * 13) for n in range(200)}
    wait_until(lambda: len(collector.came) == 200, 5, "all entries")
    assert sorted(collector.names) == sorted(due)
    late = [now - due[name] for name, now in collector.came]
    assert min(late) >= 0, "none is early"
    assert sorted(late)[100] < 20_000, "and most are on time"


@pytest.mark.parametrize("offset_us", [1, 999, 1000, 1001])
def test_due_times_are_rounded_up(collector: Collector, clock: SetClock, offset_us: int) -> None:
    collector.add("a", offset_us)
    begins_us = clock.us + -(-offset_us // TICK_US) * TICK_US
    clock.us = begins_us - 1
    collector.add("b", 5 * TICK_US)
    looked = clock.asked
    wait_until(lambda: clock.asked > looked + 10, 5, "the thread to look again", 0.001)
    assert collector.names == []
    clock.us = begins_us
    wait_for(collector, "a")


def test_entries_due_in_quick_succession_are_delivered_together_but_not_after_a_pause(
    clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = Collector(clock)
    collector.follow(clock, monkeypatch)
    for _ in range(2):
        collector.came.clear()
        for n in range(100):
            clock.us += 1000
            collector.wheel.add([(f"{n}", clock.us, f"{n}")])
            rests_s = collector.turn()
            assert rests_s is None or 0 < rests_s <= 0.005
        sizes = [*Counter(came_us for _, came_us in collector.came).values()]
        assert sizes[:10] == [1] * 10
        assert set(sizes[15:]) == {5}
        clock.us += 55_000
        collector.turn()


def test_a_clock_set_back_does_not_delay_new_entries(collector: Collector, clock: SetClock) -> None:
    for names in (["first"], ["first", "second"]):
        collector.add(names[-1], 0)
        clock.us += TICK_US
        wait_for(collector, *names)
        clock.us -= 3600_000_000


def test_entries_can_be_added_while_others_are_delivered() -> None:
    goes_on, collector = threading.Event(), Collector(Clock())
    collector.meanwhile = lambda: goes_on.wait(10)
    collector.start()
    collector.add("a", 0)
    wait_until(lambda: collector.came, 10, "the first", 0.001)
    collector.add("b", 10_000)
    collector.add("c", 0)
    assert collector.names == ["a"]
    goes_on.set()
    wait_until(lambda: sorted(collector.names) == ["a", "b", "c"], 10, "the others", 0.001)
    collector.stop()
