"""The timing wheel and the thread that turns it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timezone

import pytest

from delaytasks.core.clock import Clock
from delaytasks.core.events import Events
from delaytasks.timers.timing_wheel import TICK_US, SharedWheel, TimingWheel, WheelThread
from tests.waiting import wait_until

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
    made: list[Collector] = []

    def new(clock: Clock) -> Collector:
        made.append(Collector(clock))
        made[-1].thread.loop.start()
        return made[-1]

    yield new
    for one in made:
        one.thread.stop()


# -- the timing wheel -----------------------------------------------------------------------------


def test_none_can_be_an_entry() -> None:
    wheel: TimingWheel[None] = TimingWheel(slots=8)
    wheel.add("a", 3, None)
    assert wheel.advance(100) == [None]


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
def test_a_due_time_within_a_tick_is_rounded_up(start: Start, offset_us: int) -> None:
    clock = SetClock()
    collector = start(clock)
    collector.add("a", offset_us)
    begins_us = START_US + -(-offset_us // TICK_US) * TICK_US
    clock.us = begins_us - 1
    collector.add("b", 5 * TICK_US)
    looked = clock.asked
    wait_until(lambda: clock.asked > looked + 10, 5, "the thread to look again", 0.001)
    assert collector.names == []
    clock.us = begins_us
    wait_until(lambda: collector.names == ["a"], 5, "the entry", 0.001)


def test_entries_due_in_quick_succession_are_delivered_together_but_not_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SetClock()
    collector = Collector(clock)
    monkeypatch.setattr(
        "delaytasks.timers.timing_wheel.monotonic", lambda: 1000 + (clock.us - START_US) / 1e6
    )
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


def test_an_idle_thread_does_not_read_the_clock(start: Start) -> None:
    clock = SetClock()
    collector = start(clock)
    collector.add("far", 3600_000_000)
    wait_until(lambda: collector.wheel._next_tick is not None, 5, "the thread to sleep")
    asked = clock.asked
    assert not threading.Event().wait(0.2)
    assert clock.asked - asked <= 3, "it sleeps, for seconds at a time"


def test_after_a_day_of_suspension_all_due_entries_are_delivered_immediately(start: Start) -> None:
    clock = SetClock()
    collector = start(clock)
    for n in range(100):
        collector.add(f"{n}", n * 600_000_000, START_US)
    clock.us += 24 * 3600 * 1_000_000
    collector.add("look", 0)
    wait_until(lambda: len(collector.came) == 101, 2, "all of them", 0.001)
    assert [name for name in collector.names if name != "look"] == [f"{n}" for n in range(100)]


def test_a_clock_that_was_set_back_does_not_delay_new_entries(start: Start) -> None:
    clock = SetClock()
    collector = start(clock)
    collector.add("first", 0)
    clock.us += TICK_US
    wait_until(lambda: collector.names == ["first"], 2, "the first", 0.001)
    clock.us -= 3600_000_000
    collector.add("second", 0)
    clock.us += TICK_US
    wait_until(lambda: collector.names == ["first", "second"], 2, "the second", 0.001)


def test_entries_can_be_added_while_others_are_delivered(start: Start) -> None:
    goes_on = threading.Event()
    came: list[str] = []

    def slow(entries: list[str]) -> None:
        came.extend(entries)
        assert goes_on.wait(5)

    clock = Clock()
    wheel: SharedWheel[str] = SharedWheel(clock)
    thread = WheelThread(wheel, slow, Events())
    thread.loop.start()
    wheel.add([("a", clock.now_us(), "a")])
    wait_until(lambda: came, 2, "the first", 0.001)
    wheel.add([("b", clock.now_us() + 10_000, "b"), ("c", clock.now_us(), "c")])
    assert came == ["a"]
    goes_on.set()
    wait_until(lambda: sorted(came) == ["a", "b", "c"], 2, "the others", 0.001)
    thread.stop()
