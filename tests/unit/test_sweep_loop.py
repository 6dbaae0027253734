"""The sweep loop of a worker, and the table poller of a worker without a broker."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from delaytasks.core.ids import IdMaker
from delaytasks.core.interfaces import Entry
from delaytasks.maintenance.sweeper import MOST_OTHERS
from delaytasks.storage.types import db_now_plus
from delaytasks.timers.direct import NOTIFIED_POLL_S
from delaytasks.worker import sweep_loop as sweep_loop_module
from delaytasks.worker import table_poller
from delaytasks.worker.lease_keeper import WorkerShares
from delaytasks.worker.table_poller import (
    MAX_POLL_REST_S,
    MIN_POLL_REST_S,
    REST_GROWTH,
    TablePoller,
)
from delaytasks.worker.worker_runtime import WorkerRuntime
from tests.recording import ManualClock, ManualMonotonic, set_columns
from tests.world import MainProcess, MakeWorld

# -- sweep loop -----------------------------------------------------------------------------------


class SweepTurns:
    """The sweep loop of a worker on a SQLite file, and the calls of its turns.

    Each call in `fails` fails once.
    """

    def __init__(self, runtime: WorkerRuntime, patch: pytest.MonkeyPatch) -> None:
        self.runtime, self.loop, self.store = runtime, runtime.sweep_loop, runtime.store
        self.done: list[str] = []
        self.fails: set[str] = set()
        self.failed: list[tuple[str, str]] = []
        runtime.events.subscribe(self._note_failure)
        for owner, name, what in (
            (self.store.workers, "report", "report"),
            (self.store.sweeps, "forget_armed", "forget"),
            (self.store.sweeps, "stale_sweep_partitions", "stale"),
            (runtime.runtime.sweeper, "start_own_drains", "drain own"),
            (runtime.runtime.sweeper, "sweep", "sweep {}"),
        ):
            patch.setattr(owner, name, partial(self._call, getattr(owner, name), what))

    def _call(self, call: Callable[..., Any], what: str, *args: Any, **options: Any) -> Any:
        what = what.format(*args[:1])
        if what in self.fails:
            self.fails.discard(what)
            raise OSError(f"{what} failed")
        self.done.append(what)
        return call(*args, **options)

    def _note_failure(self, name: str, fields: dict[str, Any]) -> None:
        if name == "loop.failed":
            self.failed.append((fields["stage"], fields["error"]))

    def turn(self) -> list[str]:
        self.done.clear()
        self.loop._turn()
        return list(self.done)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> ManualMonotonic:
    time = ManualMonotonic()
    monkeypatch.setattr(sweep_loop_module, "monotonic", time)
    return time


@pytest.fixture
def turns(
    make_world: MakeWorld, time: ManualMonotonic, monkeypatch: pytest.MonkeyPatch
) -> SweepTurns:
    world = make_world(sweep="5s 3")
    world.delays.processor("mail")(lambda body: None)
    for partition in range(3):
        world.store.sweeps.begin_sweep(partition, 3, 0)
    return SweepTurns(MainProcess(world).runtime, monkeypatch)


def test_without_beat_a_worker_checks_every_second_for_stale_partitions(
    turns: SweepTurns, time: ManualMonotonic
) -> None:
    """Otherwise, the time between two sweeps could reach one and a half times `self_sweep_s`."""
    asked_at = []
    for _ in range(40):
        if "stale" in turns.turn():
            asked_at.append(time.at)
        time.at += 0.5
    assert max(later - earlier for earlier, later in itertools.pairwise(asked_at)) == 1.0


def test_a_worker_that_cannot_report_sweeps_nevertheless(turns: SweepTurns) -> None:
    turns.fails = {"report"}
    turns.loop.request(1)
    assert turns.turn() == ["drain own", "sweep 1", "stale"]
    assert turns.failed == [("report", "OSError: report failed")]
    assert turns.turn() == ["report"], "and says it at the next turn"


def test_a_worker_publishes_its_load_and_the_tags_that_it_has_processors_for(
    turns: SweepTurns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(turns.runtime.dispatcher), "in_flight", [1.0])
    turns.turn()
    [worker] = turns.store.workers.all()
    assert ("mail" in worker["tags"], worker["busy"]) == (True, 1)


def test_a_worker_checks_its_queues_for_overdue_rows_at_its_start_and_periodically(
    turns: SweepTurns, time: ManualMonotonic
) -> None:
    turns.fails = {"drain own"}
    assert turns.turn() == ["report", "stale"]
    assert turns.turn() == ["drain own"], "the first look failed"
    assert turns.turn() == []
    time.at += turns.runtime.settings.self_sweep_s - 1
    assert "drain own" not in turns.turn()
    time.at += 1
    assert "drain own" in turns.turn()


def test_deferred_rows_are_brought_forward_when_workers_come_or_go(
    turns: SweepTurns, time: ManualMonotonic, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, armed = list[tuple[Any, ...]](), list[Any]()
    monkeypatch.setattr(
        turns.store.deferred_rows, "bring_forward", lambda *args: asked.append(args) or ["entries"]
    )
    monkeypatch.setattr(turns.loop, "_timer", SimpleNamespace(arm=armed.append))

    def restart() -> None:
        set_columns(turns.store, "workers", started_at=db_now_plus(-60))

    changes: list[Callable[[], object]] = [
        lambda: None,  # the start of the worker brings rows forward, too
        lambda: turns.store.workers.report("w2", ["default"], "prefork", 2, 0),
        lambda: turns.store.workers.remove("w2"),
        restart,
    ]
    for number, change in enumerate(changes, 1):
        change()
        for _ in range(2):
            time.at += turns.runtime.settings.sweep_s
            turns.turn()
            assert armed == [["entries"]] * number
    tags = [each.tag for each in turns.runtime.registry]
    assert asked == [(tags, ["default"], 600.0)] * len(changes)


def test_a_requested_partition_is_kept_until_it_is_swept(turns: SweepTurns) -> None:
    turns.fails = {"sweep 0"}
    turns.loop.request(None)
    assert turns.turn() == ["report", "drain own", "sweep 1", "sweep 2", "stale"]
    assert [stage for stage, _ in turns.failed] == ["sweep partition 0"]
    assert turns.turn() == ["sweep 0"]
    assert turns.turn() == []


def test_a_broker_outage_is_remembered_while_the_database_is_unavailable(turns: SweepTurns) -> None:
    turns.fails = {"forget"}
    turns.loop.forget_armed()
    turns.loop.request(2)
    assert turns.turn() == ["report", "drain own", "sweep 2", "stale"]
    assert turns.turn() == ["forget"]
    assert turns.turn() == []


def test_the_check_for_stale_partitions_is_repeated_until_the_query_succeeds(
    turns: SweepTurns,
) -> None:
    set_columns(turns.store, "sweeps", {"sweep_partition": 2}, swept_at=db_now_plus(-3600))
    turns.fails = {"stale"}
    assert turns.turn() == ["report", "drain own"]
    assert turns.turn() == ["stale", "sweep 2"]
    assert turns.turn() == []


# -- test how often a worker without a broker reads its table, and which entries it takes ---------


Asked = list[tuple[str, list[int]]]


@pytest.fixture
def direct(make_world: MakeWorld) -> MainProcess:
    """A worker without a broker, whose clock stands still."""
    world = make_world(timer="direct")
    world.runtime.clock = ManualClock(world.now())
    return MainProcess(world)


@pytest.fixture
def asked(direct: MainProcess, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The queues and priorities that the poller asked to drain."""
    asked: Asked = []
    monkeypatch.setattr(
        direct.dispatcher,
        "start_drain",
        lambda queue, priorities: asked.append((queue, sorted(priorities))),
    )
    return asked


