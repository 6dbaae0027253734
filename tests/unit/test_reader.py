"""How often a worker without a broker looks at its table, and what it takes from there."""

from __future__ import annotations

from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import pytest

from delaytasks.core.clock import ManualClock
from delaytasks.core.events import Events
from delaytasks.core.interfaces import Entry, Level, QueuePlace
from delaytasks.core.settings import Settings
from delaytasks.maintenance.overdue_queues import MOST_OTHERS
from delaytasks.timers.direct import LOOK_S
from delaytasks.worker import table_poller as reader_module
from delaytasks.worker.table_poller import GROWTH, LEAST_S, MOST_S, TablePoller


class Bench:
    """A reader of a table in which are `rows`; what it hands on is `held`."""

    def __init__(self) -> None:
        self.clock = ManualClock(datetime(2030, 1, 1, tzinfo=timezone.utc))
        self.rows: list[Entry] = []
        self.late: list[Level] = []
        self.held: list[Entry] = []
        self.asked: list[tuple[str, list[int]]] = []
        self.is_up = True
        sweeps = SimpleNamespace(
            look=self._look, levels_of=self._levels_of, next_queues=self._next_queues
        )
        workers = SimpleNamespace(alive=list)
        shard = SimpleNamespace(
            number=0, clock=self.clock, named=str, close=lambda: None, policies=SimpleNamespace(known=None),
            store=SimpleNamespace(sweeps=sweeps, workers=workers),
        )  # fmt: skip
        self.events = Events()
        delays = SimpleNamespace(
            settings=Settings(), events=self.events, processes=SimpleNamespace(queues=["default"])
        )
        delays.queues = SimpleNamespace(all=lambda: {"default", "mail"})
        self.processes = delays.processes
        shard_health = SimpleNamespace(hear=lambda *_: self.is_up)
        self.lane = SimpleNamespace(drains=0)
        dispatcher = SimpleNamespace(
            shard_health=shard_health,
            drain=lambda *args: self.asked.append(args[:2]),
            lanes=[self.lane],
        )
        runtime: Any = SimpleNamespace(
            delays=delays, dispatcher=dispatcher, hold=self.held.extend, refuse=print
        )
        made: Any = shard
        self.reader = TablePoller(runtime, made, "me")
        self.reader._members = SimpleNamespace(learn=lambda *_: None, is_mine=lambda entry: True)  # type: ignore[assignment]

    def _levels_of(self, queues: list[str], late_s: float) -> list[Level]:
        return [level for level in self.late if level.queue in queues]

    def _next_queues(self, after: QueuePlace, most: int) -> tuple[set[str], QueuePlace]:
        queues = sorted(
            {level.queue for level in self.late if after.tasks is None or level.queue > after.tasks}
        )[:most]
        return set(queues), QueuePlace(queues[-1] if len(queues) == most else None)

    def _look(self, since: datetime, until: datetime, most: int, _: Any) -> list[Entry]:
        return self.rows[:most]

    def entries(self, count: int, in_s: float) -> list[Entry]:
        due = self.clock.now_us() + int(in_s * 1e6)
        return [Entry(n, 0, due + n) for n in range(1, count + 1)]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def rests(bench: Bench, count: int) -> list[float]:
    return [bench.reader._look() for _ in range(count)]


def test_a_table_that_tells_nothing_is_looked_at_more_rarely_while_nothing_is_late(
    bench: Bench,
) -> None:
    found = rests(bench, 20)
    assert found[0] == pytest.approx(LEAST_S * GROWTH)
    assert found == sorted(found)
    assert found[-1] == MOST_S


def test_and_often_again_once_something_was_found_late(bench: Bench) -> None:
    rests(bench, 20)
    bench.rows = bench.entries(1, in_s=-0.01)
    assert rests(bench, 1) == [LEAST_S]
    assert bench.held == bench.rows
    assert rests(bench, 1) == [pytest.approx(LEAST_S * GROWTH)], (
        "it was handed on already, and is not late again"
    )
    assert len(bench.held) == 1


def test_a_table_that_tells_is_looked_at_once_a_second(bench: Bench) -> None:
    bench.reader.listener.hears = True
    assert rests(bench, 3) == [LOOK_S] * 3


def test_where_more_is_near_than_one_look_takes_the_next_comes_before_it_is_due(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "MOST_ROWS", 10)
    bench.reader.listener.hears = True
    bench.rows = bench.entries(11, in_s=0.4)
    assert rests(bench, 1) == [pytest.approx(0.2, abs=0.001)]
    assert len(bench.held) == 10


def test_what_is_late_is_asked_for_once_a_second_by_queue_and_priority(bench: Bench) -> None:
    bench.late = [Level("default", 0), Level("default", 9), Level("others", 0)]
    rests(bench, 5)
    assert bench.asked == [("default", [0, 9])]
    bench.reader.look_now()
    rests(bench, 1)
    assert len(bench.asked) == 2


def test_who_serves_all_queues_asks_for_a_few_of_the_unknown_ones_and_always_for_those_it_knows(
    bench: Bench,
) -> None:
    bench.processes.queues = ["*"]
    names = [f"q{number:04}" for number in range(3 * MOST_OTHERS)]
    bench.late = [Level("default", 0), *(Level(name, 0) for name in names)]
    bench.lane.drains = MOST_OTHERS - 20
    for _ in range(3):
        bench.reader.look_now()
        rests(bench, 1)
    asked = [queue for queue, _ in bench.asked]
    assert asked.count("default") == 3
    assert len(asked) <= 3 + 3 * 20
    assert len({*asked} - {"default"}) > 40, "each has its turn"
    bench.lane.drains = 2 * MOST_OTHERS
    bench.asked.clear()
    bench.reader.look_now()
    rests(bench, 1)
    assert bench.asked == [("default", [0])], "the others wait until there is room"


def test_a_database_that_is_down_is_left_alone(bench: Bench) -> None:
    bench.is_up, bench.rows = False, bench.entries(1, in_s=0)
    assert rests(bench, 1) == [LOOK_S]
    assert bench.held == []
