"""How long the console keeps a value that all viewers share."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from delaytasks.console import requests
from delaytasks.console.requests import SharedCache


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of the clock that the cache reads, in a list of one."""
    now = [1000.0]
    monkeypatch.setattr(requests, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("duration_s", "has_failed", "kept_s"),
    [(0.1, False, 4), (0.5, False, 10), (30, False, 60), (30, True, 4)],
)
def test_a_value_that_was_read_slowly_is_kept_longer(
    clock: list[float], duration_s: float, has_failed: bool, kept_s: float
) -> None:
    shared, reads = SharedCache(), list[float]()

    def read() -> int:
        reads.append(clock[0])
        clock[0] += duration_s
        return len(reads)

    def get() -> int:
        return shared.get("numbers", 4.0, read, has_failed=lambda value: has_failed)

    assert get() == 1
    clock[0] += kept_s - 0.01
    assert get() == 1
    clock[0] += 0.02
    assert get() == 2


def test_threads_that_wait_get_the_error_of_the_first(clock: list[float]) -> None:
    shared, reads, goes_on = SharedCache(), list[int](), threading.Event()

    def read() -> int:
        reads.append(1)
        goes_on.wait(30)
        if len(reads) > 1:
            return 7
        raise ConnectionError("the database is silent")

    def get() -> int:
        return shared.get("numbers", 10.0, read)

    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(get) for _ in range(8)]
        goes_on.set()
        errors = [each.exception(30) for each in waiting]
    assert [type(error) for error in errors] == [ConnectionError] * 8
    assert len(reads) == 1
    clock[0] += 4.01
    assert get() == 7
