"""Fixtures of the suites of policies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from delaytasks.maintenance import sweeper as engine_holding
from delaytasks.runtime import runtime_of
from delaytasks.storage import policy_rows as store_holding
from tests.conformance.policies.policy_harness import PolicyHarness
from tests.conftest import empty


@pytest.fixture(scope="module")
def session_field(database_url: str) -> Iterator[PolicyHarness]:
    field = PolicyHarness(database_url)
    with field.store.database.begin() as connection:
        field.store.schema.metadata.drop_all(connection)
        field.store.schema.metadata.create_all(connection)
    yield field
    with field.store.database.begin() as connection:
        field.store.schema.metadata.drop_all(connection)
    field.close()


@pytest.fixture
def field(session_field: PolicyHarness) -> Iterator[PolicyHarness]:
    """Yield a fresh process on empty tables."""
    empty(session_field.store)
    made = PolicyHarness(session_field.url)
    yield made
    made.close()


@pytest.fixture
def small_steps(field: PolicyHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit each step to one row, and each sweep to one step."""
    monkeypatch.setattr(store_holding, "ROWS_PER_QUERY", 2)
    monkeypatch.setattr(engine_holding, "PAUSE_ROWS", 1)
    monkeypatch.setattr(runtime_of(field.delays).sweeper._pauses, "_budget_s", -1)
