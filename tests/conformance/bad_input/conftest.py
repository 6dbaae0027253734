"""Fixtures of the suites for invalid input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from delaytasks.storage.store import Store
from tests.conformance.bad_input.refusing_client import RefusingClient


@pytest.fixture
def make(store: Store, database_url: str) -> Iterator[Callable[..., RefusingClient]]:
    made: list[RefusingClient] = []

    def new(**changes: Any) -> RefusingClient:
        made.append(RefusingClient(database_url, store, **changes))
        return made[-1]

    yield new
    for place in made:
        place.delays.close()


@pytest.fixture
def place(make: Callable[..., RefusingClient]) -> RefusingClient:
    return make()
