"""The `redis` timer against a model: no entry is lost, even if pollers stop midway."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, ClassVar

import pytest
from hypothesis import settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from chaos.simulation.redis import Redis as SimulatedRedis
from chaos.simulation.redislink import Pipe, Pipeline
from tests.fuzzing import ASKED
from tests.world import Entry
from tests.world.recording import RedisTimerHarness

AHEAD_MS, RETURN_S = RedisTimerHarness.ahead_ms, RedisTimerHarness.return_s
GRACE_MS, RETURN_MS = 1000, int(RETURN_S * 1000)
Name = tuple[int, int, int]
names = st.tuples(st.integers(1, 12), st.integers(0, 2), st.sampled_from([0, 0, 0, 5]))


class SimulatedClient:
    """A client of the Redis of simulations, without their faults."""

    generation = 0

    def __init__(self) -> None:
        self._redis = SimulatedRedis(lambda *_: None)
        self.script_load = self._redis.load

    def pipeline(self, transaction: bool) -> Pipe:
        server: Any = self
        return Pipe(server)

    def execute(self, commands: Pipeline, _generation: int) -> list[Any]:
        return [self._redis.call(*words) for words in commands]

    def zrange(self, key: str, *_: int) -> list[bytes]:
        return [member.encode() for member in self._redis.sets.get(key, ())]

    def scan_iter(self, *_: Any, **__: Any) -> list[bytes]:
        return []

    def close(self) -> None: ...


class RedisTimerModel(RuleBasedStateMachine):
    """The waiting entries by due time in microseconds, and the prepared entries by slot."""

    #: The URL of a Redis, or "" for the simulated one.
    url: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.bench = RedisTimerHarness(self.url or "redis://nobody", _redis_slots=2)
        if not self.url:
            self.bench.timer.link._client = SimulatedClient()
        self.timer = self.bench.timer
        self.waiting: dict[Name, int] = {}
        #: When a prepared entry returns, in milliseconds.
        self.prepared: dict[Name, float] = {}
        self.taken: list[Any] = []

    def close(self) -> None:
        self.bench.close()

    teardown = close

    @initialize()
    def look(self) -> None:
        self.bench.take()

    @property
    def now(self) -> float:
        """Return the time in milliseconds, as Redis uses it."""
        return self.bench.clock.now_us() / 1000

    def entry(self, name: Name, due_us: int = 0) -> Entry:
        return Entry(name[0], name[1], due_us, "default", name[2])

    @rule(armed=st.lists(st.tuples(names, st.integers(-2_000_000, 3_000_000)), max_size=8))
    def arm(self, armed: list[tuple[Name, int]]) -> None:
        times = {name: self.bench.clock.now_us() + in_us for name, in_us in armed}
        assert self.timer.arm([self.entry(name, due_us) for name, due_us in times.items()])
        self.waiting |= times

    @rule(ms=st.sampled_from([0.001, 0.3, 1, AHEAD_MS, 300, 1000, RETURN_MS]))
    def wait(self, ms: float) -> None:
        self.bench.clock.advance(ms / 1000)

    @rule(most=st.integers(1, 4))
    def take(self, most: int) -> None:
        """Take entries as a poller that may hand them on later, or never."""
        for some in self.bench.take(most):
            names, slot = {*self.waiting, *self.prepared}, self.timer.slot
            here = {name for name in names if slot(self.entry(name)) == some.slot}
            stale = [name for name in here if self.prepared.get(name, self.now + 1) <= self.now]
            self.waiting |= dict.fromkeys(stale, self.bench.clock.now_us())
            late_us = (int(self.now) - GRACE_MS) * 1000
            soon_us = self.bench.clock.now_us() + AHEAD_MS * 1000
            late = [name for name in here if self.waiting.get(name, late_us) < late_us]
            for name in late:
                del self.waiting[name]
            for name in stale:
                del self.prepared[name]
            due = [name for name in here if self.waiting.get(name, soon_us + 1) <= soon_us]
            got = [(entry.id, entry.version, entry.priority) for entry in some.entries]
            counts = len(stale), len(late), min(len(due), most)
            assert (some.returned, some.dropped, len(got)) == counts
            assert all(name[2] == some.slot.priority for name in late)
            times = {name: self.waiting.pop(name) for name in got}
            assert [entry.due_us for entry in some.entries] == sorted(times.values())
            assert max(times.values(), default=0) <= min(
                (self.waiting[n] for n in due if n in self.waiting), default=soon_us
            )
            self.prepared |= dict.fromkeys(got, some.ticket)
            assert self.now + RETURN_MS - 2 < some.ticket if got else some.ticket == 0
            later = [us / 1000 - AHEAD_MS for name, us in self.waiting.items() if name in here]
            later += [back_ms for name, back_ms in self.prepared.items() if name in here]
            assert some.next_ms == min(later, default=float("inf"))
            self.taken.append(some)

    @rule(pick=st.integers(0, 99))
    def hand_on(self, pick: int) -> None:
        """Hand entries on as late as possible.

        An entry that returned or was armed again meanwhile must not be deleted.
        """
        if self.taken:
            some = self.taken.pop(pick % len(self.taken))
            self.bench.hand_on([some])
            for entry in some.entries:
                name = (entry.id, entry.version, entry.priority)
                if self.prepared.get(name) == some.ticket and self.timer.slot(entry) == some.slot:
                    del self.prepared[name]

    @invariant()
    def each_entry_is_where_the_model_has_it(self) -> None:
        for place, model in (("store", self.waiting), ("prepare", self.prepared)):
            expected = [f"{n[0]}:{n[1]}" for n in model]
            assert sorted(m.decode() for m in self.bench.members(place)) == sorted(expected)


def test_a_ticket_is_not_reused_after_its_entries_were_armed_again(redis_url: str) -> None:
    RedisTimerModel.url = redis_url
    one, other = (1, 0, 0), (8, 0, 0)
    with closing(RedisTimerModel()) as model:
        model.look()
        model.arm([(one, 0)])
        model.take(1)
        model.arm([(one, 0), (other, -1)])
        model.hand_on(0)
        model.take(1)
        model.hand_on(0)
        model.each_entry_is_where_the_model_has_it()


@pytest.mark.parametrize("is_simulated", [False, True])
def test_the_timer_behaves_like_the_model_and_so_with_the_redis_of_simulations(
    redis_url: str, is_simulated: bool
) -> None:
    RedisTimerModel.url = "" if is_simulated else redis_url
    stateful.run_state_machine_as_test(
        RedisTimerModel,
        settings=settings(max_examples=ASKED or 25, stateful_step_count=20, deadline=None),
    )


@pytest.fixture
def bench(redis_url: str) -> Iterator[RedisTimerHarness]:
    with closing(RedisTimerHarness(redis_url)) as made:
        yield made


def test_concurrent_pollers_pass_on_each_entry_once_and_abandoned_entries_return(
    bench: RedisTimerHarness,
) -> None:
    count, begin = 3000, threading.Barrier(4)
    bench.timer.arm([bench.entry(id, priority=id % 3) for id in range(1, count + 1)])
    handed, fallen = list[int](), list[int]()

    def move(_: int) -> None:
        begin.wait()
        for turn in itertools.count():
            taken = bench.take(20)
            ids = [entry.id for some in taken for entry in some.entries]
            if not ids:
                return
            if turn % 3 == 2:  # it dies before it hands its entries on
                fallen.extend(ids)
            else:
                handed.extend(ids)
                bench.hand_on(taken)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(move, range(4)))
    assert sorted(handed + fallen) == [*range(1, count + 1)]
    assert fallen, "some pollers died"
    left = sorted(int(member.split(b":")[0]) for member in bench.members("prepare"))
    assert left == sorted(fallen)
    bench.clock.advance(RETURN_S + 1)
    again: list[int] = []
    while portion := bench.take_ids():
        again += portion
    assert sorted(again) == left
