"""The recorder notes each move of a row, on every database, and the checker reads its notes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from chaos.checker import Checker, Verdict
from chaos.history import CallRecord, History, RunRecord
from chaos.recorder import Recorder
from delaytasks import Status
from tests.world import World, to_us

pytestmark = pytest.mark.slow


@pytest.fixture
def recorder(world: World) -> Iterator[Recorder]:
    recorder = Recorder(world.store)
    recorder.start()
    yield recorder
    recorder.stop()


def run_once(world: World, recorder: Recorder, **changes: Any) -> Verdict:
    """Run a task, let another program make changes, and return what the checker finds."""
    asked_us = to_us(world.now())
    task = world.schedule(delay=0.001)
    due_us = to_us(task.expected_time)
    called = CallRecord(task.id, "schedule", "ok", asked_us, to_us(world.now()), due_us)
    threading.Event().wait(0.02)
    [claimed] = world.claim(task)
    began_us = to_us(world.now())
    ran = RunRecord(task.id, claimed.version, "worker-1", began_us, to_us(world.now()))
    assert world.settle(claimed)
    if changes:
        world.change(task, version=world.read(task).version + 1, **changes)
    history = History()
    noted: list[Any] = [called, ran, *recorder.changes()]
    for one in noted:
        history.note(one)
    return Checker(history, 5, to_us(world.now())).verdict()


def test_moves_of_a_run_are_noted_and_nothing_is_found(world: World, recorder: Recorder) -> None:
    assert str(run_once(world, recorder)).endswith("nothing found")
    moves = [(change.was, change.status) for change in recorder.changes()]
    waits, runs = Status.NOT_COMPLETE, Status.RUNNING
    assert moves == [(None, waits), (waits, runs), (runs, Status.DONE)]


def test_a_finding_contains_the_whole_story_of_its_task(world: World, recorder: Recorder) -> None:
    verdict = run_once(world, recorder, status=int(Status.NOT_COMPLETE))
    assert "illegal move" in verdict.kinds()
    words = ("producer: schedule", "processor: version", "row: new -> NOT_COMPLETE 0", "DONE")
    assert all(each in str(verdict) for each in words), str(verdict)
