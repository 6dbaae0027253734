"""The main process of a worker: its loops, and the entries that it holds."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing
from threading import Event, Timer
from typing import Any

import pytest
from sqlalchemy import select

from tests.conftest import open_store
from tests.proxy import proxy_to
from tests.waiting import wait_until
from tests.world import Entry, MainProcess, MakeWorld, WaitlistState, World
from tests.world.loops import AtWork


@pytest.fixture
def at_work(make_world: MakeWorld) -> Iterator[AtWork]:
    with closing(AtWork(make_world(timer="redis://127.0.0.1:1/0"))) as at_work:
        yield at_work


@pytest.fixture
def main(world: World) -> Iterator[MainProcess]:
    with closing(MainProcess(world)) as main:
        yield main


LOOPS = "statistics wheel dispatcher leases sweep policies calls redis_poller redis_listener"


def test_a_worker_has_the_expected_loops(at_work: AtWork) -> None:
    def have_turned() -> bool:
        return all(loop["turned_s_ago"] is not None for loop in at_work.info.values())

    wait_until(have_turned, 5, "the first turn of each")
    assert sorted(at_work.info) == sorted(LOOPS.split())


@pytest.mark.slow
def test_a_late_timing_wheel_is_reported(at_work: AtWork) -> None:
    at_work.plan("wheel", at_work.hang)
    at_work.dispatcher.receive([Entry(1, 0, at_work.clock.now_us() + 1000)])
    wait_until(lambda: at_work.world.count("wheel.late"), 15, "the alarm")
    at_work.go_on()
    wait_until(lambda: at_work.held == 0, 15, "the entry to be brought out")


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
def test_a_worker_whose_connections_became_silent_reports_in_time(postgresql_url: str) -> None:
    proxy, prefix = proxy_to(postgresql_url), f"runtime{secrets.token_hex(4)}_"
    store = open_store(proxy.url(postgresql_url), table_prefix=prefix)
    world, direct = World(store), open_store(postgresql_url, table_prefix=prefix)
    at_work = AtWork(world)
    try:
        wait_until(direct.workers.all, 10, "the first report")
        proxy.strand()
        stranded_at = direct.tasks.now()
        wait_until(
            lambda: all(worker["seen_at"] > stranded_at for worker in direct.workers.all()),
            12,
            "a report by a new connection",
        )
        wait_until(lambda: world.count("sweep.done"), 40, "a sweep by a new connection")
    finally:
        at_work.close()
        world.close()
        store.close()
        proxy.close()  # ends the transaction of a connection that became silent in it
        direct.schema.metadata.drop_all(direct.database.tx)
        direct.close()


def test_a_report_under_way_leaves_no_row_of_a_stopped_worker(
    main: MainProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, begun, go_on, ended = main.runtime.store.workers, Event(), Event(), Event()
    report = workers.report

    def report_slowly(*values: Any) -> None:
        begun.set()
        go_on.wait(5)
        report(*values)
        ended.set()

    monkeypatch.setattr(workers, "report", report_slowly)
    main.runtime.leases_loop.loop.start()
    assert begun.wait(5)
    Timer(0.3, go_on.set).start()
    main.runtime.leases_loop.sign_off()
    assert ended.wait(5)
    assert main.world.rows(select(main.world.table("workers"))) == []
