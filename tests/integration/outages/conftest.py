"""Fixtures of the tests of outages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.outages.line import Connect, Line


@pytest.fixture
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    made: list[Line] = []

    def new(database: str = "postgresql", broker: str = "redis", **settings: Any) -> Line:
        urls = [request.getfixturevalue(f"{name}_url") for name in (database, broker)]
        made.append(Line(*urls, **settings))
        return made[-1]

    yield new
    for line in made:
        line.close()
