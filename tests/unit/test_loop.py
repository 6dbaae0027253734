"""Threads of a process: the loops of a worker, Celery's event loop, forks, and the twins."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import insert

from tests.conftest import open_store
from tests.waiting import in_child, wait_until
from tests.world import MakeWorld, World
from tests.world.loops import AtWork, worker_hub
from tests.world.recording import ManualTime, delays_on

# -- A loop continues after failures. A dead or stuck loop gets a fresh thread --------------------

#: The longest time that each loop may be stuck, in seconds. A worker reports every 5 s, and counts
#: as dead after 15 s, which leaves time for two more attempts.
BOUNDS = {"wheel": 2, "leases": 2.5, "sweep": 20, "redis_poller": 5, "redis_listener": 5}


@pytest.fixture
def at_work(make_world: MakeWorld, time: ManualTime) -> Iterator[AtWork]:
    world = make_world(timer="redis://127.0.0.1:1/0")
    with closing(AtWork(world, is_watched=False)) as at_work:
        yield at_work


def die() -> None:
    raise SystemExit


def test_a_turn_that_fails_is_reported_and_the_same_thread_continues(at_work: AtWork) -> None:
    def fail() -> None:
        raise ValueError("as asked")

    thread = at_work.plan("leases", fail)
    wait_until(lambda: at_work.world.count("loop.failed"), 5, "the failure to be told")
    assert at_work.turn("leases") is thread
    assert at_work.check("leases") == []


def test_a_thread_that_died_is_replaced_and_counted(at_work: AtWork) -> None:
    thread = at_work.plan("leases", die)
    thread.join(5)
    assert not at_work.info["leases"]["is_alive"]
    assert at_work.check("leases") == ["dead"]
    assert at_work.turn("leases") is not thread
    assert at_work.world.count("loop.failed") == 1, "what it died of"
    assert at_work.info["leases"] == {"is_alive": True, "turned_s_ago": 0, "restarts": 1}
    assert at_work.check("leases") == ["dead"]


@pytest.mark.parametrize("name", BOUNDS)
def test_a_stuck_thread_is_replaced_and_ends(at_work: AtWork, time: ManualTime, name: str) -> None:
    stuck = at_work.plan(name, at_work.hang)
    time.at += BOUNDS[name]
    assert at_work.check(name) == []
    time.at += 0.1
    assert at_work.check(name) == ["stuck"]
    fresh = at_work.turn(name)
    at_work.go_on()
    stuck.join(10)
    assert not stuck.is_alive()
    assert at_work.turn(name) is fresh is not stuck


def test_a_replaced_turn_ends_at_its_next_step(at_work: AtWork, time: ManualTime) -> None:
    ended_by: list[str] = []

    def step() -> None:
        at_work.hang()
        try:
            events = at_work.world.delays.events
            events.attempt("sweep", "a stage", lambda: at_work.progress("sweep"))
        except BaseException as error:
            ended_by.append(type(error).__name__)
            raise

    stuck = at_work.plan("sweep", step)
    time.at += 21
    assert at_work.check("sweep") == ["stuck"]
    at_work.turn("sweep")
    at_work.go_on()
    stuck.join(10)
    assert ended_by == ["ReplacedError"]
    assert at_work.world.count("loop.failed") == 0, "nothing of it is an error"


def test_a_long_turn_that_makes_progress_is_not_stuck(at_work: AtWork, time: ManualTime) -> None:
    step, done = threading.Semaphore(0), threading.Semaphore(0)

    def go() -> None:
        for _ in range(3):
            assert step.acquire(timeout=10)
            at_work.progress("sweep")
            done.release()
        at_work.hang()

    at_work.plan("sweep", go)
    for _ in range(3):
        time.at += 19
        assert at_work.check("sweep") == []
        step.release()
        assert done.acquire(timeout=10)
    time.at += 21
    assert at_work.check("sweep") == ["stuck"]


@pytest.mark.parametrize("is_stopped", [False, True])
def test_an_idle_or_ended_loop_is_left(at_work: AtWork, time: ManualTime, is_stopped: bool) -> None:
    at_work.turn("leases")
    at_work.rest("leases")
    if is_stopped:
        at_work.stop_loop("leases")
    time.at += 3600
    assert at_work.check("leases") == []
    assert at_work.info["leases"]["is_alive"] is not is_stopped


def test_each_stuck_thread_in_a_row_gets_twice_the_time(at_work: AtWork, time: ManualTime) -> None:
    at_work.plan("leases", at_work.hang)
    time.at += 3
    assert len(at_work.check("leases")) == 1
    at_work.plan("leases", at_work.hang)  # the fresh thread hangs, too
    time.at += 4
    assert len(at_work.check("leases")) == 1
    time.at += 2
    assert len(at_work.check("leases")) == 2
    at_work.turn("leases")
    at_work.rest("leases")
    at_work.plan("leases", at_work.hang)
    time.at += 3
    assert len(at_work.check("leases")) == 3, "one that ended its turn begins anew"


def test_a_suspended_process_has_no_stuck_loop(at_work: AtWork, time: ManualTime) -> None:
    at_work.plan("sweep", at_work.hang)
    time.at += 100
    assert at_work.check("sweep", times=1) == []
    time.at += 1
    assert at_work.check("sweep", times=1) == ["stuck"], "it is, if it does not go on now"


def test_a_long_call_is_not_repeated(at_work: AtWork, time: ManualTime) -> None:
    """A solo pool runs its processors in this loop."""
    at_work.plan("calls", at_work.hang)
    time.at += 100_000
    assert at_work.check("calls") == []


# -- waking ---------------------------------------------------------------------------------------


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


# -- forks ----------------------------------------------------------------------------------------


def test_a_child_forked_during_a_write_of_sqlite_is_not_locked_out(world: World) -> None:
    writes, ends = threading.Event(), threading.Event()
    values = {"tag": "note", "message_body": "{}"}

    def write() -> None:
        with world.begin() as connection:
            connection.execute(insert(world.table()).values(values))
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
