"""The processors of a run: they record their begin and end."""

from __future__ import annotations

import faulthandler
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from chaos.history import Notebook, RunRecord
from delaytasks import DelayedTask, RetrySchedule
from delaytasks.celery import delays
from tests.waiting import STACKS

#: The retry delays of the tasks that fail at first.
RETRY_SCHEDULE = RetrySchedule("1s 1s 2s")
#: How far the database's clock is ahead of the host's monotonic clock, for processes with a wrong
#: wall clock.
_AHEAD = "CHAOS_AHEAD_US"
faulthandler.register(STACKS)
_notebooks: dict[int, Notebook] = {}


def notebook(folder: str) -> Notebook:
    """Return this process's notebook in `folder`."""
    if os.getpid() not in _notebooks:
        _notebooks[os.getpid()] = Notebook(Path(folder))
    return _notebooks[os.getpid()]


def _ahead_us() -> int:
    return time.time_ns() // 1000 - time.monotonic_ns() // 1000


_ahead = int(os.environ.get(_AHEAD) or _ahead_us())


def now_us() -> int:
    """Return the database's time: the host's wall clock at the begin of the run, continued
    monotonically.
    """
    return time.monotonic_ns() // 1000 + _ahead


def time_environment(ahead_s: int = 0) -> dict[str, str]:
    """Return the environment for processes that use this process's time, or a database's that is
    `ahead_s` ahead.
    """
    return {_AHEAD: str(_ahead + ahead_s * 1_000_000)}


def _note(body: dict[str, Any], task: DelayedTask) -> None:
    notes = notebook(body["folder"])
    begun = RunRecord(task.id, task.version, f"{os.getpid()}", now_us())
    notes.note(begun)
    time.sleep(body["s"])
    notes.note(replace(begun, ended_us=now_us()))


@delays.processor("chaos.note")
def note(body: dict[str, Any], task: DelayedTask) -> None:
    _note(body, task)


@delays.processor("chaos.recurring")
def recurring(body: dict[str, Any], task: DelayedTask) -> None:
    _note(body, task)


@delays.processor("chaos.shaky", retries=RETRY_SCHEDULE)
def shaky(body: dict[str, Any], task: DelayedTask) -> None:
    _note(body, task)
    if task.runs <= body["fails"]:
        raise RuntimeError("as asked")
