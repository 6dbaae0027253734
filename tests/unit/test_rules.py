"""Rules of a worker's main process, by a clock that a test sets: rates, and what it lacks."""

from __future__ import annotations

import random
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st
from kombu.connection import Connection

from delaytasks import StoreError, StoreUnavailableError
from delaytasks.broker.link import bounded_connection
from delaytasks.db.sweep_queries import ServiceTimes
from delaytasks.limits.admission import StartPace
from delaytasks.worker import quick_loops
from delaytasks.worker.quick_loops import ServiceWatch
from tests.world import MainProcess, MonkeyPatch, World
from tests.world.recording import ManualTime

# -- rates ---------------------------------------------------------------------------------------


@given(st.integers(1, 300), st.sampled_from([0.5, 1.0, 60.0]), st.integers(0, 2**32))
def test_no_period_has_more_starts_than_its_rate(rate: int, period_s: float, seed: int) -> None:
    """The limit holds at any time of a request and for any number of starts."""
    pace, chance = StartPace.of(rate, period_s), random.Random(seed)
    now, next_start, starts = 0.0, 0.0, list[float]()
    while now < 2.5 * period_s:
        now += chance.choice([pace.interval_s / 7, pace.interval_s, chance.random() * period_s / 3])
        ahead_s = max(next_start - now, 0.0)
        taken = chance.randint(0, pace.starts(ahead_s))
        starts += [now] * taken
        if taken:
            next_start = now + ahead_s + taken * pace.interval_s
    for since in starts:
        assert sum(since <= start < since + period_s for start in starts) <= rate


# -- for how long a worker has been without its broker, its timer and beat -----------------------


def test_a_worker_knows_for_how_long_it_lacks_a_service(time: ManualTime) -> None:
    timer: Any = SimpleNamespace(is_up=True)
    watch = ServiceWatch(timer)

    def after(seconds: float, reads_beat: bool = True) -> ServiceTimes:
        time.at += seconds
        return watch.times(reads_beat)

    assert after(60).beat_s == 60, "it has waited since its start"
    watch.mark_beat()
    assert after(2).beat_s == 2
    watch.mark_broker_lost()
    time.at += 60
    watch.mark_broker_lost()  # the next attempt to connect
    assert after(1, reads_beat=False) == ServiceTimes(broker_down_s=61)
    watch.mark_broker_back()
    assert after(0) == ServiceTimes(beat_s=0), "beat could not be heard meanwhile"
    time.at += 5
    watch.mark_broker_back()  # it was not lost
    assert after(0).beat_s == 5
    for timer.is_up, down_s in ((False, 0), (False, 5), (True, None)):
        assert after(5).timer_down_s == down_s


# -- uninterrupted contact with the databases, and refusals ----------------------------------------


DOWN = StoreUnavailableError("connection refused")
REFUSALS = [StoreError("permission denied"), StoreUnavailableError("stayed busy", is_locked=True)]


@pytest.mark.parametrize("error", [*REFUSALS, DOWN])
def test_a_database_that_refuses_is_not_down(
    world: World, time: ManualTime, error: StoreError
) -> None:
    main = MainProcess(world)
    for _ in range(3):
        with world.failing("policies", error), suppress(StoreError):
            main.read_policies()
        time.at += 6
    main.close()
    assert len(world.told("store.down")) == (error is DOWN)


def test_a_gap_or_a_failure_restarts_the_contact(time: ManualTime) -> None:
    contact = quick_loops.DatabaseContact(gap_s=8)
    assert contact.seconds() == 0, "nobody has answered yet"
    for _ in range(4):
        contact.mark_answered()
        time.at += 5
    assert contact.seconds() == 20
    contact.mark_failed()
    assert contact.seconds() == 0
    contact.mark_answered()
    time.at += 9
    assert contact.seconds() == 0, "this process may have stood still"
    contact.mark_answered()
    time.at += 1
    assert contact.seconds() == 1


# -- a broker that confirms --------------------------------------------------------------------


@pytest.mark.parametrize(("options", "bound_s"), [({"confirm_publish": True}, 0.5), ({}, 2.0)])
def test_reading_a_confirmation_is_bounded_as_sending_is(
    monkeypatch: MonkeyPatch, options: dict[str, Any], bound_s: float
) -> None:
    app = Celery("test", broker="amqp://127.0.0.1", set_as_current=False)
    app.conf.broker_transport_options = options
    monkeypatch.setattr(Connection, "ensure_connection", lambda *_, **__: None)
    connection = bounded_connection(app, 0.5, connect_step_s=2.0)
    assert connection.transport_options["read_timeout"] == bound_s
