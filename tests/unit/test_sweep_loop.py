"""If a stage of the worker's sweep loop fails, the stage is repeated and other stages run."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from delaytasks.core.events import Events
from delaytasks.core.workers import ServiceTimes
from delaytasks.worker import sweep_loop as sweep_loop_module
from delaytasks.worker.sweep_loop import SweepLoop
from tests.unit.manual_monotonic import ManualMonotonic


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
