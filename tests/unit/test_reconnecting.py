"""A worker tries frequently, and for a sufficient time, to reach its broker."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.worker.consumer import Consumer
from kombu.asynchronous import Hub
from kombu.connection import Connection
from kombu.exceptions import OperationalError
from kombu.utils import functional

from delaytasks.worker.broker_connection import (
    RECONNECT_PAUSE_S,
    ReconnectStep,
    call_in_background,
    turn_event_loop,
)
from tests.waiting import wait_until

NOWHERE = "redis://127.0.0.1:{port}/0"


class Clock:
    """A clock that advances only in `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(functional, "sleep", clock.sleep)
    monkeypatch.setattr(functional, "time", clock.time)
    return clock


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as bound:  # the socket is bound, but does not listen
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


class Looking(Consumer):
    """A worker's consumer with only the attributes that connecting needs."""

    def __init__(self, url: str, retries: int | None) -> None:
        self.app = Celery(set_as_current=False, broker=url)
        self.app.conf.update(
            broker_connection_max_retries=retries, broker_connection_retry_on_startup=True
        )
        self.first_connection_attempt = True
        self.broker_connection_retry_attempt = 0


def tries_of(consumer: Looking, clock: Clock, most: int = 1000) -> list[float]:
    """Return the times at which the consumer tried to connect, until it gave up."""
    tries: list[float] = []
    connection = consumer.app.connection_for_read()
    connect = connection._connection_factory

    def note() -> object:
        tries.append(clock.now)
        if len(tries) == most:
            raise KeyboardInterrupt
        return connect()

    connection._connection_factory = note
    with pytest.raises((OperationalError, KeyboardInterrupt)):
        consumer.ensure_connected(connection)
    return tries


def ours(url: str, retries: int | None) -> Looking:
    consumer = Looking(url, retries)
    ReconnectStep(consumer)
    return consumer


@pytest.mark.slow
@pytest.mark.parametrize("retries", [0, 1, 5, 100])
def test_a_worker_gives_up_the_broker_when_celery_would(
    clock: Clock, port: int, retries: int
) -> None:
    url = NOWHERE.format(port=port)
    celerys = tries_of(Looking(url, retries), clock)
    began, clock.now = clock.now, 0.0
    tries = tries_of(ours(url, retries), clock)
    assert began <= tries[-1] <= began + RECONNECT_PAUSE_S
    assert (len(celerys) == 1) is (len(tries) == 1)


def test_a_worker_with_several_brokers_gives_up_no_earlier_than_celery(
    clock: Clock, port: int
) -> None:
    url = ";".join([NOWHERE.format(port=port)] * 3)
    gives_up_at = tries_of(Looking(url, 30), clock)[-1]
    clock.now = 0.0
    assert tries_of(ours(url, 30), clock)[-1] >= gives_up_at


def test_other_connections_keep_their_own_retry_limits(clock: Clock, port: int) -> None:
    consumer = ours(NOWHERE.format(port=port), 100)
    connection: Connection = consumer.app.connection_for_write()
    with pytest.raises(OperationalError):
        connection.ensure_connection(
            max_retries=1, interval_start=0, interval_step=0, interval_max=1, timeout=0.5
        )
    assert clock.now == 0


class HubPool:
    """Registers a timer, as Celery's prefork pool does."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.ticked = 0

    def register_with_event_loop(self, hub: Hub) -> None:
        if self.fails:
            raise OSError("no pipe")
        hub.call_repeatedly(0.01, self.tick)

    def tick(self) -> None:
        self.ticked += 1


def test_the_event_loop_runs_during_a_long_connect_and_is_unchanged_afterwards() -> None:
    hub, pool = Hub(), HubPool()

    def transports() -> None:
        raise AssertionError("a transport's callback is not called meanwhile")

    def connect() -> str:
        wait_until(lambda: pool.ticked > 2, 10, "the event loop to turn")
        return "connected"

    hub.on_tick.add(transports)
    with closing(hub):
        assert call_in_background(SimpleNamespace(hub=hub, pool=pool), connect) == "connected"
        assert hub.on_tick == {transports}
        assert all(scheduled.entry.canceled for scheduled in hub.timer.queue)


def test_an_event_loop_whose_pool_cannot_register_keeps_its_callbacks() -> None:
    hub = Hub()

    def transports() -> None: ...

    hub.on_tick.add(transports)
    with closing(hub), pytest.raises(OSError, match="no pipe"):
        turn_event_loop(SimpleNamespace(hub=hub, pool=HubPool(fails=True)), 10)
    assert hub.on_tick == {transports}
