"""The sweep loop of a worker, and the table poller of a worker without a broker."""

from __future__ import annotations

import itertools
from collections import Counter
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest

from delaytasks.core.events import Events
from delaytasks.core.ids import IdMaker
from delaytasks.core.interfaces import Entry, Level, QueuePlace
from delaytasks.core.settings import Settings
from delaytasks.core.workers import ServiceTimes
from delaytasks.maintenance.sweeper import MOST_OTHERS
from delaytasks.timers.direct import NOTIFIED_POLL_S
from delaytasks.worker import sweep_loop as sweep_loop_module
from delaytasks.worker import table_poller
from delaytasks.worker.lease_keeper import WorkerShares
from delaytasks.worker.sweep_loop import SweepLoop
from delaytasks.worker.table_poller import (
    MAX_POLL_REST_S,
    MIN_POLL_REST_S,
    REST_GROWTH,
    TablePoller,
)
from tests.recording import ManualClock
from tests.unit.worker_harness import ManualMonotonic

# -- sweep loop -----------------------------------------------------------------------------------


class SweepLoopHarness:
    """Record the calls of the loop. Each call in `fails` fails once."""

    def __init__(self, sweep_partitions: int = 1) -> None:
        self.done: list[str] = []
        self.fails: set[str] = set()
        self.stale: list[int] = []
        self.events = Events()
        self.told: list[dict[str, Any]] = []
        self.events.subscribe(
            lambda name, fields: self.told.append(fields) if name == "loop.failed" else None
        )
        self.settings = SimpleNamespace(
            sweep_partitions=sweep_partitions,
            sweep_s=5.0,
            self_sweep_s=10.0,
            uses_broker=True,
            default_queue="default",
        )
        self.processes = SimpleNamespace(queues=["default"], keeps_time_limits=True)
        self.workers = [{"name": "w1", "started_at": 1}]
        self.published: list[str] = []
        self.busy: int | None = None
        self.registry = [SimpleNamespace(tag="mail")]
        self.defer: list[Any] = []
        self.brought: list[Any] = []
        self.dispatcher = SimpleNamespace(in_flight=[1.0])
        self.timer = SimpleNamespace(arm=self.brought.append)
        self.pool = SimpleNamespace(limit=2)
        self.service_watch = SimpleNamespace(times=lambda reads_beat: ServiceTimes())
        here: Any = self
        self.polls_table = True
        self.celery_worker = SimpleNamespace(pool=self.pool, hostname="w1")
        self.make_runtime()
        declared: Any = SimpleNamespace(is_due=False)
        self.loop = SweepLoop(here, declared)

    def make_runtime(self) -> None:
        workers = SimpleNamespace(
            report=self.report, remove=lambda _: None, all=lambda: list(self.workers)
        )
        deferred_rows = SimpleNamespace(bring_forward=self.bring_forward)
        sweeps = SimpleNamespace(
            forget_armed=lambda: self.note("forget"),
            stale_sweep_partitions=self.stale_sweep_partitions,
        )
        self.store = SimpleNamespace(
            workers=workers, sweeps=sweeps, deferred_rows=deferred_rows, close=lambda: None
        )
        self.clock = SimpleNamespace(offset_s=0.0)
        self.runtime = SimpleNamespace(
            sweeper=SimpleNamespace(
                sweep=lambda sweep_partition, *_: self.note(f"sweep {sweep_partition}"),
                start_own_drains=lambda *_: self.note("drain own"),
            ),
        )

    def report(
        self,
        _name: str,
        _queues: Any,
        _pool: str,
        _size: int,
        _offset_us: int,
        tags: list[str],
        _services: ServiceTimes,
        busy: int,
    ) -> None:
        self.note("report")
        self.published, self.busy = tags, busy

    def stale_sweep_partitions(self, sweep_partitions: int, age_s: float) -> list[int]:
        self.note("stale")
        return self.stale

    def bring_forward(self, tags: list[str], queues: list[str], within_s: float) -> list[Any]:
        self.asked = (tags, queues, within_s)
        defer, self.defer = self.defer, []
        return defer

    def note(self, what: str) -> None:
        if what in self.fails:
            self.fails.discard(what)
            raise OSError(f"{what} failed")
        self.done.append(what)

    def turn(self) -> list[str]:
        del self.done[:]
        self.loop._turn()
        return list(self.done)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> ManualMonotonic:
    time = ManualMonotonic()
    monkeypatch.setattr(sweep_loop_module, "monotonic", time)
    return time


@pytest.fixture
def place(time: ManualMonotonic) -> SweepLoopHarness:
    return SweepLoopHarness(sweep_partitions=3)


def test_without_beat_a_worker_checks_every_second_for_stale_partitions(
    place: SweepLoopHarness, time: ManualMonotonic
) -> None:
    """Otherwise, the time between two sweeps could reach one and a half times `self_sweep_s`."""
    asked_at = []
    for _ in range(40):
        if "stale" in place.turn():
            asked_at.append(time.at)
        time.at += 0.5
    assert max(later - earlier for earlier, later in itertools.pairwise(asked_at)) == 1.0


def test_a_worker_that_cannot_report_sweeps_nevertheless(
    place: SweepLoopHarness,
) -> None:
    place.fails = {"report"}
    place.loop.request(1)
    assert place.turn() == ["drain own", "sweep 1", "stale"]
    assert [(f["loop"], f["stage"], f["error"]) for f in place.told] == [
        ("sweep", "report", "OSError: report failed")
    ]
    assert place.turn() == ["report"], "and says it at the next turn"


