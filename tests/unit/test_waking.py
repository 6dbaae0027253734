"""An event loop immediately calls a function from another thread, in all releases of kombu."""

from __future__ import annotations

import socket
import threading

import pytest
from kombu.asynchronous import Hub

from delaytasks.worker.celery_patches import let_threads_wake
from tests.waiting import wait_until


@pytest.mark.parametrize("is_reset", [False, True])
def test_another_thread_wakes_an_event_loop_that_waits(is_reset: bool) -> None:
    hub, called = Hub(), list[int]()
    let_threads_wake(hub)
    hub.timer.max_interval = 60
    hub.call_later(60, lambda: None)
    if is_reset:  # a worker that loses its broker resets the hub
        hub.call_soon(lambda: None)
        next(hub.create_loop())
        hub.reset()
    is_over = threading.Event()
    silent, other_end = socket.socketpair()
    hub.add_reader(silent, lambda: None)

    def run() -> None:
        loop = hub.create_loop()
        while not is_over.is_set():
            next(loop)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        for number in range(3):
            hub.call_soon(called.append, number)
            wait_until(lambda number=number: len(called) > number, 5, "the loop to wake")  # type: ignore[misc]
    finally:
        is_over.set()
        hub.call_soon(called.append, 3)
        thread.join(5)
        silent.close()
        other_end.close()
        hub.close()
    assert not thread.is_alive()
