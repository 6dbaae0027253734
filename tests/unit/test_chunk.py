"""One thread ends the time budgetes of all chunks of a process."""

from __future__ import annotations

import threading
import time

import pytest

from delaytasks.core.clock import monotonic
from delaytasks.execution.chunk import Chunk, TimeBudget
from tests.recording import RunnerHarness
from tests.waiting import wait_until

BOX_S = 0.1


class Boxes:
    def __init__(self, budget_s: float = BOX_S) -> None:
        self.expired: list[Chunk] = []
        self.errors: list[Exception] = []
        self.box = TimeBudget(budget_s, self._expire, self.errors.append)

    def _expire(self, chunk: Chunk) -> None:
        self.expired.append(chunk)

    def chunk(self) -> Chunk:
        chunk = Chunk([], 60, 60)
        self.box.open(chunk)
        return chunk


@pytest.mark.parametrize(
    "rest_s", [0, BOX_S / 2, BOX_S * 3], ids=["at once", "while it rests", "when it sleeps"]
)
def test_an_open_chunk_is_reported_after_its_time_budget_whatever_ran_before(
    rest_s: float,
) -> None:
    boxes = Boxes()
    boxes.box.close(boxes.chunk())
    time.sleep(rest_s)
    began, chunk = monotonic(), boxes.chunk()
    wait_until(lambda: boxes.expired, 5, "the end of its time")
    assert boxes.expired == [chunk]
    assert monotonic() - began >= BOX_S


def test_chunks_that_end_in_time_wake_no_thread_and_are_not_reported() -> None:
    boxes = Boxes(budget_s=5)
    boxes.box.close(boxes.chunk())
    woken = []
    boxes.box._changed.notify = lambda: woken.append(1)  # type: ignore[assignment, method-assign, misc]
    for _ in range(50):
        chunk = boxes.chunk()
        time.sleep(0.005)
        boxes.box.close(chunk)
    assert woken == []
    assert boxes.expired == []


def test_an_error_is_reported_and_the_next_chunk_is_watched() -> None:
    boxes = Boxes()
    boxes.box._expire = lambda chunk: 1 / 0  # type: ignore[assignment]
    boxes.chunk()
    wait_until(lambda: boxes.errors, 5, "the error")
    boxes.box._expire = boxes._expire
    chunk = boxes.chunk()
    wait_until(lambda: boxes.expired == [chunk], 5, "the next one")


@pytest.mark.parametrize(("rows", "threads"), [(1, []), (2, ["delaytasks-time-budget"])])
def test_a_single_row_needs_no_thread_for_its_time_budget(
    bench: RunnerHarness, rows: int, threads: list[str]
) -> None:
    tasks, before = [bench.schedule() for _ in range(rows)], set(threading.enumerate())
    bench.run(*tasks)
    assert [thread.name for thread in set(threading.enumerate()) - before] == threads
    assert bench.statuses(tasks) == ["DONE"] * rows
