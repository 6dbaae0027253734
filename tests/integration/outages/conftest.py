"""Fixtures of the tests of outages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.outages.proxied_caller import Connect, ProxiedCaller


@pytest.fixture
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    made: list[ProxiedCaller] = []

    def new(database: str = "postgresql", broker: str = "redis", **settings: Any) -> ProxiedCaller:
        urls = [request.getfixturevalue(f"{name}_url") for name in (database, broker)]
        made.append(ProxiedCaller(*urls, **settings))
        return made[-1]

    yield new
    for caller in made:
        caller.close()
