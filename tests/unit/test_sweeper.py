"""A sweep arms the rows that are due within the horizon, expires workers and drains queues."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy import select

from delaytasks import DelayedTask, Status, StoreUnavailableError
from delaytasks.db.sweep_queries import SweepQueries
from tests.world import Entry, MainProcess, MakeWorld, World
from tests.world.recording import CrashError, ManualClock, ManualTime

#: The queues that one check reads in turn.
MOST_OTHERS = 100


def armed_until(world: World) -> datetime:
    found: datetime = world.rows(select(world.table("sweeps").c.armed_until))[0][0]
    return found


def drained(world: World) -> list[tuple[str, list[int], int]]:
    return [(queue, sorted(some), count) for queue, some, count in world.broker.requested_drains]


def lapsed(world: World, **fields: Any) -> DelayedTask:
    return world.put(Status.RUNNING, lease_until=world.now() - timedelta(seconds=1), **fields)


# -- A sweep arms the rows that are due within the horizon ----------------------------------------


def test_a_long_pause_leaves_no_gap(world: World) -> None:
    world.sweep_later()
    world.set_columns("sweeps", armed_until=world.now() - timedelta(seconds=100))
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
    world.broker.is_up = False
    for _ in range(2):
        world.sweep_later()
    assert armed_until(world) <= world.now()
    assert world.count("sweep.armed") == 0
    world.broker.is_up = True
    assert world.sweep_later() == ids
    assert world.count("sweep.armed") == 2


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
    near = world.put(due_s=5)
    with world.failing("clock", StoreUnavailableError("the database can not be reached")):
        assert world.sweep_later() == []
    assert armed_until(world) <= world.now()
    assert world.sweep_later() == [near.id]


@pytest.mark.parametrize("stage", ["workers", "arm", "abandoned", "unserved", "purge", "audit"])
def test_a_stage_that_fails_does_not_prevent_the_others(make_world: MakeWorld, stage: str) -> None:
    world = make_world(purge_after=3600)
    long_ago = world.now() - timedelta(hours=2)
    near, old, over = world.put(due_s=5), world.put(Status.DONE, due_s=-7200), lapsed(world)
    world.change(old, update_time=long_ago)
    world.delays.bulk.cancel(tag="none")  # makes an entry of the log
    world.set_columns("audit", seen_at=long_ago)
    world.put(due_s=-60, queue="lost")
    world.serve("w1", "default")
    world.serve("dead", "default")
    world.silence(60, "dead")
    with world.failing(stage, ValueError("a row can not be read")):
        armed = world.sweep_later()
    done = {
        "workers": world.count("worker.lost") == 1,
        "arm": armed == [near.id],
        "abandoned": world.read(over).status is Status.NOT_COMPLETE,
        "unserved": world.count("queue.unserved") == 1,
        "purge": world.counted()[Status.DONE] == 0,
        "audit": not list(world.delays.bulk.log()),
    }
    assert [name for name, is_done in done.items() if not is_done] == [stage]
    [failure] = world.told("loop.failed")
    assert (failure["loop"], failure["stage"]) == ("sweep", stage)
    assert failure["error"] == "ValueError: a row can not be read"


def test_a_sweep_that_could_not_read_the_policies_releases_nothing(make_world: MakeWorld) -> None:
    world, other, task = make_world(), make_world(), make_world().put(Status.HELD)
    world.delays.policies.pause(tag="note")
    with other.failing("policies", StoreUnavailableError("away")):
        other.sweep_later()
    assert other.statuses([task]) == ["HELD"]
    assert [fields["stage"] for fields in other.told("loop.failed")] == ["policies"]


def test_without_a_horizon_nothing_is_armed_by_sweeps(make_world: MakeWorld) -> None:
    world = make_world(horizon=None)
    world.put(due_s=5)
    assert world.sweep_later() == []


# -- A sweep is alone, expires workers and drains queues -------------------------------------------


def test_partitions_share_the_rows_and_the_first_does_the_other_work(make_world: MakeWorld) -> None:
    world = make_world(sweep="5s 3")
    tasks = [world.schedule(delay=5) for _ in range(60)]
    world.broker.lose()
    over = lapsed(world)
    shares = [world.sweep_later(1), world.sweep_later(2)]
    assert (world.statuses([over]), drained(world)) == (["RUNNING"], [])
    shares.append(world.sweep_later(0))
    assert (world.statuses([over]), len(drained(world))) == (["NOT_COMPLETE"], 1)
    assert sorted(id for share in shares for id in share) == sorted(task.id for task in tasks)
    assert min(len(share) for share in shares) >= 10
    assert [world.sweep_later(partition) for partition in range(3)] == [[], [], []]


def test_a_worker_whose_own_report_is_old_counts_no_other_as_lost(
    main: MainProcess, time: ManualTime
) -> None:
    """The database's clock has made a step, or its table of workers is locked."""
    world, sweep_s = main.world, main.world.delays.settings.sweep_s
    world.serve("w2", "default")
    for _ in range(5):
        time.at += sweep_s
        main.sweep()
    world.silence(60)
    for _ in range(5):
        main.sweep_turn()
        world.set_columns("sweeps", swept_at=world.now() - timedelta(seconds=60))
        main.runtime.sweep_loop.request(None)
    assert not world.told("worker.lost")
    for _ in range(5):
        time.at += sweep_s
        world.set_columns("sweeps", swept_at=world.now() - timedelta(seconds=60))
        main.sweep()
    assert [fields["worker"] for fields in world.told("worker.lost")] == ["w2"]


