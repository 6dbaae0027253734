"""What several suites of operations on many tasks use."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from delaytasks import BulkResult, DelayedTask
from delaytasks.storage.store import Store
from tests.world.recording import set_columns

NOON = datetime(2031, 1, 31, 12, tzinfo=timezone.utc)


def put(store: Store, task: DelayedTask, **values: Any) -> DelayedTask:
    """Write `values` into the row of `task`, and return the task."""
    set_columns(store, "tasks", {"id": task.id}, **values)
    return store.tasks.read(task.id)


def counts(result: BulkResult) -> tuple[int, int, int]:
    return result.matched, result.changed, result.refused
