"""The main process of a worker: its loops check each other, and it holds entries."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.conftest import open_store
from tests.proxy import proxy_to
from tests.waiting import wait_until
from tests.world import Entry, MainProcess, MakeWorld, WaitlistState, World
from tests.world.loops import AtWork
from tests.world.recording import ManualTime


@pytest.fixture
def at_work(make_world: MakeWorld) -> Iterator[AtWork]:
    with closing(AtWork(make_world(timer="redis://127.0.0.1:1/0"))) as at_work:
        yield at_work


@pytest.fixture
def main(world: World) -> Iterator[MainProcess]:
    with closing(MainProcess(world)) as main:
        yield main


def die() -> None:
    raise SystemExit


LOOPS = "statistics wheel leases sweep policies watch calls redis_poller redis_listener watchdog"


def test_a_worker_has_the_expected_loops(at_work: AtWork) -> None:
    info = at_work.info
    assert sorted(info) == sorted(LOOPS.split())
    assert all(loop["is_alive"] and loop["restarts"] == 0 for loop in info.values())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stuck_s"), [("watch", 30), ("watchdog", 10), ("sweep", 20)])
def test_the_loops_of_a_worker_check_each_other(
    at_work: AtWork, time: ManualTime, name: str, stuck_s: float
) -> None:
    stuck = at_work.plan(name, at_work.hang)
    time.at += stuck_s + 0.1
    wait_until(lambda: at_work.restarts(name) == ["stuck"], 15, "it to be replaced")
    assert at_work.turn(name) is not stuck


def test_leases_are_renewed_while_the_watch_loop_waits(at_work: AtWork) -> None:
    at_work.plan("watch", at_work.hang)
    at_work.turn("leases")


@pytest.mark.slow
def test_the_entries_of_the_timing_wheel_survive_its_thread(at_work: AtWork) -> None:
    due_us = at_work.clock.now_us() + 3_000_000
    at_work.dispatcher.receive([Entry(id, 0, due_us) for id in (1, 2)])
    assert at_work.held == 2
    at_work.plan("wheel", die)
    wait_until(lambda: sum(at_work.sizes()) == 2, 30, "the new thread to bring them out")
    assert at_work.clock.now_us() >= due_us
    wait_until(lambda: at_work.restarts("wheel") == ["dead"], 15, "the new thread to be told")


@pytest.mark.slow
def test_a_late_timing_wheel_is_reported(at_work: AtWork) -> None:
    at_work.plan("wheel", at_work.hang)
    at_work.dispatcher.receive([Entry(1, 0, at_work.clock.now_us() + 1000)])
    wait_until(lambda: at_work.world.count("wheel.late"), 15, "the alarm")
    wait_until(lambda: at_work.held == 0, 15, "a thread to bring the entry out")
    assert at_work.restarts("wheel") == ["stuck"]


def test_entries_that_become_due_while_a_worker_stops_are_sent_back(
    main: MainProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = main.dispatcher.close

    def close_in_its_time() -> Any:
        left = close()
        wait_until(lambda: main.held == 0, 5, "the wheel to bring out what it still can")
        return left

    monkeypatch.setattr(main.dispatcher, "close", close_in_its_time)
    main.runtime.start()
    entry = Entry(1, 0, main.clock.now_us() + 500_000)
    main.dispatcher.receive([entry])
    main.runtime.stop()
    assert main.world.broker.armed == [entry]


def test_entries_that_a_stopped_worker_receives_are_sent_back(main: MainProcess) -> None:
    broker = main.world.broker
    main.runtime.start()
    main.runtime.stop()
    early, due = Entry(1, 0, main.clock.now_us() + 60_000_000), Entry(2, 0, main.clock.now_us())
    main.dispatcher.receive([early, due])
    main.drain("default", 5, 0)
    assert broker.armed == [early, due]
    # One message, since this worker may receive it again.
    assert broker.requested_drains == [("default", [0, 5], 1)]
    assert (main.held, main.dispatcher.waiting) == (0, 0)
    main.runtime.stop()
    assert (len(broker.armed), len(broker.requested_drains)) == (2, 1)


def test_a_chunk_states_that_its_worker_has_not_read_the_policies_yet(main: MainProcess) -> None:
    """Without the policies, the chunks would run paused tasks."""
    main.world.delays.policies.pause(tag="note")
    main.take(1)
    main.world.runtime.policy_cache.refresh()
    main.take(1)
    first, second = (request.policies for request in main.requests)
    assert first is None
    assert second


def test_a_stopping_worker_requests_its_unfinished_drains_once(main: MainProcess) -> None:
    main.take(20)
    main.drain("default", 5, 0)
    main.pool.limit = 0  # no other chunk begins
    main.end(waitlists=(WaitlistState("mail", "note", 0),))
    for _ in range(2):
        main.runtime.stop()
    asked = [drain[:2] for drain in main.world.broker.requested_drains]
    assert asked == [("mail", []), ("default", [0, 5])]


def test_an_entry_far_beyond_the_horizon_is_not_held(main: MainProcess) -> None:
    now = main.clock.now_us()
    main.dispatcher.receive([Entry(1, 0, now + 20_000_000), Entry(2, 0, now + 10**13)])
    assert main.held == 1
    assert main.world.count("message.refused") == 1


@pytest.mark.slow
def test_a_sweep_whose_connections_became_silent_goes_on_with_new_ones(postgresql_url: str) -> None:
    proxy, prefix = proxy_to(postgresql_url), f"runtime{secrets.token_hex(4)}_"
    store = open_store(proxy.url(postgresql_url), table_prefix=prefix)
    world = World(store, sweep=1, _self_sweep_s=2)
    at_work = AtWork(world)
    try:
        wait_until(lambda: world.count("sweep.done"), 10, "the first sweep")
        proxy.strand()
        wait_until(lambda: at_work.restarts("sweep") == ["stuck"], 20, "it to be replaced")
        swept = world.count("sweep.done")
        wait_until(lambda: world.count("sweep.done") > swept, 20, "the next sweep")
        assert at_work.restarts("sweep") == ["stuck"], "no other of the old connections was used"
    finally:
        at_work.close()
        world.close()
        store.schema.metadata.drop_all(store.database.tx)
        store.close()
        proxy.close()
