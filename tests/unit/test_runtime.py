"""The main process of a worker: its loops and Celery's, its entries, and the forks of a process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from amqp.exceptions import ConnectionForced
from sqlalchemy import insert

from delaytasks.worker import patches
from tests.conftest import open_store
from tests.waiting import in_child, wait_until
from tests.world import Entry, MainProcess, MakeWorld, World
from tests.world.loops import AtWork, worker_hub
from tests.world.recording import ManualClock, delays_on

LOOPS = "statistics wheel dispatcher leases sweep policies calls redis_poller redis_listener"


@pytest.fixture
def at_work(make_world: MakeWorld) -> Iterator[AtWork]:
    with closing(AtWork(make_world(timer="redis://127.0.0.1:1/0"))) as at_work:
        yield at_work


@pytest.fixture
def main(world: World) -> Iterator[MainProcess]:
    with closing(MainProcess(world)) as main:
        yield main


# -- the loops of a worker, and of Celery ---------------------------------------------------------


def test_each_loop_of_a_worker_turns_and_continues_after_failures(at_work: AtWork) -> None:
    def have_turned() -> bool:
        return all(loop["turned_s_ago"] is not None for loop in at_work.info.values())

    wait_until(have_turned, 5, "the first turn of each")
    assert sorted(at_work.info) == sorted(LOOPS.split())
    errors = [ValueError("as asked"), SystemExit()]

    def fail() -> None:
        raise errors.pop()

    while errors:
        at_work.world.events.clear()
        thread = at_work.plan("leases", fail)
        wait_until(lambda: at_work.world.told("loop.failed"), 5, "the failure to be told")
        assert at_work.turn("leases") is thread


def test_a_late_timing_wheel_is_reported(world: World) -> None:
    world.set_clock(clock := ManualClock(world.now()))
    with closing(MainProcess(world)) as main:
        main.dispatcher.receive([Entry(1, 0, clock.now_us() + 1_000_000)])
        main.runtime.wheel.loop._turn()
        clock.advance(30)
        main.runtime.watch()
    assert world.count("wheel.late") == 1


@pytest.mark.parametrize("is_reset", [False, True])
def test_another_thread_wakes_an_event_loop_that_waits(is_reset: bool) -> None:
    hub, called, is_over = worker_hub(), list[int](), threading.Event()
    hub.timer.max_interval = 60
    hub.call_later(60, lambda: None)
    if is_reset:  # a worker that loses its broker resets the hub
        hub.call_soon(lambda: None)
        next(hub.create_loop())
        hub.reset()
    silent, other_end = socket.socketpair()
    hub.add_reader(silent, lambda: None)

    def run() -> None:
        loop = hub.create_loop()
        while not is_over.is_set():
            next(loop)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    with silent, other_end, closing(hub):
        for number in range(3):
            hub.call_soon(called.append, number)
            wait_until(lambda number=number: len(called) > number, 10, "the loop to wake")  # type: ignore[misc]
        is_over.set()
        hub.call_soon(called.append, 3)
        thread.join(10)
        assert not thread.is_alive()


def test_a_lost_connection_that_the_event_loop_still_reads_does_not_end_the_worker() -> None:
    hub, called = worker_hub(), list[int]()

    def read() -> None:
        called.append(1)
        raise ConnectionForced("the broker closed the connection")

    ours, other_end = socket.socketpair()
    with ours, other_end, closing(hub):
        hub.add_reader(ours, lambda: None)
        for _ in range(2):
            hub.call_soon(read)
        patches.reset_hub(hub)
        assert (called, hub.readers) == ([1], {})
        other_end.send(b"x")
        hub.add_reader(ours, lambda: called.append(2))
        loop = hub.create_loop()
        wait_until(lambda: next(loop) or 2 in called, 10, "the event loop to go on")


# -- the entries of a worker ----------------------------------------------------------------------


def test_entries_that_a_stopped_worker_held_or_receives_are_sent_back(main: MainProcess) -> None:
    broker = main.world.broker
    main.runtime.start()
    early, due = Entry(1, 0, main.clock.now_us() + 60_000_000), Entry(2, 0, main.clock.now_us())
    main.dispatcher.receive([early])
    main.runtime.stop()
    assert (broker.armed, main.held) == ([early], 0)
    broker.lose()
    main.dispatcher.receive([early, due])
    main.drain("default", 5, 0)
    assert broker.armed == [early, due]
    # One message, since this worker may receive it again.
    assert broker.requested_drains == [("default", [0, 5], 1)]
    assert (main.held, main.waiting) == (0, 0)
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


def test_an_entry_far_beyond_the_horizon_is_not_held(main: MainProcess) -> None:
    now = main.clock.now_us()
    main.dispatcher.receive([Entry(1, 0, now + 20_000_000), Entry(2, 0, now + 10**13)])
    assert main.held == 1
    assert main.world.count("message.refused") == 1


# -- forks ----------------------------------------------------------------------------------------


def test_a_child_forked_during_a_write_of_sqlite_is_not_locked_out(world: World) -> None:
    writes, ends = threading.Event(), threading.Event()

    def write() -> None:
        with world.begin() as connection:
            connection.execute(insert(world.table()).values(tag="note", message_body="{}"))
            writes.set()
            ends.wait(10)

    thread = threading.Thread(target=write)
    thread.start()
    assert writes.wait(10)
    threading.Timer(0.3, ends.set).start()
    assert in_child(lambda: world.schedule(delay=60))
    thread.join()
    assert sum(world.counted().values()) == 2


def test_the_twins_work_in_a_forked_child_and_after_a_close(sqlite_path: Any) -> None:
    open_store(sqlite_path()).close()
    delays = delays_on(sqlite_path(), tags="any")

    def schedule() -> None:
        asyncio.run(delays.aschedule_delay("mail", None, 60))

    schedule()
    assert in_child(schedule)
    delays.close()
    schedule()
    assert len(delays.find().tasks) == 3
    delays.close()
