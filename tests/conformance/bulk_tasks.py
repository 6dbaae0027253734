"""Schedule, change and count the tasks of the suites of bulk operations."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from typing import Any

from delaytasks import BulkResult, DelayedTask, DelayTasks, Status
from delaytasks.core.interfaces import Entry
from delaytasks.runtime import runtime_of
from delaytasks.storage.store import Store
from tests.recording import set_columns
from tests.waiting import wait_until

FAR = 7 * 86400.0


def schedule(
    delays: DelayTasks, tag: str = "mail", delay: float = FAR, **options: Any
) -> DelayedTask:
    return delays.get(delays.schedule_delay(tag, {}, delay, **options))


def pass_a_moment(delays: DelayTasks) -> None:
    """Wait until scheduled tasks are older than now on a clock that counts milliseconds."""
    now = runtime_of(delays).store.bulk.now()
    wait_until(
        lambda: runtime_of(delays).store.bulk.now() > now + timedelta(milliseconds=2),
        5,
        "a later millisecond",
    )


def put(store: Store, task: DelayedTask, **values: Any) -> DelayedTask:
    """Write `values` into the row of `task`, and return the task."""
    set_columns(store, "tasks", {"id": task.id}, **values)
    return store.tasks.read(task.id)


def counts(result: BulkResult) -> tuple[int, int, int]:
    return result.matched, result.changed, result.refused


def statuses(delays: DelayTasks, *tasks: DelayedTask) -> list[Status]:
    return [delays.get(task).status for task in tasks]


def versions(tasks: Iterable[DelayedTask | Entry]) -> set[tuple[int, int]]:
    return {(task.id, task.version) for task in tasks}


def shifts(delays: DelayTasks, tasks: Iterable[DelayedTask]) -> set[float]:
    """Return by how many seconds the tasks have been shifted."""
    return {(delays.get(t).expected_time - t.expected_time).total_seconds() for t in tasks}


def due_in(delays: DelayTasks, task: DelayedTask) -> float:
    """Return the seconds until the task is due."""
    return (delays.get(task).due - runtime_of(delays).clock.now()).total_seconds()


NOON = datetime(2031, 1, 31, 12, tzinfo=timezone.utc)
