"""A worker tracks outages of, and uninterrupted contact with, its databases."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from delaytasks.core.errors import StoreError, StoreUnavailableError
from delaytasks.core.events import Events
from delaytasks.worker import service_watch
from delaytasks.worker.service_watch import (
    DATABASE_ANSWER_S,
    DatabaseContact,
    DatabaseOutages,
    policy_loop,
)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
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
    time: SimpleNamespace, error: StoreError, is_down: bool
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
        time.now += DATABASE_ANSWER_S + 1
        outages.check_answer()
    assert told == (["store.down"] if is_down else [])


def test_a_contact_lasts_as_long_as_answers_have_no_gap(time: SimpleNamespace) -> None:
    contact = DatabaseContact(gap_s=8)
    assert contact.seconds == 0, "nobody has answered yet"
    for _ in range(4):
        contact.mark_answered()
        time.now += 5
    assert contact.seconds == 20


def test_a_gap_or_a_failure_restarts_the_contact(time: SimpleNamespace) -> None:
    contact = DatabaseContact(gap_s=8)
    contact.mark_answered()
    time.now += 5
    contact.mark_failed()
    assert contact.seconds == 0
    contact.mark_answered()
    time.now += 9
    assert contact.seconds == 0, "this process may have stood still"
    contact.mark_answered()
    time.now += 1
    assert contact.seconds == 1
