"""Each outcome, and each move that ends a run, is known in all places that need it."""

from __future__ import annotations

import re
from typing import get_args

from celery.exceptions import Ignore

import delaytasks
from delaytasks import Done
from delaytasks.core import states
from delaytasks.core.run_counts import OUTCOME_NAMES, OUTCOMES
from delaytasks.core.states import MOVES, SettlingMove
from delaytasks.core.structured_log import STATE_CHANGES
from delaytasks.core.task import Outcome
from delaytasks.testing.runs import Run
from delaytasks.worker.celery_context import refusal_of
from tests.running import ROOT

RULES = (ROOT / "delaytasks/execution/executor.py").read_text()
NAMES = {outcome.__name__ for outcome in get_args(Outcome)}


def test_each_outcome_is_exported_handled_and_offered() -> None:
    assert set(delaytasks.__all__) >= NAMES
    # Other values than these are a success, as `Done` is.
    handled = re.findall(r"if isinstance\(value, (\w+)\):", RULES)
    assert set(handled) == NAMES - {Done.__name__}
    offered = str(refusal_of(Ignore(), "mail"))
    assert set(re.findall(r"(\w+)\(", offered)) >= NAMES


def test_each_move_that_ends_a_run_is_counted_and_explained() -> None:
    assert set(OUTCOMES) == set(get_args(SettlingMove))
    assert set(OUTCOMES.values()) <= set(OUTCOME_NAMES)
    assert set(re.findall(r'`"(\w+)"`', Run.__doc__ or "")) == set(OUTCOMES)
    for move in OUTCOMES:
        assert re.search(rf"^    .* {move}$", states.__doc__ or "", re.M), move


#: Events of the outcome rules that are no change of a task.
NO_CHANGES = {"task.interrupted", "task.left_open", "task.raised_late"}


def test_each_event_of_an_outcome_is_a_change_of_a_task() -> None:
    emitted = set(re.findall(r'"(task\.\w+)"', RULES))
    assert len(emitted) >= 4
    assert emitted - NO_CHANGES <= STATE_CHANGES


def test_opentelemetry_knows_the_state_of_each_move_that_ends_a_run() -> None:
    from delaytasks.contrib.opentelemetry import OUTCOME_OF_STATE

    endings = (move.ending for move in MOVES.values())
    assert set(OUTCOME_OF_STATE) == {ending.celery_state for ending in endings if ending}
