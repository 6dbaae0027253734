"""The port of a worker's metrics."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from delaytasks.core.events import Events
from delaytasks.metrics import prometheus
from delaytasks.metrics.prometheus import MetricsEndpoint
from tests.services import free_port
from tests.waiting import wait_until


def is_served(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except OSError:
        return False
    return True


def endpoint_at(port: int, events: Events) -> MetricsEndpoint:
    settings: Any = SimpleNamespace(metrics_host="127.0.0.1", metrics_port=port)
    source: Any = SimpleNamespace(families=list)
    return MetricsEndpoint(settings, events, "", source)


def start(made: MetricsEndpoint) -> None:
    """Start the loops, as the watchdog does."""
    for loop in made.loops:
        loop.start()


class Two:
    """Two workers that want the same port. `events` are those of the later one."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.events = Events()
        self.earlier, self.later = endpoint_at(port, Events()), endpoint_at(port, self.events)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    monkeypatch.setattr(prometheus, "PORT_S", 0.02)
    two = Two(free_port())
    start(two.earlier)
    wait_until(lambda: is_served(two.port), 20, "the metrics of the earlier worker")
    start(two.later)
    wait_until(lambda: two.events.counts["metrics.not_served"], 20, "the first attempt")
    yield two
    two.earlier.stop()
    two.later.stop()


def test_a_port_that_another_worker_still_has_is_served_as_soon_as_it_is_free(two: Two) -> None:
    two.earlier.stop()
    wait_until(lambda: is_served(two.port), 20, "the metrics to be served")
    two.later.stop()
    assert not is_served(two.port)
    assert two.events.counts["metrics.not_served"] == 1


def test_a_worker_that_has_ended_does_not_try_its_port_again(two: Two) -> None:
    two.later.stop()
    assert not any(loop.info()["is_alive"] for loop in two.later.loops)
    two.earlier.stop()
    assert not is_served(two.port)


def test_a_server_that_dies_is_replaced_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "PORT_S", 0.02)
    events, port = Events(), free_port()
    made = endpoint_at(port, events)
    start(made)
    try:
        server: Any = wait_until(lambda: made._server, 20, "the metrics to be served")
        server._server.shutdown()  # ends its thread
        wait_until(lambda: events.counts["loop.restarted"] == 1, 20, "the report")
        wait_until(lambda: is_served(port), 20, "the metrics to be served again")
    finally:
        made.stop()
