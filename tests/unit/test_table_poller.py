"""Test how often a worker without a broker reads its table, and which entries it takes."""

from __future__ import annotations

from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import pytest

from delaytasks.core.events import Events
from delaytasks.core.interfaces import Entry, Level, QueuePlace
from delaytasks.core.settings import Settings
from delaytasks.maintenance.sweeper import MOST_OTHERS
from delaytasks.timers.direct import NOTIFIED_POLL_S
from delaytasks.worker import table_poller
from delaytasks.worker.table_poller import (
    MAX_POLL_REST_S,
    MIN_POLL_REST_S,
    REST_GROWTH,
    TablePoller,
)
from tests.recording import ManualClock


class PollerHarness:
    """A poller of a table that contains `rows`. The entries that it passes on are in `held`."""

    def __init__(self) -> None:
        self.clock = ManualClock(datetime(2030, 1, 1, tzinfo=timezone.utc))
        self.rows: list[Entry] = []
        self.late: list[Level] = []
        self.held: list[Entry] = []
        self.asked: list[tuple[str, list[int]]] = []
        sweeps = SimpleNamespace(
            first_due_between=self._look, levels_of=self._levels_of, next_queues=self._next_queues
        )
        workers = SimpleNamespace(all=list)
        self.events = Events()
        runtime: Any = SimpleNamespace(
            clock=self.clock,
            policy_cache=SimpleNamespace(known=None),
            store=SimpleNamespace(sweeps=sweeps, workers=workers, notices=None, close=lambda: None),
            settings=Settings(),
            events=self.events,
            queues=SimpleNamespace(all=lambda: {"default", "mail"}),
        )
        self.processes: Any = SimpleNamespace(queues=["default"])
        self.dispatcher: Any = SimpleNamespace(
            start_drain=lambda *args: self.asked.append(args),
            receive=self.held.extend,
            drain_count=0,
        )
        timer: Any = SimpleNamespace(subscribe=lambda _: None)
        self.poller = TablePoller(runtime, timer, self.processes, self.dispatcher, "me")
        self.poller._shares = SimpleNamespace(learn=lambda *_: None, is_mine=lambda entry: True)  # type: ignore[assignment]

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
def bench() -> PollerHarness:
    return PollerHarness()


def rests(bench: PollerHarness, count: int) -> list[float]:
    return [bench.poller._turn() for _ in range(count)]


def test_a_table_without_notices_is_read_more_rarely_while_nothing_is_late(
    bench: PollerHarness,
) -> None:
    found = rests(bench, 20)
    assert found[0] == pytest.approx(MIN_POLL_REST_S * REST_GROWTH)
    assert found == sorted(found)
    assert found[-1] == MAX_POLL_REST_S


def test_a_table_without_notices_is_read_often_again_after_a_late_row(bench: PollerHarness) -> None:
    rests(bench, 20)
    bench.rows = bench.entries(1, in_s=-0.01)
    assert rests(bench, 1) == [MIN_POLL_REST_S]
    assert bench.held == bench.rows
    assert rests(bench, 1) == [pytest.approx(MIN_POLL_REST_S * REST_GROWTH)], (
        "it was handed on already, and is not late again"
    )
    assert len(bench.held) == 1


def test_a_table_with_notices_is_read_once_a_second(bench: PollerHarness) -> None:
    bench.poller.listener.is_listening = True
    assert rests(bench, 3) == [NOTIFIED_POLL_S] * 3


def test_if_a_read_is_full_the_next_one_comes_before_the_remaining_rows_are_due(
    bench: PollerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_poller, "MAX_READ_ROWS", 10)
    bench.poller.listener.is_listening = True
    bench.rows = bench.entries(11, in_s=0.4)
    assert rests(bench, 1) == [pytest.approx(0.2, abs=0.001)]
    assert len(bench.held) == 10


def test_drains_of_late_rows_are_requested_once_a_second_by_queue_and_priority(
    bench: PollerHarness,
) -> None:
    bench.late = [Level("default", 0), Level("default", 9), Level("others", 0)]
    rests(bench, 5)
    assert bench.asked == [("default", [0, 9])]
    bench.poller.wake()
    rests(bench, 1)
    assert len(bench.asked) == 2


def test_a_worker_of_all_queues_drains_known_queues_always_and_few_unknown_ones(
    bench: PollerHarness,
) -> None:
    bench.processes.queues = ["*"]
    names = [f"q{number:04}" for number in range(3 * MOST_OTHERS)]
    bench.late = [Level("default", 0), *(Level(name, 0) for name in names)]
    bench.dispatcher.drain_count = MOST_OTHERS - 20
    for _ in range(3):
        bench.poller.wake()
        rests(bench, 1)
    asked = [queue for queue, _ in bench.asked]
    assert asked.count("default") == 3
    assert len(asked) <= 3 + 3 * 20
    assert len({*asked} - {"default"}) > 40, "each has its turn"
    bench.dispatcher.drain_count = 2 * MOST_OTHERS
    bench.asked.clear()
    bench.poller.wake()
    rests(bench, 1)
    assert bench.asked == [("default", [0])], "the others wait until there is room"
