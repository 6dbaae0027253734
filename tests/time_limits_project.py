"""Processors with time limits, found by Celery's `imports`.

They have their own queue, since a pool that cannot enforce limits refuses to serve it.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded

from delaytasks import DelayedTask, RetrySchedule, processor
from tests.project import note


def work(body: dict[str, Any], task: DelayedTask) -> None:
    """Sleep as long as the body specifies for this attempt, or for all attempts."""
    seconds = body.get("seconds", 0)
    if isinstance(seconds, list):
        seconds = seconds[min(task.runs, len(seconds)) - 1]
    note(body, task.id, "began", os.getpid())
    if body.get("holds_gil"):
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    else:
        time.sleep(seconds)
    note(body, task.id, "ended", os.getpid())


@processor("limits.soft", queue="limits", soft_time_limit=0.5, retries=RetrySchedule("500ms"))
def soft(body: dict[str, Any], task: DelayedTask) -> None:
    work(body, task)


@processor("limits.caught", queue="limits", soft_time_limit=0.5, time_limit=30, keep_result=True)
def caught(body: dict[str, Any], task: DelayedTask) -> str:
    try:
        work(body, task)
    except SoftTimeLimitExceeded as error:
        note(body, task.id, "cleaned", os.getpid())
        return str(error)
    return "in time"


@processor("limits.hard", queue="limits", time_limit=1)
def hard(body: dict[str, Any], task: DelayedTask) -> None:
    work(body, task)


@processor("limits.none", queue="limits")
def none(body: dict[str, Any], task: DelayedTask) -> None:
    work(body, task)
