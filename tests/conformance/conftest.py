"""Fixtures that several conformance suites share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from delaytasks import DelayTasks
from delaytasks.storage.store import Store
from tests.recording import RecordingTimer, delays_on, record


@pytest.fixture
def delays(store: Store, database_url: str) -> Iterator[DelayTasks]:
    made = delays_on(database_url, table_prefix="s_")
    yield made
    made.close()


@pytest.fixture
def timer(delays: DelayTasks) -> RecordingTimer:
    return record(delays)
