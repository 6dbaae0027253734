"""Run the suites of the store again on a partitioned table, with ids that belong to different
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
from tests.conformance import (
    store_rows,
    test_claims,
    test_inserts,
    test_keys,
    test_leases,
    test_lookup,
    test_operator_moves,
    test_settlements,
    test_sweep_queries,
)
from tests.conftest import empty, open_store

pytestmark = pytest.mark.slow

SUITES = (
    test_inserts,
    test_keys,
    test_lookup,
    test_operator_moves,
    test_claims,
    test_settlements,
    test_leases,
    test_sweep_queries,
)
globals().update(
    (name, each)
    for suite in SUITES
    for name, each in vars(suite).items()
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
    monkeypatch.setattr(store_rows, "_ids", ids)
    empty(partitioned)
    return partitioned
