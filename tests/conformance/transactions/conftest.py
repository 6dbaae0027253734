"""Fixtures of the suites of transactions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from delaytasks.storage.sessions import _waiting
from delaytasks.storage.store import Store
from tests.conformance.transactions.shop import SessionCaller


@pytest.fixture
def shop(store: Store, database_url: str) -> Iterator[SessionCaller]:
    made = SessionCaller(database_url, store)
    yield made
    made.delays.close()
    made.engine.dispose()
    assert not _waiting, "a connection's tasks are remembered beyond its end"
