"""A sweep arms the rows that are due within the horizon, expires workers, drains and purges."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta, timezone
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy import select

from delaytasks import Status, StoreUnavailableError
from delaytasks.core.filters import LogEntry
from delaytasks.core.ids import IdMaker
from delaytasks.maintenance import sweeper
from delaytasks.maintenance.sweeper import MOST_OTHERS
from delaytasks.storage.sweep_queries import SweepQueries
from delaytasks.storage.types import db_now_plus
from delaytasks.timers.direct import NOTIFIED_POLL_S
from delaytasks.worker import sweep_loop as sweep_loop_module
from delaytasks.worker import table_poller
from delaytasks.worker.lease_keeper import WorkerShares
from delaytasks.worker.table_poller import MAX_POLL_REST_S, MIN_POLL_REST_S, REST_GROWTH
from tests.recording import CrashError, ManualClock, ManualMonotonic, set_columns
from tests.world import Entry, MainProcess, MakeWorld, World


def armed_until(world: World) -> datetime:
    query = select(world.table("sweeps").c.armed_until)
    found: datetime = world.store.database.autocommitted(lambda c: c.execute(query).scalar_one())
    return found


def arm_until(world: World, in_s: float) -> None:
    """Record that the last sweep has armed the rows that are due within `in_s`."""
    until = world.now() + timedelta(seconds=in_s)
    set_columns(world.store, "sweeps", armed_until=until)


def drained(world: World) -> list[tuple[str, list[int], int]]:
    return [(queue, sorted(some), count) for queue, some, count in world.broker.requested_drains]


# -- A sweep arms the rows that are due within the horizon ----------------------------------------


def test_a_long_pause_leaves_no_gap(world: World) -> None:
    world.sweep_later()
    arm_until(world, -100)
    world.put(due_s=-50)  # it is overdue, and drained
    near = world.put(due_s=25)
    assert world.sweep_later() == [near.id]


def test_a_crash_between_arming_and_marking_costs_duplicates_and_makes_no_gap(world: World) -> None:
    ids = [task.id for task in world.put_many(2500, due_s=19.9)]
    arm, calls = world.broker.arm, iter([True, False])

    def crash_after_two(entries: Iterable[Entry]) -> bool:
        arm(entries)
        if next(calls):
            return True
        raise CrashError

    with patch.object(world.broker, "arm", crash_after_two), pytest.raises(CrashError):
        world.sweep_later()
    assert 0 < len(world.broker.armed) < len(ids)
    assert world.sweep_later() == ids, "all of them again, also those after the crash"


def test_while_the_broker_is_unavailable_nothing_counts_as_armed(world: World) -> None:
    ids = [world.put(due_s=5).id, world.put(due_s=10).id]
    world.serve("w1", "default")
    world.put(due_s=-60)
    world.broker.is_up = False
    for _ in range(2):
        world.sweep_later()
    assert armed_until(world) <= world.now()
    assert (world.count("sweep.armed"), world.count("sweep.drain")) == (0, 0)
    assert [queue for queue, _, _ in drained(world)] == ["default"] * 2, "it is asked nevertheless"
    world.broker.is_up = True
    assert world.sweep_later() == ids
    assert (world.count("sweep.armed"), world.count("sweep.drain")) == (2, 1)


def test_a_refused_queue_does_not_keep_other_rows_from_being_armed(world: World) -> None:
    world.put_many(1200, due_s=20, queue="bad")
    ids = [task.id for task in world.put_many(1200, due_s=25)]
    arm = world.broker.arm

    def refuse(entries: Iterable[Entry]) -> bool:
        entries = list(entries)
        accepted = [entry for entry in entries if entry.queue != "bad"]
        arm(accepted)
        return accepted == entries

    with patch.object(world.broker, "arm", refuse):
        assert world.sweep_later() == ids
        assert world.sweep_later() == [], "the others are drained when they are overdue"


def test_a_clock_without_a_measurement_arms_nothing_and_marks_nothing(world: World) -> None:
    near, away = world.put(due_s=5), StoreUnavailableError("the database can not be reached")
    with patch.object(world.runtime.clock, "certain_now", side_effect=away):
        assert world.sweep_later() == []
    assert armed_until(world) <= world.now()
    assert world.sweep_later() == [near.id]


STAGES = {"expire": "workers", "due_between": "arm", "recover": "abandoned"}
STAGES |= {"levels_of": "overdue", "purge": "purge", "purge_audit": "audit"}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_fails_does_not_prevent_the_others(make_world: MakeWorld, stage: str) -> None:
    world = make_world(purge_after=3600)
    store, long_ago = world.store, world.now() - timedelta(hours=2)
    near, old = world.put(due_s=5), world.put(Status.DONE, due_s=-7200)
    lapsed = world.put(Status.RUNNING, lease_until=world.now() - timedelta(seconds=1))
    world.change(old, update_time=long_ago)
    log = LogEntry(1, "cancel", {}, "ann", "done", long_ago, long_ago, long_ago, 0, 0, 0)
    store.bulk.begin(log)
    world.put(due_s=-60)
    world.serve("w1", "default")
    world.serve("dead", "default")
    world.silence(60, "dead")

    owner = store.workers if stage == "expire" else store.sweeps
    with patch.object(owner, stage, side_effect=ValueError("a row can not be read")):
        armed = world.sweep_later()
    done = {
        "expire": world.count("worker.lost") == 1,
        "due_between": armed == [near.id],
        "recover": world.read(lapsed).status is Status.NOT_COMPLETE,
        "levels_of": len(drained(world)) == 1,
        "purge": store.tasks.get(old.id) is None,
        "purge_audit": store.bulk.log(10) == [],
    }
    assert [name for name, is_done in done.items() if not is_done] == [stage]
    [failure] = world.told("loop.failed")
    assert (failure["loop"], failure["stage"]) == ("sweep", STAGES[stage])
    assert failure["error"] == "ValueError: a row can not be read"


def test_without_a_broker_the_sweeping_worker_drains_its_own_queues(world: World) -> None:
    for queue in ("default", "mail"):
        world.put(due_s=-60, queue=queue)
        world.serve(f"w-{queue}", queue)
    here: list[tuple[str, Sequence[int]]] = []

    def drain(queue: str, priorities: Sequence[int]) -> bool:
        here.append((queue, priorities))
        return queue == "default"

    for is_up in (True, False):
        world.broker.is_up = is_up
        world.sweep_later(start_drain=drain)
    assert here == [("default", [0]), ("mail", [0])]
    assert world.count("sweep.local_drain") == 1


def test_a_sweep_that_could_not_read_the_policies_releases_nothing(make_world: MakeWorld) -> None:
    """Without policies, no row seems to be paused."""
    world, other, task = make_world(), make_world(), make_world().put()
    world.delays.policies.pause(tag="note")
    world.sweep_later()
    assert world.statuses([task]) == ["HELD"]
    cache = other.runtime.policy_cache
    with patch.object(cache, "refresh", side_effect=StoreUnavailableError("away")):
        other.sweep_later()
    assert other.statuses([task]) == ["HELD"]
    assert [fields["stage"] for fields in other.told("loop.failed")] == ["policies"]


def test_a_sweep_makes_the_tasks_of_recurring_schedules(world: World) -> None:
    world.delays.recurring.set("r", "note", {}, every="5s")
    world.sweep_later()
    assert world.delays.find(tag="note").tasks


def test_without_a_horizon_nothing_is_armed_by_sweeps(make_world: MakeWorld) -> None:
    world = make_world(horizon=None)
    world.put(due_s=5)
    assert world.sweep_later() == []


# -- A sweep is alone, expires workers, drains queues and purges ----------------------------------


def test_partitions_share_the_rows_and_the_first_does_the_other_work(make_world: MakeWorld) -> None:
    world = make_world(sweep=(5, 3))
    tasks = [world.schedule(delay=5) for _ in range(60)]
    world.broker.lose()
    lapsed = world.put(Status.RUNNING, lease_until=world.now() - timedelta(seconds=1))
    world.serve("w1", "default")
    world.put(due_s=-60)
    shares = [world.sweep_later(1), world.sweep_later(2)]
    assert (world.statuses([lapsed]), drained(world)) == (["RUNNING"], [])
    shares.append(world.sweep_later(0))
    assert (world.statuses([lapsed]), len(drained(world))) == (["NOT_COMPLETE"], 1)
    assert sorted(id for share in shares for id in share) == sorted(task.id for task in tasks)
    assert min(len(share) for share in shares) >= 10
    assert [world.sweep_later(partition) for partition in range(3)] == [[], [], []]


# -- workers that died ---------------------------------------------------------------------------


def test_rows_that_a_dead_worker_held_are_armed_again(world: World) -> None:
    world.serve("w1", "default")
    world.serve("w2", "default")
    ids = [world.put(due_s=5).id, world.put(due_s=20).id]
    assert world.sweep_later() == ids
    world.silence(world.delays.settings.sweep_s * 2)
    assert world.sweep_later() == [], "their silence was short"
    world.silence(60, "w1")
    assert world.sweep_later() == ids
    assert [fields["worker"] for fields in world.told("worker.lost")] == ["w1"]
    assert world.sweep_later() == [], "it is told once"


def test_a_worker_that_dies_during_a_sweep_is_not_forgotten(make_world: MakeWorld) -> None:
    """The sweep began before the worker expired, so it must not mark all rows as armed."""
    world = make_world(sweep=(5, 2))
    world.serve("w1", "default")
    ids = {world.schedule(delay=15 + n / 100).id for n in range(40)}
    world.broker.lose()
    assert {*world.sweep_later(0), *world.sweep_later(1)} == ids
    world.broker.lose()
    arm = world.broker.arm

    def die_meanwhile(entries: Iterable[Entry]) -> bool:
        world.broker.arm = arm  # type: ignore[method-assign]
        world.silence()
        world.sweep_later(0)
        return arm(entries)

    for _ in range(20):
        world.schedule(delay=29.9)
    arm_until(world, 29)
    with patch.object(world.broker, "arm", die_meanwhile):
        world.sweep_later(1)
    world.sweep_later(1)
    assert ids <= {*world.broker.ids}


# -- overdue rows --------------------------------------------------------------------------------


def test_overdue_rows_cause_a_few_drain_messages_for_served_queues(world: World) -> None:
    for _ in range(50):
        world.put(due_s=-60, queue="mail", priority=3)
        world.put(due_s=-60, queue="mail", priority=5)
    world.put(due_s=-60, queue="nobody")
    world.put(due_s=-0.2)  # within the grace period
    world.serve("w1", "default", "mail")
    world.serve("w2", "mail")
    world.sweep_later()
    assert drained(world) == [("mail", [3, 5], 2 * world.delays.settings.drain_messages)]
    assert [fields["queue"] for fields in world.told("queue.unserved")] == ["nobody"]


@pytest.mark.parametrize(
    ("setting", "age", "left"),
    [
        ("30d", timedelta(days=29), 28),
        ("30d", timedelta(days=31), 3),
        (None, timedelta(days=31), 28),
        ("1h", timedelta(hours=2), 3),
    ],
)
def test_rows_that_ended_long_ago_are_deleted_and_all_others_stay(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, setting: Any, age: timedelta, left: int
) -> None:
    monkeypatch.setattr(sweeper, "PURGE_ROWS", 10)
    world = make_world(**({} if setting == "30d" else {"purge_after": setting}))
    due_s = -age.total_seconds()
    for status in (*[Status.DONE] * 25, Status.NOT_COMPLETE, Status.RUNNING):
        world.change(world.put(status, due_s=due_s), update_time=world.now() - age)
    world.change(world.put(Status.FAILED, due_s=due_s), update_time=world.now())
    world.sweep_later()
    assert sum(world.counted().values()) == left
    assert world.count("task.purged") == 28 - left


def test_workers_without_a_broker_cause_no_drain_messages(world: World) -> None:
    world.serve("drainer", "*", pool="drain/prefork")
    world.serve("direct", "default", pool="direct/prefork")
    world.put(due_s=-60)
    world.sweep_later()
    assert world.told("queue.unserved")
    world.serve("worker", "default")
    world.sweep_later()
    [messages] = [fields["messages"] for fields in world.told("sweep.drain")]
    assert messages == world.delays.settings.drain_messages


def test_sweeps_without_a_broker_do_not_replace_sweeps_with_one(world: World) -> None:
    sweeps, store = world.store.sweeps, world.store
    direct = SweepQueries(store.database, store.schema, "direct")
    assert direct.begin_sweep(0, 1, 4) is not None
    assert sweeps.stale_sweep_partitions(1, 10) == [0]
    assert sweeps.begin_sweep(0, 1, 4) is not None
    assert [each.stale_sweep_partitions(1, 10) for each in (sweeps, direct)] == [[], []]
    assert direct.begin_sweep(0, 1, 4) is None


def test_any_number_of_rows_is_recovered(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeper, "RECOVER_ROWS", 10)
    over = {"lease_until": world.now() - timedelta(seconds=1)}
    lapsed = [world.put(Status.RUNNING, **over) for _ in range(25)]
    last = world.put(Status.RUNNING, lapses=world.delays.settings.max_lost_leases - 1, **over)
    runs = world.put(Status.RUNNING)
    world.sweep_later()
    assert world.statuses([*lapsed, last, runs]) == ["NOT_COMPLETE"] * 25 + ["FAILED", "RUNNING"]
    assert world.count("task.recovered") == 26


def test_a_worker_drains_its_own_queues_without_a_sweep(world: World) -> None:
    for queue, priority in (("default", 0), ("default", 9), ("mail", 0), ("paused", 0)):
        world.put(due_s=-60, queue=queue, priority=priority)
    world.put(due_s=-0.5)
    world.put(due_s=60, queue="later")
    world.delays.policies.pause(queue="paused")
    here: list[tuple[str, list[int]]] = []
    world.runtime.sweeper.start_own_drains(
        ["default", "mail", "paused", "later"],
        lambda queue, priorities: here.append((queue, sorted(priorities))) or True,
    )
    assert sorted(here) == [("default", [0, 9]), ("mail", [0])]


# -- the sweep loop of a worker, and its table poller without a broker -----------------------------

CLOCKED = [sweep_loop_module]

# -- sweep loop -----------------------------------------------------------------------------------


class SweepTurns:
    """The sweep loop of a worker on a SQLite file, and the calls of its turns.

    Each call in `fails` fails once.
    """

    def __init__(self, main: MainProcess, time: ManualMonotonic, patch: pytest.MonkeyPatch) -> None:
        self.world, self.runtime, self.time = main.world, main.runtime, time
        self.patch = patch.setattr
        self.loop, self.store = self.runtime.sweep_loop, main.world.store
        self.done: list[str] = []
        self.fails: set[str] = set()
        for owner, name, what in (
            (self.store.workers, "report", "report"),
            (self.store.sweeps, "forget_armed", "forget"),
            (self.store.sweeps, "stale_sweep_partitions", "stale"),
            (self.runtime.runtime.sweeper, "start_own_drains", "drain own"),
            (self.runtime.runtime.sweeper, "sweep", "sweep {}"),
        ):
            patch.setattr(owner, name, partial(self._call, getattr(owner, name), what))

    def _call(self, call: Callable[..., Any], what: str, *args: Any, **options: Any) -> Any:
        what = what.format(*args[:1])
        if what in self.fails:
            self.fails.discard(what)
            raise OSError(f"{what} failed")
        self.done.append(what)
        return call(*args, **options)

    def turn(self, after_s: float = 0) -> list[str]:
        self.time.at += after_s
        self.done.clear()
        self.loop._turn()
        return list(self.done)


@pytest.fixture
def turns(
    make_world: MakeWorld, time: ManualMonotonic, monkeypatch: pytest.MonkeyPatch
) -> SweepTurns:
    world = make_world(sweep="5s 3")
    world.delays.processor("mail")(lambda body: None)
    for partition in range(3):
        world.store.sweeps.begin_sweep(partition, 3, 0)
    return SweepTurns(MainProcess(world), time, monkeypatch)


def test_without_beat_a_worker_checks_every_second_for_stale_partitions(turns: SweepTurns) -> None:
    """Otherwise, the time between two sweeps could reach one and a half times `self_sweep_s`."""
    asked_at = [turns.time.at for _ in range(40) if "stale" in turns.turn(0.5)]
    assert max(later - earlier for earlier, later in itertools.pairwise(asked_at)) == 1.0


START = "report, drain own"
STAGES_OF_TURNS = {"report": "report", "sweep 0": "sweep partition 0"}
#: What is requested, the call that fails, the calls of the first turn, and of the next one.
FAILURES: list[tuple[Callable[[Any], object], str, str, str]] = [
    (lambda loop: loop.request(1), "report", "drain own, sweep 1, stale", "report"),
    (lambda loop: None, "drain own", "report, stale", "drain own"),
    (lambda loop: loop.request(None), "sweep 0", f"{START}, sweep 1, sweep 2, stale", "sweep 0"),
    (lambda loop: loop.forget_armed(), "forget", f"{START}, sweep 2, stale", "forget"),
    (lambda loop: None, "stale", START, "stale, sweep 2"),
]


@pytest.mark.parametrize(("asks", "fails", "first", "second"), FAILURES)
def test_what_fails_in_a_turn_does_not_stop_the_rest_and_is_tried_again(
    turns: SweepTurns, asks: Any, fails: str, first: str, second: str
) -> None:
    if fails == "stale":
        set_columns(turns.store, "sweeps", {"sweep_partition": 2}, swept_at=db_now_plus(-3600))
    turns.fails = {fails}
    asks(turns.loop)
    if fails == "forget":
        turns.loop.request(2)
    assert turns.turn() == first.split(", ")
    [failure] = turns.world.told("loop.failed")
    assert failure["error"] == f"OSError: {fails} failed"
    assert failure["stage"] == STAGES_OF_TURNS.get(fails, failure["stage"])
    assert turns.turn() == second.split(", ")
    assert turns.turn() == []


def test_a_worker_publishes_its_load_and_tags(turns: SweepTurns) -> None:
    turns.patch(type(turns.runtime.dispatcher), "in_flight", [1.0])
    turns.turn()
    [worker] = turns.store.workers.all()
    assert ("mail" in worker["tags"], worker["busy"]) == (True, 1)


def test_a_worker_checks_its_queues_for_overdue_rows_periodically(turns: SweepTurns) -> None:
    assert "drain own" in turns.turn()
    assert "drain own" not in turns.turn(turns.runtime.settings.self_sweep_s - 1)
    assert "drain own" in turns.turn(1)


def test_workers_that_come_or_go_bring_rows_forward(turns: SweepTurns) -> None:
    asked, armed, workers = list[tuple[Any, ...]](), list[Any](), turns.store.workers
    turns.patch(
        turns.store.deferred_rows, "bring_forward", lambda *args: asked.append(args) or ["entries"]
    )
    turns.patch(turns.loop, "_timer", SimpleNamespace(arm=armed.append))
    changes: list[Callable[[], object]] = [
        lambda: None,  # the start of the worker brings rows forward, too
        lambda: workers.report("w2", ["default"], "prefork", 2, 0),
        lambda: workers.remove("w2"),
        lambda: set_columns(turns.store, "workers", started_at=db_now_plus(-60)),  # a restart
    ]
    for number, change in enumerate(changes, 1):
        change()
        for _ in range(2):
            turns.turn(turns.runtime.settings.sweep_s)
            assert armed == [["entries"]] * number
    tags = [each.tag for each in turns.runtime.registry]
    assert asked == [(tags, ["default"], 600.0)] * len(changes)


# -- test how often a worker without a broker reads its table, and which entries it takes ---------


class Direct(MainProcess):
    """A worker without a broker, whose clock stands still."""

    def __init__(self, world: World) -> None:
        world.runtime.clock = ManualClock(world.now())
        super().__init__(world)
        self.poller: Any = self.runtime.table_poller

    def rests(self, count: int) -> list[float]:
        return [self.poller._turn() for _ in range(count)]

    def look(self) -> None:
        self.poller.wake()
        self.poller._turn()

    def put(self, in_s: float, **fields: Any) -> None:
        self.world.put(expected_time=self.clock.now() + timedelta(seconds=in_s), **fields)


@pytest.fixture
def direct(make_world: MakeWorld) -> Direct:
    return Direct(make_world(timer="direct"))


@pytest.fixture
def asked(direct: Direct, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """The queues and priorities that the poller asked to drain."""
    asked: list[tuple[str, list[int]]] = []
    monkeypatch.setattr(
        direct.dispatcher,
        "start_drain",
        lambda queue, priorities: asked.append((queue, sorted(priorities))),
    )
    return asked


def test_a_table_without_notices_is_read_more_rarely_until_a_row_is_late(direct: Direct) -> None:
    found = direct.rests(20)
    assert found[0] == pytest.approx(MIN_POLL_REST_S * REST_GROWTH)
    assert found == sorted(found)
    assert found[-1] == MAX_POLL_REST_S
    direct.put(-0.01)
    # It was handed on already, and is not late again.
    assert direct.rests(2) == [MIN_POLL_REST_S, pytest.approx(MIN_POLL_REST_S * REST_GROWTH)]
    assert direct.sizes() == [1]


def test_a_table_with_notices_is_read_once_a_second(
    direct: Direct, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_poller, "MAX_READ_ROWS", 10)
    direct.poller.listener.is_listening = True
    assert direct.rests(3) == [NOTIFIED_POLL_S] * 3
    for _ in range(11):
        direct.put(0.4)
    assert direct.rests(1) == [pytest.approx(0.2, abs=0.001)], "that read was full"
    assert len(direct.runtime.near_entries.wheel) == 10


def test_drains_of_late_rows_are_requested_once_a_second(direct: Direct, asked: list[Any]) -> None:
    for queue, priority in (("default", 0), ("default", 9), ("others", 0)):
        direct.put(-60, queue=queue, priority=priority)
    direct.rests(5)
    assert asked == [("default", [0, 9])]
    direct.look()
    assert len(asked) == 2


def test_a_worker_of_all_queues_drains_known_queues_always_and_few_unknown_ones(
    direct: Direct, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    direct.processes.queues = ["*"]
    direct.put(-60)
    direct.world.put_each([f"q{number:04}" for number in range(3 * MOST_OTHERS)], -60)
    monkeypatch.setattr(type(direct.dispatcher), "drain_count", MOST_OTHERS - 20)
    for _ in range(3):
        direct.look()
    queues = [queue for queue, _ in asked]
    assert queues.count("default") == 3
    assert len(queues) <= 3 + 3 * 20
    assert len({*queues} - {"default"}) > 40, "each has its turn"
    monkeypatch.setattr(type(direct.dispatcher), "drain_count", 2 * MOST_OTHERS)
    asked.clear()
    direct.look()
    assert asked == [("default", [0])], "the others wait until there is room"


# -- worker shares --------------------------------------------------------------------------------


NOW = datetime(2030, 1, 1, tzinfo=timezone.utc)


def worker(name: str, size: int = 2, *queues: str, **changes: Any) -> dict[str, Any]:
    row = {"name": name, "concurrency": size, "queues": queues or ["*"], "pool": "direct/prefork"}
    return {**row, "seen_at": NOW, **changes}


def shares(rows: list[dict[str, Any]], names: str, queue: str = "default") -> list[set[int]]:
    """Return the ids of the entries that each of these workers takes, of 4,000 entries."""
    make_id, found = IdMaker(lambda: 1_900_000_000_000, 0), list[set[int]]()
    entries = [Entry(make_id(), 0, 0, queue) for _ in range(4000)]
    for name in names:
        members = WorkerShares(name)
        members.learn(rows, NOW, 5)
        found.append({entry.id for entry in entries if members.is_mine(entry)})
    return found


def test_each_task_belongs_to_one_worker_and_shares_are_proportional_to_pool_sizes() -> None:
    first, second = shares([worker("a", 1), worker("b", 3)], "ab")
    assert len(first | second) == 4000
    assert not first & second
    assert 0.2 < len(first) / 4000 < 0.3


def test_a_worker_has_no_share_of_a_queue_that_it_does_not_serve() -> None:
    rows = [worker("a", 2, "mail"), worker("b"), worker("c", 2, "default")]
    assert len(shares(rows, "b")[0]) < 4000
    assert shares(rows, "a", "mail")[0]


@pytest.mark.parametrize(
    "rows",
    [
        [worker("a"), worker("b", seen_at=NOW - timedelta(seconds=16))],  # a silent worker
        [worker("a"), worker("b", pool="prefork")],  # one without the direct timer
        [worker("a", 2, "default"), worker("b", 2, "mail")],
        [worker("b")],  # the worker is not registered yet
    ],
)
def test_a_worker_that_is_alone_takes_all_tasks(rows: list[dict[str, Any]]) -> None:
    assert len(shares(rows, "a")[0]) == 4000
