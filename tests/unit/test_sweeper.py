"""A sweep arms the rows that are due within the horizon, expires workers and drains queues."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import chain
from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy import select

from delaytasks import DelayedTask, Status, StoreUnavailableError
from delaytasks.db.sweep_queries import SweepQueries
from tests.world import Entry, MainProcess, MakeWorld, World
from tests.world.recording import CrashError, ManualClock, ManualTime


def armed_until(world: World) -> datetime:
    """Return until when the rows of all partitions are armed."""
    found: datetime = min(world.rows(select(world.table("sweeps").c.armed_until)))[0]
    return found


def lapsed(world: World, **fields: Any) -> DelayedTask:
    return world.put(Status.RUNNING, lease_until=world.now() - timedelta(seconds=1), **fields)


# -- A sweep arms the rows that are due within the horizon ----------------------------------------


@pytest.mark.parametrize("crashes", [True, False], ids=["a crash", "an outage"])
def test_a_sweep_that_did_not_send_all_is_made_again(world: World, crashes: bool) -> None:
    ids = [task.id for task in world.put_many(2500, due_s=19.9)]
    arm, calls = world.broker.arm, iter([True])

    def arm_a_part(entries: Iterable[Entry]) -> bool:
        world.broker.is_up = next(calls, False)
        if crashes and not world.broker.is_up:
            raise CrashError
        return arm(entries)

    with patch.object(world.broker, "arm", arm_a_part), suppress(CrashError):
        world.sweep_later()
    assert armed_until(world) <= world.now()
    assert 0 < len(world.broker.armed) < len(ids)
    assert world.count("sweep.armed") == 0
    world.broker.is_up = True
    assert world.sweep_later() == ids, "also those that were sent"
    assert world.count("sweep.armed") == len(ids)


def test_a_refused_queue_does_not_keep_other_rows_from_being_armed(world: World) -> None:
    world.put_many(1200, due_s=20, queue="bad")
    ids = [task.id for task in world.put_many(1200, due_s=25)]
    arm = world.broker.arm

    def refuse(entries: Iterable[Entry]) -> bool:
        entries = list(entries)
        accepted = [entry for entry in entries if entry.queue != "bad"]
        return arm(accepted) and accepted == entries

    with patch.object(world.broker, "arm", refuse):
        assert world.sweep_later() == ids
        assert world.sweep_later() == [], "the others are drained when they are overdue"


STAGES = ["policies", "workers", "clock", "arm", "abandoned", "unserved", "purge", "audit"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_fails_does_not_prevent_the_others(make_world: MakeWorld, stage: str) -> None:
    world, long_ago = make_world(purge_after=3600), make_world().now() - timedelta(hours=2)
    make_world().delays.policies.pause(tag="paused")
    near, old, over = world.put(due_s=5), world.put(Status.DONE, due_s=-7200), lapsed(world)
    held = world.put(Status.HELD, tag="paused")
    world.change(old, update_time=long_ago)
    world.delays.bulk.cancel(tag="none")  # makes an entry of the log
    world.set_columns("audit", seen_at=long_ago)
    world.put(due_s=-60, queue="lost")
    world.serve("w1", "default")
    world.serve("dead", "default")
    world.silence(60, "dead")
    with world.failing(stage, StoreUnavailableError("away")):
        armed = world.sweep_later()
    done = {
        "policies": False,  # what was not read releases nothing
        "workers": world.count("worker.lost") == 1,
        "arm": armed == [near.id],
        "abandoned": world.read(over).status is Status.NOT_COMPLETE,
        "unserved": world.count("queue.unserved") == 1,
        "purge": world.counted()[Status.DONE] == 0,
        "audit": not list(world.delays.bulk.log()),
    }
    failed = "arm" if stage == "clock" else stage  # nobody knows what is near
    assert {name for name, is_done in done.items() if not is_done} == {"policies", failed}
    [failure] = world.told("loop.failed")
    assert (failure["loop"], failure["stage"]) == ("sweep", failed)
    assert failure["error"] == "StoreUnavailableError: away"
    assert world.statuses([held]) == ["HELD"]
    assert world.sweep_later() == ([near.id] if failed in ("arm", "workers") else [])


def test_partitions_share_the_rows_and_the_first_does_the_other_work(make_world: MakeWorld) -> None:
    world = make_world(sweep="5s 3")
    ids = sorted(world.schedule(delay=15).id for _ in range(60))
    world.broker.lose()
    world.serve("w1", "default")
    over = lapsed(world)
    shares = [world.sweep_later(1), world.sweep_later(2)]
    assert (world.statuses([over]), world.broker.requested_drains) == (["RUNNING"], [])
    shares.append(world.sweep_later(0))
    assert (world.statuses([over]), len(world.broker.requested_drains)) == (["NOT_COMPLETE"], 1)
    assert sorted(chain(*shares)) == ids
    assert min(map(len, shares)) >= 10
    assert [*map(world.sweep_later, range(3))] == [[], [], []]
    world.silence()  # the lost worker may have held entries of all partitions
    assert sorted(chain(*map(world.sweep_later, range(3)))) == ids


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


def set_swept(world: World, ago_s: float, **row: int) -> None:
    world.set_columns("sweeps", row, swept_at=world.now() - timedelta(seconds=ago_s))


def failed_stages(world: World) -> list[str]:
    return [fields["stage"] for fields in world.told("loop.failed")]


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
        set_swept(world, 60)
        main.runtime.sweep_loop.request(None)
    assert not world.told("worker.lost")
    for _ in range(5):
        time.at += sweep_s
        set_swept(world, 60)
        main.sweep()
    assert [fields["worker"] for fields in world.told("worker.lost")] == ["w2"]


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


def test_without_a_broker_a_worker_drains_what_its_sweep_recovered_and_tries_the_broker(
    main: MainProcess, time: ManualTime
) -> None:
    world, main.processes.queues = main.world, ["default", "mail"]
    main.sweep_turn()
    world.broker.is_up = False
    for queue in ("default", "foreign"):
        lapsed(world, queue=queue)
    set_swept(world, 5)
    main.request_sweep(0)
    time.at += 1
    main.sweep_turn()
    assert main.drained() == ["default"]
    tried = list[object]()
    with patch.object(world.broker, "arm", tried.append):
        for world.broker.is_up in (True, False):
            time.at += world.delays.settings.sweep_s
            main.sweep_turn()
            assert tried == ([] if world.broker.is_up else [[]])


def test_beat_is_missed_only_after_it_could_have_swept(main: MainProcess, time: ManualTime) -> None:
    """Neither after a start nor after an outage, when no sweep could be made."""
    world = main.world

    def is_missed_within(turns: int) -> bool:
        for _ in range(turns):
            time.at += 1
            set_swept(world, 3600)
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
    assert len(swept(world)) == 3 * patience_s, "it sweeps nevertheless, and once a second"
    time.at += 0.5
    set_swept(world, 3600)
    main.sweep_turn()
    assert swept(world) == []
    assert is_missed_within(every_s)


@pytest.mark.parametrize(("stage", "ago_s"), [("requested", 5), ("stale", 3600)])
def test_a_sweep_partition_that_is_locked_stops_no_others_and_is_swept_later(
    main: MainProcess, time: ManualTime, stage: str, ago_s: float
) -> None:
    set_swept(main.world, ago_s)
    if stage == "requested":
        for partition in range(3):
            main.request_sweep(partition)
    main.arm_again()
    with main.world.failing("requested", StoreUnavailableError("the first one is locked")):
        main.sweep_turn()
    assert failed_stages(main.world) == [stage]
    assert swept(main.world) == [1, 2]
    assert armed_until(main.world) <= main.world.now()
    time.at += 1
    main.sweep_turn()
    assert swept(main.world) == [0]


def test_a_worker_that_has_signed_off_reports_no_more(main: MainProcess) -> None:
    world, workers = main.world, main.world.table("workers")
    for stage in ("report", "sign off"):
        with world.failing(stage, OSError("away")):
            main.report() if stage == "report" else main.stop()
        assert failed_stages(world) == [stage]
        world.events.clear()
        assert len(world.rows(select(workers))) == (stage == "sign off")
        main.report()  # it is repeated
        assert len(world.rows(select(workers))) == (stage == "report")
    main.report()
    assert not world.rows(select(workers))


# -- how often a worker without a broker reads its table, and which entries it takes --------------


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
    assert direct.poll(hears_notices=True) == 1.0
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


def test_late_rows_of_another_worker_are_drained(make_world: MakeWorld) -> None:
    world = make_world()
    for name in ("a", "b"):
        world.serve(name, "default", pool="direct/prefork")
    a = Direct(make_world(timer="direct"), 1000, name="a")
    a.poll()  # which also looks for overdue rows, and not again within a second
    for _ in range(20):
        a.put(-0.2)
    a.poll()
    assert not any(a.drained()), "the other worker may still take them"
    a.clock.advance(0.1)
    a.poll()
    assert {*a.drained()} == {None, "default"}


# -- worker shares --------------------------------------------------------------------------------


def kept(make_world: MakeWorld, name: str, rows: int = 400) -> int:
    """Return how many of these rows a worker keeps, which is due soon in the queue `default`."""
    worker = Direct(make_world(timer="direct"), name=name)
    if not sum(worker.world.counted().values()):
        worker.world.put_many(rows, due_s=0.02)
    worker.world.set_columns("tasks", expected_time=worker.clock.now() + timedelta(seconds=0.02))
    worker.poll()
    return worker.held


#: The queue, the pool, the size and the silence of another worker, and the rows that are ours.
OTHERS = {
    "a larger one": ("*", "direct/prefork", 3, 0, (80, 120)),
    "one that reported late": ("*", "direct/prefork", 3, 4, (80, 120)),
    "a silent one": ("*", "direct/prefork", 3, 7, (400, 400)),
    "one of the future": ("*", "direct/prefork", 3, -9999 * 86400, (400, 400)),
    "one without the direct timer": ("*", "prefork", 3, 0, (400, 400)),
    "one of another queue": ("mail", "direct/prefork", 3, 0, (400, 400)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_workers_share_tasks_by_their_pool_sizes(make_world: MakeWorld, name: str) -> None:
    queue, pool, size, silent_s, (least, most) = OTHERS[name]
    world = make_world()
    world.serve("a", "default", pool="direct/prefork", size=1)
    world.serve("b", queue, pool=pool, size=size)
    world.silence(silent_s, "b")
    assert least <= kept(make_world, "a") <= most
    assert most == 400 or kept(make_world, "a") + kept(make_world, "b") == 400
    assert kept(make_world, "not registered yet") == 400


def test_workers_share_tasks_while_no_report_is_in_time(make_world: MakeWorld) -> None:
    world = make_world()
    for name in ("a", "b"):
        world.serve(name, "default", pool="direct/prefork", size=1)
    world.silence(10)
    assert kept(make_world, "a") + kept(make_world, "b") == 400
    world.silence(4, "a")
    assert kept(make_world, "a") == 400


def test_sweeps_without_a_broker_do_not_replace_sweeps_with_one(world: World) -> None:
    sweeps, store = world.store.sweeps, world.store
    direct = SweepQueries(store.database, store.schema, "direct", "")
    assert direct.begin_sweep(0, 1, 4) is not None
    assert sweeps.stale_sweep_partitions(1, 10) == [0]
    assert sweeps.begin_sweep(0, 1, 4) is not None
    assert [each.stale_sweep_partitions(1, 10) for each in (sweeps, direct)] == [[], []]
    assert direct.begin_sweep(0, 1, 4) is None
