"""Metrics: their port, how long they are kept, and the dashboard."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from delaytasks import StoreUnavailableError
from delaytasks.console import requests
from delaytasks.console.requests import SharedCache
from delaytasks.core.events import Events
from delaytasks.core.settings import Address
from delaytasks.metrics import prometheus, snapshot
from delaytasks.metrics.files import read_file
from delaytasks.metrics.process import FAULT_EVENTS
from delaytasks.metrics.prometheus import MetricsEndpoint
from delaytasks.metrics.snapshot import MAX_REST_S, REST_S, DatabaseMetrics
from delaytasks.operations.state import read_tables
from delaytasks.runtime import runtime_of
from tests.recording import ManualMonotonic, delays_on
from tests.services import free_port
from tests.waiting import wait_until

# -- the port of a worker's metrics ---------------------------------------------------------------


def is_served(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except OSError:
        return False
    return True


def endpoint_at(port: int, events: Events) -> MetricsEndpoint:
    source: Any = SimpleNamespace(families=list)
    return MetricsEndpoint(Address("127.0.0.1", port), events, source)


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
    two.earlier.loop.start()
    wait_until(lambda: is_served(two.port), 20, "the metrics of the earlier worker")
    two.later.loop.start()
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
    assert not two.later.loop.info()["is_alive"]
    two.earlier.stop()
    assert not is_served(two.port)


def test_a_server_that_dies_is_replaced_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "PORT_S", 0.02)
    events, port = Events(), free_port()
    made = endpoint_at(port, events)
    made.loop.start()
    try:
        server: Any = wait_until(lambda: made._server, 20, "the metrics to be served")
        server._server.shutdown()  # ends its thread
        wait_until(lambda: events.counts["loop.restarted"] == 1, 20, "the report")
        wait_until(lambda: is_served(port), 20, "the metrics to be served again")
    finally:
        made.stop()


# -- how long the metrics of the databases are kept before they are read again --------------------


def rest_after_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[..., Any], took_s: float
) -> float:
    """Return the whole seconds for which the values of a reading of `took_s` are kept."""
    time, reads = ManualMonotonic(), list[float]()

    def slow(*arguments: Any) -> Any:
        reads.append(time.at)
        time.at += took_s
        return read(*arguments)

    monkeypatch.setattr(snapshot, "monotonic", time)
    monkeypatch.setattr(snapshot, "read_tables", slow)
    delays = delays_on(f"sqlite:///{tmp_path / 'a.sqlite3'}")
    runtime_of(delays).store.schema.metadata.create_all(runtime_of(delays).store.database.tx)
    source = DatabaseMetrics(runtime_of(delays))
    source.families()
    read_at = time.at
    while len(reads) == 1:
        time.at += 1
        source.families()
    delays.close()
    return reads[1] - read_at


def refuse_reading(*_: Any) -> None:
    raise StoreUnavailableError("down")


def test_a_database_that_was_down_is_read_again_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rest_after_reading(tmp_path, monkeypatch, refuse_reading, 5) == REST_S


@pytest.mark.parametrize(("took_s", "rest_s"), [(0.1, REST_S), (1, 20), (5, MAX_REST_S)])
def test_slow_queries_are_repeated_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, took_s: float, rest_s: float
) -> None:
    read = read_tables
    assert rest_after_reading(tmp_path, monkeypatch, read, took_s) == rest_s


# -- dashboard ------------------------------------------------------------------------------------


def test_the_dashboard_shows_the_fault_events_whose_counters_begin_at_zero() -> None:
    [shown] = re.findall(r'delaytasks_events_total\{event=~\\"([^"\\]+)\\"', read_file("dashboard"))
    assert sorted(shown.split("|")) == sorted(FAULT_EVENTS)


# -- how long the console keeps a value that all viewers share ------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of the clock that the cache reads, in a list of one."""
    now = [1000.0]
    monkeypatch.setattr(requests, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("duration_s", "has_failed", "kept_s"),
    [(0.1, False, 4), (0.5, False, 10), (30, False, 60), (30, True, 4)],
)
def test_a_value_that_was_read_slowly_is_kept_longer(
    clock: list[float], duration_s: float, has_failed: bool, kept_s: float
) -> None:
    shared, reads = SharedCache(), list[float]()

    def read() -> int:
        reads.append(clock[0])
        clock[0] += duration_s
        return len(reads)

    def get() -> int:
        return shared.get("numbers", 4.0, read, has_failed=lambda value: has_failed)

    assert get() == 1
    clock[0] += kept_s - 0.01
    assert get() == 1
    clock[0] += 0.02
    assert get() == 2


def test_threads_that_wait_get_the_error_of_the_first(clock: list[float]) -> None:
    shared, reads, goes_on = SharedCache(), list[int](), threading.Event()

    def read() -> int:
        reads.append(1)
        goes_on.wait(30)
        if len(reads) > 1:
            return 7
        raise ConnectionError("the database is silent")

    def get() -> int:
        return shared.get("numbers", 10.0, read)

    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(get) for _ in range(8)]
        goes_on.set()
        errors = [each.exception(30) for each in waiting]
    assert [type(error) for error in errors] == [ConnectionError] * 8
    assert len(reads) == 1
    clock[0] += 4.01
    assert get() == 7
