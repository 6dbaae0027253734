"""The recorder notes each move of a row, on every database."""

from __future__ import annotations

import pytest

from chaos.recorder import Recorder
from delaytasks import Status
from tests.world import World

pytestmark = pytest.mark.slow


def test_each_move_of_a_run_is_noted(world: World) -> None:
    recorder = Recorder(world.store)
    recorder.start()
    try:
        world.run(world.put())
        moves = [(change.was, change.status) for change in recorder.changes()]
    finally:
        recorder.stop()
    waits, runs = Status.NOT_COMPLETE, Status.RUNNING
    assert moves == [(None, waits), (waits, runs), (runs, Status.DONE)]
