"""A worker measures for how long it has been without its broker, its timer and beat."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest

from delaytasks.core.workers import (
    RegisteredWorker,
    ServiceTimes,
    beat_age_s,
    broker_down_s,
)
from delaytasks.worker import service_watch as service_watch_module
from delaytasks.worker.service_watch import ServiceWatch
from tests.unit.manual_monotonic import ManualMonotonic

NOW = datetime(2026, 11, 25, tzinfo=timezone.utc)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> ManualMonotonic:
    time = ManualMonotonic()
    monkeypatch.setattr(service_watch_module, "monotonic", time)
    return time


def test_an_outage_of_the_broker_lasts_from_its_first_error_to_the_next_connection(
    time: ManualMonotonic,
) -> None:
    timer: Any = SimpleNamespace(is_up=True)
    watch = ServiceWatch(timer, lambda: None)
    watch.mark_broker_lost()
    time.at += 7
    watch.mark_broker_lost()  # the next attempt to connect
    time.at += 1
    assert watch.times(reads_beat=False) == ServiceTimes(broker_down_s=8)
    watch.mark_broker_back()
    assert watch.times(reads_beat=False) == ServiceTimes()


def test_an_idle_timer_that_is_down_tries_its_server_at_each_report(time: ManualMonotonic) -> None:
    timer: Any = SimpleNamespace(is_up=False)
    answers = iter([False, False, True])

    def check() -> None:
        timer.is_up = next(answers)

    watch = ServiceWatch(timer, check)
    assert watch.times(reads_beat=False).timer_down_s == 0
    time.at += 5
    assert watch.times(reads_beat=False).timer_down_s == 5
    assert watch.times(reads_beat=False).timer_down_s is None


def test_beat_is_as_old_as_its_last_message(time: ManualMonotonic) -> None:
    timer: Any = SimpleNamespace(is_up=True)
    watch = ServiceWatch(timer, lambda: None)
    time.at += 60
    assert watch.times(reads_beat=True).beat_s == 60, "it has waited since its start"
    watch.mark_beat()
    time.at += 2
    assert watch.times(reads_beat=True).beat_s == 2
    assert watch.times(reads_beat=False).beat_s is None


def test_beat_is_not_late_because_the_broker_was_away(time: ManualMonotonic) -> None:
    timer: Any = SimpleNamespace(is_up=True)
    watch = ServiceWatch(timer, lambda: None)
    watch.mark_broker_lost()
    time.at += 60
    watch.mark_broker_back()
    assert watch.times(reads_beat=True).beat_s == 0
    time.at += 5
    watch.mark_broker_back()  # it was not lost
    assert watch.times(reads_beat=True).beat_s == 5


def worker(is_alive: bool = True, up_s: float = 3600, **services: float) -> RegisteredWorker:
    times, began = ServiceTimes(**services), NOW - timedelta(seconds=up_s)
    return RegisteredWorker(
        "w", is_alive, 0, ["default"], None, "prefork", 2, began, NOW, 0.0, times
    )


def test_the_newest_message_of_beat_counts_among_the_workers_that_can_receive_one() -> None:
    assert beat_age_s([worker(beat_s=400), worker(beat_s=3), worker()]) == 3
    assert beat_age_s([worker(is_alive=False, beat_s=3), worker(beat_s=400)]) == 400
    assert beat_age_s([worker(broker_down_s=60, beat_s=60)]) is None
    assert beat_age_s([worker()]) is None


def test_the_broker_is_down_since_no_worker_has_reached_it() -> None:
    assert broker_down_s([]) is None
    assert broker_down_s([worker(broker_down_s=60), worker()]) is None
    assert broker_down_s([worker(broker_down_s=60), worker(is_alive=False)]) == 60
    alone = worker(broker_down_s=3000)  # the broker answered others for longer
    assert broker_down_s([alone, worker(broker_down_s=60)]) == 60


def test_a_worker_that_started_without_a_broker_does_not_know_since_when_it_is_down() -> None:
    restarted = worker(up_s=20, broker_down_s=20)
    assert broker_down_s([restarted, worker(broker_down_s=60)]) == 60
    assert broker_down_s([restarted, worker(up_s=40, broker_down_s=41)]) == 41
