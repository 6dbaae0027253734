"""Fixtures that several conformance suites share."""

from __future__ import annotations

import pytest

from delaytasks import DelayTasks
from tests.world import World, WorldBroker
from tests.world.recording import WaitingTimer


@pytest.fixture
def delays(world: World) -> DelayTasks:
    """The instance of the world."""
    return world.delays


@pytest.fixture
def timer(world: World) -> WorldBroker:
    return world.broker


@pytest.fixture
def waiting_timer(world: World) -> WaitingTimer:
    timer = world.runtime.producer._timer = WaitingTimer()
    return timer
