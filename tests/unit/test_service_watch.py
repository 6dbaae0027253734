"""For how long the broker, beat, the timer and the database are available."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from delaytasks import StoreError, StoreUnavailableError
from delaytasks.core.events import Events
from delaytasks.core.workers import RegisteredWorker, ServiceTimes, beat_age_s, broker_down_s
from delaytasks.worker import service_watch
from delaytasks.worker import service_watch as service_watch_module
from delaytasks.worker.service_watch import (
    DATABASE_ANSWER_S,
    DatabaseContact,
    DatabaseOutages,
    ServiceWatch,
    policy_loop,
)
from tests.recording import ManualMonotonic

# -- A worker measures for how long it has been without its broker, its timer and beat ------------


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


# -- A worker tracks outages of, and uninterrupted contact with, its databases --------------------


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(service_watch, "monotonic", lambda: clock.now)
    return clock


@pytest.mark.parametrize(
    ("error", "is_down"),
    [
        (StoreError("permission denied"), False),
        (StoreUnavailableError("stayed busy", is_locked=True), False),
        (StoreUnavailableError("connection refused"), True),
    ],
)
def test_a_database_that_refuses_is_not_down(
    host: SimpleNamespace, error: StoreError, is_down: bool
) -> None:
    events, told = Events(), list[str]()
    events.subscribe(lambda name, fields: told.append(name))
    outages = DatabaseOutages(events)

    def refresh() -> Any:
        raise error

    known = SimpleNamespace(stamp=None)
    cache = SimpleNamespace(known=known, refresh=refresh, cancel_requests=0)
    runtime: Any = SimpleNamespace(
        policy_cache=cache, events=events, store=SimpleNamespace(close=None)
    )
    loop = policy_loop(runtime, outages, Mock())
    for _ in range(3):
        with suppress(StoreError):
            loop._turn()
        host.now += DATABASE_ANSWER_S + 1
        outages.check_answer()
    assert told == (["store.down"] if is_down else [])


def test_a_contact_lasts_as_long_as_answers_have_no_gap(host: SimpleNamespace) -> None:
    contact = DatabaseContact(gap_s=8)
    assert contact.seconds == 0, "nobody has answered yet"
    for _ in range(4):
        contact.mark_answered()
        host.now += 5
    assert contact.seconds == 20


def test_a_gap_or_a_failure_restarts_the_contact(host: SimpleNamespace) -> None:
    contact = DatabaseContact(gap_s=8)
    contact.mark_answered()
    host.now += 5
    contact.mark_failed()
    assert contact.seconds == 0
    contact.mark_answered()
    host.now += 9
    assert contact.seconds == 0, "this process may have stood still"
    contact.mark_answered()
    host.now += 1
    assert contact.seconds == 1
