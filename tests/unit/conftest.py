"""Worlds and stores of unit tests are on SQLite."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import pytest

from tests.conftest import open_store
from tests.waiting import wait_until
from tests.world import Settlement, World
from tests.world.recording import ManualTime


@pytest.fixture(scope="session")
def session_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    store = open_store(f"sqlite:///{tmp_path_factory.mktemp('unit') / 'world.sqlite3'}")
    yield store
    store.close()


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> ManualTime:
    """The clock of all modules, which a test sets."""
    time = ManualTime()
    time.replace(monkeypatch)
    return time


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> ManualTime:
    """The clock of all modules, which runs, and which a test sets ahead."""
    time = ManualTime(0.0, runs=True)
    time.replace(monkeypatch)
    return time


class Gate:
    """Block each caller until the gate is open, and count the callers."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.inside = self.most = 0
        self._lock = threading.Lock()

    def __call__(self, body: Any) -> None:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        assert self.is_open.wait(10)
        with self._lock:
            self.inside -= 1

    def wait_for(self, callers: int) -> None:
        wait_until(lambda: self.inside == callers, 5, f"{callers} rows to run")


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.is_open.set()


@pytest.fixture
def pool() -> Iterator[Executor]:
    with ThreadPoolExecutor(3) as made:
        yield made


def fail_settlements(world: World, errors: Iterable[Exception], of: Any = None) -> None:
    """Raise the next error before each settlement of a world, or of this task only."""
    left = iter(errors)

    def fail(settlements: Sequence[Settlement]) -> None:
        if of is None or of.id in [settlement.task.id for settlement in settlements]:
            for error in left:
                raise error

    world.before_settle = fail
