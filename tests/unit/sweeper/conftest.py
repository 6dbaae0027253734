"""Fixtures of the tests of the sweeper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.sweeper.sweeper_harness import Make, SweeperHarness


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[SweeperHarness] = []

    def new(**changes: Any) -> SweeperHarness:
        made.append(SweeperHarness(f"sqlite:///{tmp_path / f'{len(made)}.sqlite3'}", **changes))
        return made[-1]

    yield new
    for field in made:
        field.store.close()


@pytest.fixture
def field(make: Make) -> SweeperHarness:
    return make()