def test_a_worker_that_dies_during_a_sweep_is_not_forgotten(make_world: MakeWorld) -> None:
    """The sweep began before the worker expired, so it must not mark all rows as armed."""
    world = make_world(sweep="5s 2")
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
    world.set_columns("sweeps", armed_until=world.now() + timedelta(seconds=29))
    with patch.object(world.broker, "arm", die_meanwhile):
        world.sweep_later(1)
    world.sweep_later(1)
    assert ids <= {*world.broker.ids}


# -- the thread of a worker that sweeps -----------------------------------------------------------


@pytest.fixture
def main(make_world: MakeWorld, time: ManualTime) -> MainProcess:
    """The main process of a worker with three partitions, each of which was swept just now."""
    main = MainProcess(world := make_world(sweep="5s 3"))
    for partition in range(3):
        world.sweep(partition)
    world.events.clear()
    return main


def swept(world: World) -> list[int]:
    """Return the partitions that were swept since the last call."""
    partitions = [fields["sweep_partition"] for fields in world.told("sweep.done")]
    world.events.clear()
    return partitions


def test_a_worker_regularly_drains_its_own_queues(main: MainProcess, time: ManualTime) -> None:
    main.processes.queues = ["default", "mail", "later"]
    for queue, priority in (("default", 0), ("default", 9), ("mail", 0)):
        main.world.put(due_s=-60, queue=queue, priority=priority)
    main.world.put(due_s=-0.5, priority=5)
    main.world.put(due_s=60, queue="later")
    rest_s = main.world.delays.settings.sweep_s - 1
    for wait_s, found in ((0, {"default", "mail"}), (rest_s - 1, set()), (1, {"default", "mail"})):
        time.at += wait_s
        main.sweep_turn()
        assert {*main.drained()} == found
        for request in main.requests:
            assert {*request.priorities} == ({0} if request.drained_queue == "mail" else {0, 9})
            main.end(0)
    assert swept(main.world) == []


def test_without_a_broker_a_worker_drains_what_its_sweep_recovered(
    main: MainProcess, time: ManualTime
) -> None:
    world, main.processes.queues = main.world, ["default", "mail"]
    main.sweep_turn()
    world.broker.is_up = False
    time.at += 1
    for queue in ("default", "foreign"):
        lapsed(world, queue=queue)
    world.set_columns("sweeps", swept_at=world.now() - timedelta(seconds=5))
    main.request_sweep(0)
    main.sweep_turn()
    assert main.drained() == ["default"]


def test_without_beat_workers_check_stale_partitions(main: MainProcess, time: ManualTime) -> None:
    """Otherwise, the time between two sweeps could reach one and a half times `self_sweep_s`."""
    found = []
    for _ in range(9):
        main.world.set_columns("sweeps", swept_at=main.world.now() - timedelta(hours=1))
        main.sweep_turn()
        found.append(sorted(swept(main.world)))
        time.at += 0.5
    assert found == [[0, 1, 2], [], [0, 1, 2], [], [0, 1, 2], [], [0, 1, 2], [], [0, 1, 2]]


def test_beat_is_missed_only_after_it_could_have_swept(main: MainProcess, time: ManualTime) -> None:
    """Neither after a start nor after an outage, when no sweep could be made."""
    world = main.world

    def is_missed_within(turns: int) -> bool:
        for _ in range(turns):
            time.at += 1
            world.set_columns("sweeps", swept_at=world.now() - timedelta(hours=1))
            main.report()
            main.sweep_turn()
        return bool(world.told("sweep.self"))

    every_s, patience_s = 5, 10
    assert not is_missed_within(every_s + patience_s)
    assert is_missed_within(1)
    with world.failing("report", StoreUnavailableError("away")):
        is_missed_within(1)
    world.events.clear()
    assert not is_missed_within(patience_s)
    assert len(swept(world)) == 3 * patience_s, "it sweeps nevertheless"
    assert is_missed_within(every_s)


