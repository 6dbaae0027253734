"""Availability reports each change of a service once, and a failure begins a rest."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from delaytasks.core import loop as availability
from delaytasks.core.loop import SERVICE_REST_S, Availability

THREADS = 8


def test_only_changes_of_the_state_are_reported() -> None:
    told: list[str] = []
    broker = Availability(told.append, lambda: told.append("up"))
    broker.answered()
    broker.failed("first")
    broker.failed("second")
    assert not broker.is_up
    broker.answered()
    broker.answered()
    assert broker.is_up
    assert told == ["first", "up"]


def test_after_a_failure_the_service_is_not_used_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(availability, "monotonic", lambda: now[0])
    broker = Availability(lambda error: None)
    assert not broker.is_resting
    broker.failed("away")
    assert broker.is_resting
    now[0] += SERVICE_REST_S - 0.01
    broker.failed("still")
    now[0] += 0.5
    assert broker.is_resting, "each failure begins a rest"
    now[0] += SERVICE_REST_S
    assert not broker.is_resting
    assert not broker.is_up, "nobody has asked"


def test_after_a_success_the_service_is_used_again() -> None:
    broker = Availability(lambda error: None)
    broker.failed("away")
    broker.answered()
    assert not broker.is_resting


def test_threads_that_notice_a_failure_simultaneously_report_it_once() -> None:
    class Watched(Availability):
        """Let another thread run between the read of the state and its change."""

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "is_up":
                time.sleep(0)
            super().__setattr__(name, value)

    told: list[str] = []
    broker = Watched(told.append, lambda: told.append("up"))
    start = threading.Barrier(THREADS)

    def find_out(_: int) -> None:
        for _ in range(200):
            start.wait()
            broker.failed("down")
            start.wait()
            broker.answered()

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(find_out, range(THREADS)))
    assert told == ["down", "up"] * 200
