"""Fixtures of the suites of recurring schedules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from delaytasks.storage.store import Store
from tests.conformance.recurring.recurring_harness import RecurringHarness


@pytest.fixture
def harness(store: Store, database_url: str) -> Iterator[RecurringHarness]:
    made = RecurringHarness(database_url, store)
    yield made
    made.close()
