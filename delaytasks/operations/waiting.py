"""Waits until a task has ended, by reading its row again in growing steps."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from delaytasks.core.celery_tags import CELERY_PREFIX
from delaytasks.core.clock import monotonic
from delaytasks.core.durations import Delay
from delaytasks.core.errors import WaitTimeoutError
from delaytasks.core.inputs import check_wait
from delaytasks.core.retry_schedule import MAX_RETRY_DELAY_S
from delaytasks.core.task import DelayTask
from delaytasks.core.text import shown
from delaytasks.operations.lookup import find_id, name_of

if TYPE_CHECKING:
    from delaytasks.storage.store import Store

#: The first and the longest time between two reads of the row.
FIRST_S, LONGEST_S = 0.02, 0.5
GROWTH = 1.5
#: Returns the result of a synchronous method, which does not block the event loop.
RunAsync = Callable[..., Awaitable[Any]]


class Waiting:
    def __init__(self, store: Store) -> None:
        self._tasks = store.tasks
        self._store = store

    def wait(
        self, task: object, timeout: Delay | None, tag: str | None, key: str | None
    ) -> DelayTask:
        """Return the task when it has ended. Each read is a transaction of its own."""
        limit, pause_s = _Limit(timeout), FIRST_S
        found = self._find(task, tag, key)
        while not found.is_finished:
            time.sleep(limit.within(pause_s, found))
            pause_s = min(pause_s * GROWTH, LONGEST_S)
            found = self._tasks.read(found.id)
        return found

    async def wait_async(
        self,
        run_async: RunAsync,
        task: object,
        timeout: Delay | None,
        tag: str | None,
        key: str | None,
    ) -> DelayTask:
        """Return the task when it has ended. No thread is occupied between two reads.

        As for `wait`, each read is a transaction of its own. The transaction of `using` may never
        see the end of the task.
        """
        import asyncio

        limit, pause_s = _Limit(timeout), FIRST_S
        found: DelayTask = await run_async(self._find, task, tag, key)
        while not found.is_finished:
            await asyncio.sleep(limit.within(pause_s, found))
            pause_s = min(pause_s * GROWTH, LONGEST_S)
            found = await run_async(self._tasks.read, found.id)
        return found

    def _find(self, task: object, tag: str | None, key: str | None) -> DelayTask:
        return self._tasks.read(find_id(self._store, name_of(task, tag, key), None))


class _Limit:
    """The longest time to wait; None means that there is no limit."""

    def __init__(self, timeout: Delay | None) -> None:
        self._ends_at = self._limit_s = None
        if timeout is not None:
            self._limit_s = check_wait(timeout, MAX_RETRY_DELAY_S, "a timeout")
            self._ends_at = monotonic() + self._limit_s

    def within(self, seconds: float, task: DelayTask) -> float:
        """Return `seconds`, or the time that is left if that is less.

        Raises
        ------
        WaitTimeoutError
            If no time is left.
        """
        if self._ends_at is None:
            return seconds
        left_s = self._ends_at - monotonic()
        if left_s <= 0:
            raise WaitTimeoutError(
                f"task {task.id} ({task.tag}) is {task.status.name} after {self._limit_s:g} s: "
                f"{_remedy(task)}",
                task.id,
            )
        return min(seconds, left_s)


def _remedy(task: DelayTask) -> str:
    """Return what a caller does who has waited in vain."""
    if task.tag.startswith(CELERY_PREFIX):
        return f"this row sends a Celery task, so wait with AsyncResult({shown(task.key)}).get()"
    return "wait longer, or look at it later"
