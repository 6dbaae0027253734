"""Metrics: their port, how long they are kept, and the dashboard."""

from __future__ import annotations

import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry

from delaytasks.events import Events
from delaytasks.operate import metrics as prometheus
from delaytasks.operate.metrics import FAULT_EVENTS, MetricsEndpoint
from delaytasks.operate.serving import SharedCache
from delaytasks.settings import Address
from tests.doc_pages import DASHBOARD
from tests.services import free_port
from tests.waiting import wait_until
from tests.world.recording import ManualTime

# -- the port of a worker's metrics ---------------------------------------------------------------


def is_served(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except OSError:
        return False
    return True


def test_a_port_that_another_worker_still_has_is_served_as_soon_as_it_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prometheus, "PORT_S", 0.02)
    port, events = free_port(), Events()
    place, registry = Address("127.0.0.1", port), CollectorRegistry()
    earlier, later = (MetricsEndpoint(place, each, registry) for each in (Events(), events))
    with ExitStack() as stops:
        stops.callback(earlier.stop)
        stops.callback(later.stop)
        earlier.loop.start()
        wait_until(lambda: is_served(port), 20, "the metrics to be served")
        later.loop.start()
        wait_until(lambda: events.counts["metrics.not_served"], 20, "the first attempt")
        earlier.stop()
        wait_until(lambda: is_served(port), 20, "the metrics of the other worker")
    assert not is_served(port)
    assert events.counts["metrics.not_served"] == 1


# -- dashboard ------------------------------------------------------------------------------------


def test_the_dashboard_shows_the_fault_events_whose_counters_begin_at_zero() -> None:
    [shown] = re.findall(r'delaytasks_events_total\{event=~\\"([^"\\]+)\\"', DASHBOARD.read_text())
    assert sorted(shown.split("|")) == sorted(FAULT_EVENTS)


# -- how long values are kept that all viewers share -----------------------------------------------


@pytest.mark.parametrize(("duration_s", "kept_s"), [(0.1, 4), (0.5, 10), (30, 60)])
def test_a_value_that_was_read_slowly_is_kept_longer(
    time: ManualTime, duration_s: float, kept_s: float
) -> None:
    shared, reads = SharedCache(), list[float]()

    def read() -> int:
        reads.append(time.at)
        time.at += duration_s
        return len(reads)

    for later_s, found in ((0, 1), (kept_s - 0.01, 1), (0.02, 2)):
        time.at += later_s
        assert shared.get("numbers", 4.0, read) == found


def test_threads_that_wait_get_the_error_of_the_first(time: ManualTime) -> None:
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
    time.at += 4.01
    assert get() == 7