def poller_of(direct: MainProcess) -> TablePoller:
    assert direct.runtime.table_poller is not None
    return direct.runtime.table_poller


def rests(direct: MainProcess, count: int) -> list[float]:
    return [poller_of(direct)._turn() for _ in range(count)]


def put(direct: MainProcess, in_s: float, **fields: Any) -> None:
    due = direct.clock.now() + timedelta(seconds=in_s)
    direct.world.put(expected_time=due, **fields)


def test_a_table_without_notices_is_read_more_rarely_until_a_row_is_late(
    direct: MainProcess,
) -> None:
    found = rests(direct, 20)
    assert found[0] == pytest.approx(MIN_POLL_REST_S * REST_GROWTH)
    assert found == sorted(found)
    assert found[-1] == MAX_POLL_REST_S
    put(direct, -0.01)
    assert rests(direct, 1) == [MIN_POLL_REST_S]
    assert rests(direct, 1) == [pytest.approx(MIN_POLL_REST_S * REST_GROWTH)], (
        "it was handed on already, and is not late again"
    )
    assert direct.sizes() == [1]


def test_a_table_with_notices_is_read_once_a_second(direct: MainProcess) -> None:
    poller_of(direct).listener.is_listening = True
    assert rests(direct, 3) == [NOTIFIED_POLL_S] * 3


def test_if_a_read_is_full_the_next_one_comes_before_the_remaining_rows_are_due(
    direct: MainProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_poller, "MAX_READ_ROWS", 10)
    poller_of(direct).listener.is_listening = True
    for _ in range(11):
        put(direct, 0.4)
    assert rests(direct, 1) == [pytest.approx(0.2, abs=0.001)]
    assert len(direct.runtime.near_entries.wheel) == 10


def test_drains_of_late_rows_are_requested_once_a_second_by_queue_and_priority(
    direct: MainProcess, asked: Asked
) -> None:
    for queue, priority in (("default", 0), ("default", 9), ("others", 0)):
        put(direct, -60, queue=queue, priority=priority)
    rests(direct, 5)
    assert asked == [("default", [0, 9])]
    poller_of(direct).wake()
    rests(direct, 1)
    assert len(asked) == 2


def test_a_worker_of_all_queues_drains_known_queues_always_and_few_unknown_ones(
    direct: MainProcess, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct.processes.queues = ["*"]
    put(direct, -60)
    direct.world.put_each([f"q{number:04}" for number in range(3 * MOST_OTHERS)], -60)
    monkeypatch.setattr(type(direct.dispatcher), "drain_count", MOST_OTHERS - 20)
    for _ in range(3):
        poller_of(direct).wake()
        rests(direct, 1)
    queues = [queue for queue, _ in asked]
    assert queues.count("default") == 3
    assert len(queues) <= 3 + 3 * 20
    assert len({*queues} - {"default"}) > 40, "each has its turn"
    monkeypatch.setattr(type(direct.dispatcher), "drain_count", 2 * MOST_OTHERS)
    asked.clear()
    poller_of(direct).wake()
    rests(direct, 1)
    assert asked == [("default", [0])], "the others wait until there is room"


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
