"""Worlds and stores of unit tests are on SQLite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from delaytasks.storage.store import Store
from tests.conftest import open_store


@pytest.fixture(scope="session")
def session_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    store = open_store(f"sqlite:///{tmp_path_factory.mktemp('unit') / 'world.sqlite3'}")
    yield store
    store.close()
