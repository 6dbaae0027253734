"""The port of a worker's metrics."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from delaytasks.core.events import Events
from delaytasks.metrics import endpoint
from delaytasks.metrics.endpoint import MetricsEndpoint
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


def test_a_port_that_another_worker_still_has_is_served_as_soon_as_it_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "PORT_S", 0.02)
    events, port = Events(), free_port()
    earlier, later = endpoint_at(port, Events()), endpoint_at(port, events)
    earlier.start()
    later.start()
    try:
        assert events.counts["metrics.not_served"] == 1
        earlier.stop()
        wait_until(lambda: is_served(port), 20, "the metrics to be served")
    finally:
        later.stop()
    assert not is_served(port)
    assert events.counts["metrics.not_served"] == 1


def test_a_worker_that_has_ended_does_not_try_its_port_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "PORT_S", 0.02)
    port = free_port()
    earlier, later = endpoint_at(port, Events()), endpoint_at(port, Events())
    earlier.start()
    later.start()
    later.stop()
    assert not later._port_loop.info()["is_alive"]
    earlier.stop()
    assert not is_served(port)
