"""The timing wheel against a sorted list: both must agree after every operation."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from delaytasks.worker.wheel import TimingWheel

names = st.integers(0, 15)
#: Near the next turns of a small wheel, far beyond them, and in the past.
ahead = st.integers(-5, 40) | st.integers(0, 10**12)


class WheelAndList(RuleBasedStateMachine):
    @initialize(slots=st.sampled_from([1, 2, 7, 8, 64]), now=st.integers(0, 10**12))
    def begin(self, slots: int, now: int) -> None:
        self.wheel: TimingWheel[tuple[int, int]] = TimingWheel(slots, now)
        self.slots = slots
        self.now = now
        self.held: dict[int, tuple[int, tuple[int, int]]] = {}
        self.number = 0

    @rule(name=names, delta=ahead)
    def add(self, name: int, delta: int) -> None:
        self.number += 1
        entry = (name, self.number)
        tick = self.wheel.add(name, self.now + delta, entry)
        if name in self.held:
            assert tick == self.held[name][0], "it stays as it is"
            return
        assert tick == max(self.now + delta, self.now + 1), "overdue ones expire at the next tick"
        self.held[name] = (tick, entry)

    @rule(name=names, rounds=st.integers(0, 5), off=st.integers(-1, 1))
    def add_some_rounds_ahead(self, name: int, rounds: int, off: int) -> None:
        self.add(name, rounds * self.slots + off)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), delta=ahead)
    def add_again(self, data: st.DataObject, delta: int) -> None:
        self.add(data.draw(st.sampled_from(sorted(self.held))), delta)

    @rule(delta=st.integers(0, 20) | st.integers(0, 10**12))
    def advance(self, delta: int) -> None:
        self.now += delta
        due = sorted((tick, entry) for tick, entry in self.held.values() if tick <= self.now)
        came = self.wheel.advance(self.now)
        assert sorted(came) == sorted(entry for _, entry in due), "none early or late, each once"
        ticks = [self.held[name][0] for name, _ in came]
        assert ticks == sorted(ticks), "in the order of ticks"
        for name, _ in came:
            del self.held[name]

    @rule(rounds=st.integers(0, 5), off=st.integers(0, 1))
    def jump_over_rounds(self, rounds: int, off: int) -> None:
        self.advance(rounds * self.slots + off)

    @rule(delta=st.integers(0, 50) | st.integers(0, 10**12))
    def the_clock_goes_back(self, delta: int) -> None:
        self.now -= delta
        if delta % 2:
            assert self.wheel.advance(self.now) == []
        else:
            self.wheel.go_back(self.now)

    @rule()
    def jump_to_the_next_tick(self) -> None:
        tick = self.wheel.next_tick()
        if tick is not None:
            self.advance(tick - self.now)

    @invariant()
    def they_agree(self) -> None:
        if not hasattr(self, "wheel"):
            return
        assert len(self.wheel) == len(self.held)
        tick = self.wheel.next_tick()
        first = min((tick for tick, _ in self.held.values()), default=None)
        assert tick == (None if first is None else min(first, self.now + self.slots)), (
            "no entry is missed or searched for"
        )


WheelAndList.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestTheWheelAgainstASortedList = WheelAndList.TestCase
