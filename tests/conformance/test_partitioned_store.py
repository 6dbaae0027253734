"""Run the store suite again on a partitioned table, with ids that belong to different
partitions."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from datetime import timedelta

import pytest

from delaytasks.core.ids import first_id
from delaytasks.partitions.conversion import convert
from delaytasks.partitions.table import Partitions
from delaytasks.storage.store import Store
from tests.conformance import test_store
from tests.conformance.test_store import claims, owner  # noqa: F401
from tests.conftest import empty, open_store

globals().update(
    (name, each)
    for name, each in vars(test_store).items()
    if name.startswith("test_") and "store" in inspect.signature(each).parameters
)


@pytest.fixture(scope="module")
def partitioned(postgresql_url: str) -> Iterator[Store]:
    store = open_store(postgresql_url, table_prefix="p_")
    convert(Partitions(store.database, "p_"), timedelta(days=7), 4)
    yield store
    with store.database.begin() as connection:
        store.schema.metadata.drop_all(connection)
    store.close()


@pytest.fixture
def store(partitioned: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Return a store whose ids cycle through the first, three later, and the default partition."""
    now = partitioned.tasks.now()
    bases = itertools.cycle(
        [0, *(first_id(now + timedelta(days=days)) for days in (15, 22, 24, 1000))]
    )
    ids = (base + n for base, n in zip(bases, itertools.count(1_000_000), strict=False))
    monkeypatch.setattr(test_store, "_ids", ids)
    empty(partitioned)
    return partitioned
