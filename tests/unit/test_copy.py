"""COPY receives its text in parts."""

from __future__ import annotations

import operator
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from delaytasks.storage.engines import _CopyFile
from delaytasks.storage.inserts import _COPY_CHARACTERS, _COPY_ROWS, _copy_parts


class Interruption(BaseException):
    """Simulate the exception of a time limit."""


def rows(count: int, body: str = "{}") -> Iterator[tuple[Any, ...]]:
    return ((n, body, "2030-01-01", "tag") for n in range(count))


def test_all_rows_come_in_parts_and_then_nothing() -> None:
    text = _CopyFile(_copy_parts(rows(2 * _COPY_ROWS + 1)))
    parts = list(iter(partial(text.read, 8192), ""))
    assert [part.count("\n") for part in parts] == [_COPY_ROWS, _COPY_ROWS, 1]
    assert text.read(8192) == ""
    assert [part.count("\n") for part in _copy_parts(rows(2 * _COPY_ROWS))] == [_COPY_ROWS] * 2


def test_a_part_of_large_bodies_has_few_of_them() -> None:
    found = _copy_parts(rows(10, "x" * (_COPY_CHARACTERS // 2)))
    assert [part.count("\n") for part in found] == [2] * 5


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no timers")
def test_an_interruption_that_waited_while_the_driver_was_busy_is_kept() -> None:
    def interrupt(_number: int, _frame: object) -> None:
        raise Interruption

    text = _CopyFile(_copy_parts(rows(10)))
    # Both calls run in C, as in the driver. The signal arrives during the first call, and Python
    # runs its handler during the second call.
    calls = [partial(sum, range(20_000_000)), partial(text.read, 8192)]
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(Interruption):
            list(map(operator.methodcaller("__call__"), calls))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert isinstance(text.interrupted, Interruption)
