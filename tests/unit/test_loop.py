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
from tests.world import World
from tests.world.loops import AtWork, worker_hub
from tests.world.recording import delays_on

# -- A loop continues after failures ---------------------------------------------------------------


@pytest.fixture
def at_work(world: World) -> Iterator[AtWork]:
    with closing(AtWork(world)) as at_work:
        yield at_work


@pytest.mark.parametrize("error", [ValueError("as asked"), SystemExit()])
def test_a_turn_that_fails_is_reported_and_the_loop_continues(
    at_work: AtWork, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    thread = at_work.plan("leases", fail)
    wait_until(lambda: at_work.world.count("loop.failed"), 5, "the failure to be told")
    assert at_work.turn("leases") is thread


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
