"""Fixtures of the tests of migrations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from delaytasks.storage.database import Database
from tests.migration.tables import drop_tables


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    drop_tables(database, None)
    yield database
    drop_tables(database, None)
    database.dispose()
