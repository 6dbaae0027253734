"""Processors with time limits, found by Celery's `imports`.

They have their own queue, since a pool that cannot enforce limits refuses to serve it.
"""

from __future__ import annotations

from typing import Any

from celery.exceptions import SoftTimeLimitExceeded

from delaytasks import DelayedTask, RetrySchedule, processor
from tests.project import note, sleep

processor("limits.soft", queue="limits", soft_time_limit=0.5, retries=RetrySchedule("500ms"))(sleep)
processor("limits.hard", queue="limits", time_limit=1)(sleep)
processor("limits.none", queue="limits")(sleep)


@processor("limits.caught", queue="limits", soft_time_limit=0.5, time_limit=30, keep_result=True)
def caught(body: dict[str, Any], task: DelayedTask) -> str:
    try:
        sleep(body, task)
    except SoftTimeLimitExceeded as error:
        note(body, task.id, "cleaned")
        return str(error)
    return "in time"
