"""Fixtures that several conformance suites share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection

from delaytasks import DelayTasks
from delaytasks.runtime import runtime_of
from delaytasks.storage.claims import Claims
from delaytasks.storage.store import Store
from tests.recording import WaitingTimer
from tests.world import World
from tests.world.broker import RecordingTimer


@pytest.fixture
def delays(world: World) -> DelayTasks:
    """The instance of the world."""
    return world.delays


@pytest.fixture
def timer(world: World) -> RecordingTimer:
    return world.broker


@pytest.fixture
def waiting_timer(delays: DelayTasks) -> WaitingTimer:
    timer: Any = WaitingTimer()
    producer: Any = runtime_of(delays).producer
    producer._timer = timer
    made: WaitingTimer = timer
    return made


@pytest.fixture
def claims(store: Store) -> Claims:
    return store.claims("worker-1", 0x7F000001)


@pytest.fixture
def owner(store: Store) -> Iterator[Connection]:
    """Yield a caller's transaction that stays open."""
    with store.database.tx.connect() as connection, connection.begin() as transaction:
        yield connection
        if transaction.is_active:
            transaction.rollback()
