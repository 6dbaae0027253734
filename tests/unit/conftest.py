"""Provide test harnesses, each with its own SQLite file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import open_store
from tests.recording import RunnerHarness
from tests.unit import worker_harness

Make = Callable[..., RunnerHarness]


@pytest.fixture(autouse=True)
def _close_runtimes() -> Iterator[None]:
    yield
    worker_harness.close_all()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[RunnerHarness] = []

    def new(may_detach: bool = False, **changes: Any) -> RunnerHarness:
        store = open_store(f"sqlite:///{tmp_path / f'{len(made)}.sqlite3'}", **changes)
        made.append(RunnerHarness(store, may_detach, **changes))
        return made[-1]

    yield new
    for bench in made:
        bench.store.close()


@pytest.fixture
def bench(make: Make) -> RunnerHarness:
    return make()
