"""Reads the rows of a run."""

from __future__ import annotations

from collections.abc import Iterator

from delaytasks import DelayedTask, DelayTasks


def rows_of(delays: DelayTasks, tag: str) -> Iterator[DelayedTask]:
    """Yield all rows of a tag, finished ones included."""
    cursor: str | None = None
    while True:
        page = delays.find(tag=tag, limit=1000, cursor=cursor)
        yield from page.tasks
        cursor = page.cursor
        if cursor is None:
            return
