"""The processors of a run with failpoints: they record their begin and end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from chaos.failpoints.orders import VARIABLE, Orders, kill_this_process
from chaos.project import _note
from delaytasks import DelayedTask, RetrySchedule, current_delays, processor
from delaytasks.runtime import runtime_of

RETRY_SCHEDULE = RetrySchedule("0.3s 0.3s")


@processor("fail.note")
def note(body: dict[str, Any], task: DelayedTask) -> None:
    _note(body, task)


@processor("fail.shaky", retries=RETRY_SCHEDULE)
def shaky(body: dict[str, Any], task: DelayedTask) -> None:
    _note(body, task)
    if task.runs <= body["fails"]:
        raise RuntimeError("as asked")


@processor("fail.side", in_flight=10)
def side_by_side(body: dict[str, Any], task: DelayedTask) -> None:
    _note(body, task)


@processor("fail.limited")
def limited(body: dict[str, Any], task: DelayedTask) -> None:
    _note(body, task)


@processor("fail.recurring")
def recurring(body: dict[str, Any], task: DelayedTask) -> None:
    _note(body, task)


@processor("fail.fatal")
def fatal(body: dict[str, Any], task: DelayedTask) -> None:
    """Kill the process in the first run."""
    if not task.lapses:
        kill_this_process("fatal")
    _note(body, task)


@processor("fail.effect")
def effect(body: dict[str, Any], task: DelayedTask) -> None:
    """Settle the task in a transaction of the processor."""
    _note(body, task)
    with runtime_of(current_delays()).store.database.begin() as connection:
        task.complete(connection)


if VARIABLE in os.environ:
    Orders(Path(os.environ[VARIABLE]))
