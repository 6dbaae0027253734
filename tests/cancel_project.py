"""Processors that run until they are cancelled, found by Celery's `imports`."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from delaytasks import DelayedTask, processor
from tests.project import note

MOST_S = 60.0
STEP_S = 0.05


def wait_for_cancel(body: dict[str, Any], task: DelayedTask) -> None:
    note(body, task.id, "began")
    for _ in range(int(MOST_S / STEP_S)):
        time.sleep(STEP_S)
        task.check_lease()


@processor("cancel.checks", retries="1s")
def checks(body: dict[str, Any], task: DelayedTask) -> None:
    wait_for_cancel(body, task)


@processor("cancel.threads", in_flight=5)
def threads(body: dict[str, Any], task: DelayedTask) -> None:
    wait_for_cancel(body, task)


@processor("cancel.coroutine")
async def coroutine(body: dict[str, Any], task: DelayedTask) -> None:
    note(body, task.id, "began")
    for _ in range(int(MOST_S / STEP_S)):
        await asyncio.sleep(STEP_S)
        task.check_lease()
