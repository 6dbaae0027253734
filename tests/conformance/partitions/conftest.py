"""Fixtures of the suites of partitions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.partitions.converted_table import ConvertedTable


@pytest.fixture
def field(postgresql_url: str) -> Iterator[ConvertedTable]:
    made = ConvertedTable(postgresql_url)
    yield made
    made.close()
