"""Fixtures of the tests of the dispatcher."""

from __future__ import annotations

import pytest

from tests.unit.dispatcher.dispatcher_harness import DispatcherHarness, Hands


@pytest.fixture
def bench() -> DispatcherHarness:
    return DispatcherHarness()


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    return Hands(monkeypatch)
