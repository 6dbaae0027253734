"""Fixtures of the suites of waitlists."""

from __future__ import annotations

import pytest

from delaytasks.storage.store import Store
from tests.conformance.waitlists.limited_runner import LimitedRunnerHarness


@pytest.fixture
def bench(store: Store) -> LimitedRunnerHarness:
    return LimitedRunnerHarness(store)
