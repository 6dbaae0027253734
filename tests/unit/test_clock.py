"""The clock, which follows the database."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest

from delaytasks.core import clock as clock_module
from delaytasks.core.clock import Clock, TokenBuckets, from_us, to_us
from delaytasks.core.events import Events
from delaytasks.timers import timing_wheel
from delaytasks.timers.timing_wheel import TICK_US, SharedWheel, TimingWheel, WheelThread
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


def test_without_the_database_the_clock_continues_and_measures_again(host: FakeTime) -> None:
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
def test_the_certain_time_is_measured_after_a_sleep(host: FakeTime, refreshes_inline: bool) -> None:
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
    off = Clock(database.now).now() - from_us(int(host.wall * 1e6))
    assert abs(off) < timedelta(milliseconds=1)


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


def test_the_monotonic_clock_continues_during_a_suspension(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease ends by the database's clock, which goes on."""
    host = SimpleNamespace(monotonic=lambda: 5.0, clock_gettime={7: 3605.0}.__getitem__)
    monkeypatch.setattr(clock_module, "time", host)
    monkeypatch.setattr(clock_module, "_BOOTTIME", 7)
    assert clock_module.monotonic() == 3605.0
    monkeypatch.setattr(clock_module, "_BOOTTIME", None)
    assert clock_module.monotonic() == 5.0, "the next best clock, where there is no such clock"


def test_the_bucket_that_was_used_longest_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenBuckets, "MOST_KEYS", 2)
    buckets = TokenBuckets(1, 1, lambda: 0.0)
    assert [buckets.take(key) for key in "abc"] == [0, 0, 0]
    assert (buckets.take("c"), buckets.take("a")) == (1, 0)


# -- the timing wheel and the thread that turns it -------------------------------------------------

START_US = int(datetime(2030, 1, 1, tzinfo=timezone.utc).timestamp() * 1e6)


class SetClock(Clock):
    """A clock that a test sets. `asked` counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.us = START_US
        self.asked = 0

    def now_us(self) -> int:
        self.asked += 1
        return self.us


class Collector:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.came: list[tuple[str, int]] = []
        self.wheel: SharedWheel[str] = SharedWheel(clock)
        self.thread = WheelThread(self.wheel, self.take, Events())

    def take(self, entries: list[str]) -> None:
        now = self.clock.now_us()
        self.came += [(entry, now) for entry in entries]

    def add(self, name: str, in_us: int, start_us: int | None = None) -> int:
        due_us = (self.clock.now_us() if start_us is None else start_us) + in_us
        self.wheel.add([(name, due_us, name)])
        return due_us

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.came]


Start = Callable[[Clock], Collector]


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:

        def start(clock: Clock) -> Collector:
            collector = Collector(clock)
            stack.callback(collector.thread.stop)
            collector.thread.loop.start()
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


# -- the timing wheel -----------------------------------------------------------------------------


def test_the_time_of_a_jump_of_days_depends_only_on_the_number_of_entries() -> None:
    day = 24 * 3600 * 1000
    wheel: TimingWheel[int] = TimingWheel(now=0)
    for n in range(1000):
        wheel.add(n, (n % 10) * day + n + 1, n)
    began = time.monotonic()
    came = wheel.advance(9 * day + 500)
    assert time.monotonic() - began < 0.5
    assert len(came) == 950
    assert came == sorted(came, key=lambda n: (n % 10, n))
    assert wheel.next_tick() == 9 * day + 509 + 1


def test_entries_that_are_not_due_take_no_time_at_a_tick() -> None:
    wheel: TimingWheel[int] = TimingWheel(now=0)
    for n in range(50_000):
        wheel.add(n, 10_000_000 + n, n)
    began = time.monotonic()
    for tick in range(1, 2001):
        wheel.advance(tick)
    assert time.monotonic() - began < 0.5


# -- the thread -----------------------------------------------------------------------------------


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
    begins_us = START_US + -(-offset_us // TICK_US) * TICK_US
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
    monkeypatch.setattr(timing_wheel, "monotonic", lambda: 1000 + (clock.us - START_US) / 1e6)
    for _ in range(2):
        collector.came.clear()
        for n in range(100):
            clock.us += 1000
            collector.wheel.add([(f"{n}", clock.us, f"{n}")])
            rests_s = collector.thread._turn()
            assert rests_s is None or 0 < rests_s <= 0.005
        sizes = [*Counter(came_us for _, came_us in collector.came).values()]
        assert sizes[:10] == [1] * 10
        assert set(sizes[15:]) == {5}
        clock.us += 55_000
        collector.thread._turn()


def test_an_earlier_entry_wakes_the_thread(start: Start) -> None:
    collector = start(Clock())
    collector.add("far", 3600_000_000)
    wait_until(lambda: collector.wheel._next_tick is not None, 5, "the thread to sleep")
    due_us = collector.add("near", 50_000)
    wait_until(lambda: collector.came, 2, "the near one", 0.001)
    assert collector.names == ["near"]
    assert 0 <= collector.came[0][1] - due_us < 500_000
    assert len(collector.wheel) == 1


def test_stopping_returns_the_remaining_entries_and_ends_their_delivery(start: Start) -> None:
    collector = start(Clock())
    for n in range(100):
        collector.add(f"{n}", 20_000 + n * 1000)
    wait_until(lambda: len(collector.came) > 10, 5, "some of them", 0.0005)
    held = collector.thread.stop()
    came = list(collector.names)
    assert sorted(held + came, key=int) == [f"{n}" for n in range(100)], "each is in one place"
    assert held
    assert collector.thread.stop() == []
    assert collector.wheel.late_s == 0, "nothing waits in vain"
    assert collector.names == came


def test_an_idle_thread_does_not_read_the_clock(collector: Collector, clock: SetClock) -> None:
    collector.add("far", 3600_000_000)
    wait_until(lambda: collector.wheel._next_tick is not None, 5, "the thread to sleep")
    asked = clock.asked
    assert not threading.Event().wait(0.2)
    assert clock.asked - asked <= 3, "it sleeps, for seconds at a time"


def test_after_a_day_of_suspension_all_are_delivered(collector: Collector, clock: SetClock) -> None:
    for n in range(100):
        collector.add(f"{n}", n * 600_000_000, START_US)
    clock.us += 24 * 3600 * 1_000_000
    collector.add("look", 0)
    wait_until(lambda: len(collector.came) == 101, 2, "all of them", 0.001)
    assert [name for name in collector.names if name != "look"] == [f"{n}" for n in range(100)]


def test_a_clock_set_back_does_not_delay_new_entries(collector: Collector, clock: SetClock) -> None:
    for names in (["first"], ["first", "second"]):
        collector.add(names[-1], 0)
        clock.us += TICK_US
        wait_for(collector, *names)
        clock.us -= 3600_000_000


def test_entries_can_be_added_while_others_are_delivered() -> None:
    goes_on, collector = threading.Event(), Collector(Clock())
    take = collector.take
    collector.thread._on_due = lambda entries: take(entries) or goes_on.wait(5)  # type: ignore[assignment]
    collector.thread.loop.start()
    collector.add("a", 0)
    wait_until(lambda: collector.came, 2, "the first", 0.001)
    collector.add("b", 10_000)
    collector.add("c", 0)
    assert collector.names == ["a"]
    goes_on.set()
    wait_until(lambda: sorted(collector.names) == ["a", "b", "c"], 2, "the others", 0.001)
    collector.thread.stop()