STAGES = ["own queues", "forget", "requested", "stale"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_fails_stops_no_other_and_is_retried(main: MainProcess, stage: str) -> None:
    world, now, partitions = main.world, main.world.now(), set[int]()
    world.put(due_s=-60)
    for partition, ago_s in ((1, 5), (2, 3600)):  # the second one is stale
        row = {"sweep_partition": partition}
        world.set_columns("sweeps", row, swept_at=now - timedelta(seconds=ago_s))
    main.request_sweep(1)
    main.arm_again()

    def missing() -> list[str]:
        partitions.update(swept(world))
        sweeps = world.table("sweeps").c
        first = world.rows(select(sweeps.armed_until).where(sweeps.sweep_partition == 0))
        done = {
            "own queues": main.drained(),
            "forget": first[0][0] <= world.now(),
            "requested": 1 in partitions,
            "stale": 2 in partitions,
        }
        return [name for name in done if not done[name]]

    assert missing() == STAGES
    with world.failing(stage, OSError("away")):
        main.sweep_turn()
        [failure] = world.told("loop.failed")
    assert (failure["stage"], failure["error"]) == (stage, "OSError: away")
    assert missing() == [stage]
    main.sweep_turn()
    assert missing() == []


@pytest.mark.parametrize("stage", ["requested", "stale"])
def test_a_sweep_partition_that_is_locked_stops_no_others(
    main: MainProcess, time: ManualTime, stage: str
) -> None:
    """Its sweep is tried again later."""
    world, begin = main.world, main.world.store.sweeps.begin_sweep

    def begins(sweep_partition: int, *others: Any) -> Any:
        if sweep_partition == 0:
            raise StoreUnavailableError("locked")
        return begin(sweep_partition, *others)

    ago_s = 5 if stage == "requested" else 3600
    world.set_columns("sweeps", swept_at=world.now() - timedelta(seconds=ago_s))
    if stage == "requested":
        for partition in range(3):
            main.request_sweep(partition)
    with patch.object(world.store.sweeps, "begin_sweep", begins):
        main.sweep_turn()
        assert [fields["stage"] for fields in world.told("loop.failed")] == [stage]
        assert swept(world) == [1, 2]
    time.at += 1
    main.sweep_turn()
    assert swept(world) == [0]


def test_a_worker_that_has_signed_off_reports_no_more(main: MainProcess) -> None:
    world, workers = main.world, main.world.table("workers")
    for stage in ("report", "sign off"):
        with world.failing(stage, OSError("away")):
            main.report() if stage == "report" else main.stop()
        assert [fields["stage"] for fields in world.told("loop.failed")] == [stage]
        world.events.clear()
        assert len(world.rows(select(workers))) == (stage == "sign off")
        main.report()  # it is repeated
        assert len(world.rows(select(workers))) == (stage == "report")
    main.report()
    assert not world.rows(select(workers))


def test_an_idle_worker_tries_a_broker_that_is_down(main: MainProcess, time: ManualTime) -> None:
    tried = list[object]()
    with patch.object(main.world.broker, "arm", tried.append):
        for main.world.broker.is_up in (True, False):
            time.at += main.world.delays.settings.sweep_s
            main.sweep_turn()
            assert tried == ([] if main.world.broker.is_up else [[]])


# -- test how often a worker without a broker reads its table, and which entries it takes ---------


class Direct(MainProcess):
    """A worker without a broker, whose clock stands still."""

    def __init__(self, world: World, processes: int = 2, name: str = "w@test") -> None:
        world.set_clock(ManualClock(world.now()))
        super().__init__(world, processes, name=name)

    def rests(self, count: int) -> list[float]:
        return [self.poll() for _ in range(count)]

    def put(self, in_s: float, **fields: Any) -> None:
        self.world.put(expected_time=self.clock.now() + timedelta(seconds=in_s), **fields)


@pytest.fixture
def direct(make_world: MakeWorld) -> Direct:
    return Direct(make_world(timer="direct"), 1000)


def test_a_table_without_notices_is_read_more_rarely_until_a_row_is_late(direct: Direct) -> None:
    found = direct.rests(20)
    assert found[:2] == [pytest.approx(0.03), pytest.approx(0.045)]
    assert found == sorted(found)
    assert found[-1] == 0.5
    direct.put(-0.01)
    # It was handed on already, and is not late again.
    assert direct.rests(2) == [0.02, pytest.approx(0.03)]
    assert direct.sizes() == [1]


def test_a_table_with_notices_is_read_once_a_second(direct: Direct) -> None:
    assert [direct.poll(hears_notices=True) for _ in range(3)] == [1.0] * 3
    direct.world.put_many(2001, due_s=0.4 + 60)
    direct.world.set_columns("tasks", expected_time=direct.clock.now() + timedelta(seconds=0.4))
    assert direct.poll(hears_notices=True) == pytest.approx(0.2, abs=0.001), "that read was full"
    assert direct.held == 2000


def test_drains_of_late_rows_are_requested_once_a_second(direct: Direct) -> None:
    for queue, priority in (("default", 0), ("default", 9), ("others", 0)):
        direct.put(-60, queue=queue, priority=priority)
    direct.rests(5)
    [request] = direct.requests
    assert (request.drained_queue, {*request.priorities}) == ("default", {0, 9})
    direct.end(0)
    direct.rests(5)
    assert direct.requests == []
    direct.poll(is_woken=True)
    assert direct.drained() == ["default"]


def test_a_worker_of_all_queues_drains_known_ones_and_few_unknown_ones(direct: Direct) -> None:
    direct.processes.queues = ["*"]
    direct.put(-60)
    direct.world.put_each([f"q{number:04}" for number in range(3 * MOST_OTHERS)], -60)
    found = list[set[str | None]]()
    for _ in range(3):
        direct.poll(is_woken=True)
        assert len({*direct.drained()}) == direct.dispatcher.drain_count, "a chunk of each"
        found.append({*direct.drained()})
        direct.poll(is_woken=True)
        assert {*direct.drained()} == found[-1], "the others wait until there is room"
        while direct.requests:
            direct.end(0)
    assert all("default" in queues for queues in found)
    assert max(map(len, found)) <= MOST_OTHERS + 1
    assert len(set[str | None]().union(*found)) > 2 * MOST_OTHERS, "each has its turn"


# -- worker shares --------------------------------------------------------------------------------


def kept(make_world: MakeWorld, name: str, rows: int = 400) -> int:
    """Return how many of these rows a worker keeps, which is due soon in the queue `default`."""
    worker = Direct(make_world(timer="direct"), name=name)
    if not sum(worker.world.counted().values()):
        worker.world.put_many(rows, due_s=0.02)
    worker.world.set_columns("tasks", expected_time=worker.clock.now() + timedelta(seconds=0.02))
    worker.poll()
    return worker.held


def test_each_task_has_one_worker_and_shares_fit_the_pool_sizes(make_world: MakeWorld) -> None:
    for name, size in (("a", 1), ("b", 3)):
        make_world().serve(name, "*", pool="direct/prefork", size=size)
    first, second = kept(make_world, "a"), kept(make_world, "b")
    assert first + second == 400
    assert 80 < first < 120


@pytest.mark.parametrize(
    ("queue", "pool", "silent_s"),
    [
        pytest.param("*", "direct/prefork", 16, id="a silent worker"),
        pytest.param("*", "direct/prefork", -9999 * 86400, id="one of the future"),
        pytest.param("*", "prefork", 0, id="one without the direct timer"),
        pytest.param("mail", "direct/prefork", 0, id="one of another queue"),
    ],
)
def test_a_worker_that_is_alone_takes_all_tasks(
    make_world: MakeWorld, queue: str, pool: str, silent_s: float
) -> None:
    world = make_world()
    world.serve("a", "default", pool="direct/prefork")
    world.serve("b", queue, pool=pool)
    world.silence(silent_s, "b")
    assert kept(make_world, "a") == 400
    assert kept(make_world, "not registered yet") == 400


def test_sweeps_without_a_broker_do_not_replace_sweeps_with_one(world: World) -> None:
    sweeps, store = world.store.sweeps, world.store
    direct = SweepQueries(store.database, store.schema, "direct", "")
    assert direct.begin_sweep(0, 1, 4) is not None
    assert sweeps.stale_sweep_partitions(1, 10) == [0]
    assert sweeps.begin_sweep(0, 1, 4) is not None
    assert [each.stale_sweep_partitions(1, 10) for each in (sweeps, direct)] == [[], []]
    assert direct.begin_sweep(0, 1, 4) is None