def test_a_worker_publishes_its_load_and_the_tags_that_it_has_processors_for(
    place: SweepLoopHarness,
) -> None:
    place.loop._turn()
    assert (place.published, place.busy) == (["mail"], 1)


def test_a_worker_checks_its_queues_for_overdue_rows_at_its_start_and_periodically(
    place: SweepLoopHarness, time: ManualMonotonic
) -> None:
    place.fails = {"drain own"}
    assert place.turn() == ["report", "stale"]
    assert place.turn() == ["drain own"], "the first look failed"
    assert place.turn() == []
    time.at += place.settings.self_sweep_s - 1
    assert "drain own" not in place.turn()
    time.at += 1
    assert "drain own" in place.turn()


def test_deferred_rows_are_brought_forward_when_workers_come_or_go(
    place: SweepLoopHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place.settings, "sweep_s", 0)
    changes = [
        lambda: None,  # the start of the worker brings rows forward, too
        lambda: place.workers.append({"name": "w2", "started_at": 2}),
        lambda: place.workers.remove({"name": "w2", "started_at": 2}),
        lambda: place.workers[0].update(started_at=3),  # the worker restarts with the same name
    ]
    for change in changes:
        change()
        for expected in (["entries"], []):
            place.defer = ["entries"]
            place.turn()
            assert place.brought == ([["entries"]] if expected else [])
            place.brought.clear()
    assert place.asked == (["mail"], ["default"], 600.0)


def test_a_requested_partition_is_kept_until_it_is_swept(place: SweepLoopHarness) -> None:
    place.fails = {"sweep 0"}
    place.loop.request(None)
    assert place.turn() == ["report", "drain own", "sweep 1", "sweep 2", "stale"]
    assert [f["stage"] for f in place.told] == ["sweep partition 0"]
    assert place.turn() == ["sweep 0"]
    assert place.turn() == []


def test_a_broker_outage_is_remembered_while_the_database_is_unavailable(
    place: SweepLoopHarness,
) -> None:
    place.fails = {"forget"}
    place.loop.forget_armed()
    place.loop.request(2)
    assert place.turn() == ["report", "drain own", "sweep 2", "stale"]
    assert place.turn() == ["forget"]
    assert place.turn() == []


def test_the_check_for_stale_partitions_is_repeated_until_the_query_succeeds(
    place: SweepLoopHarness,
) -> None:
    place.fails, place.stale = {"stale"}, [2]
    assert place.turn() == ["report", "drain own"]
    assert place.turn() == ["stale", "sweep 2"]
    assert place.turn() == []


# -- A worker without a broker reads its table, and takes its share of the entries ----------------


# -- test how often a worker without a broker reads its table, and which entries it takes ---------


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


# -- worker shares --------------------------------------------------------------------------------


NOW = datetime(2030, 1, 1, tzinfo=timezone.utc)


def worker(
    name: str, size: int = 2, queues: list[str] | None = None, **changes: Any
) -> dict[str, Any]:
    row = {
        "name": name,
        "concurrency": size,
        "queues": queues or ["*"],
        "pool": "direct/prefork",
        "seen_at": NOW,
    }
    return {**row, **changes}


def entries(count: int = 4000, queue: str = "default") -> list[Entry]:
    make_id = IdMaker(lambda: 1_900_000_000_000, 0)
    return [Entry(make_id(), 0, 0, queue) for _ in range(count)]


def shares(rows: list[dict[str, Any]], names: str, queue: str = "default") -> Counter[str]:
    found: Counter[str] = Counter()
    for name in names:
        members = WorkerShares(name)
        members.learn(rows, NOW, 5)
        found[name] = sum(members.is_mine(entry) for entry in entries(queue=queue))
    return found


def test_each_task_belongs_to_one_worker_and_shares_are_proportional_to_pool_sizes() -> None:
    rows = [worker("a", 1), worker("b", 3)]
    lists = []
    some = entries()
    for name in "ab":
        members = WorkerShares(name)
        members.learn(rows, NOW, 5)
        lists.append({entry.id for entry in some if members.is_mine(entry)})
    assert lists[0] | lists[1] == {entry.id for entry in some}
    assert not lists[0] & lists[1]
    assert 0.2 < len(lists[0]) / len(some) < 0.3


def test_a_worker_has_no_share_of_a_queue_that_it_does_not_serve() -> None:
    rows = [worker("a", queues=["mail"]), worker("b"), worker("c", queues=["default"])]
    assert shares(rows, "bc")["b"] < 4000
    assert shares(rows, "ab", "mail")["a"] > 0
    alone = [worker("a", queues=["mail"]), worker("c", queues=["default"])]
    assert shares(alone, "c") == {"c": 4000}


def test_a_silent_worker_or_one_without_the_direct_timer_has_no_share() -> None:
    silent = worker("b", seen_at=NOW - timedelta(seconds=16))
    celery = worker("c", pool="prefork")
    assert shares([worker("a"), silent, celery], "a") == {"a": 4000}


def test_a_worker_that_is_not_registered_yet_takes_all_tasks() -> None:
    assert shares([worker("b")], "a") == {"a": 4000}
