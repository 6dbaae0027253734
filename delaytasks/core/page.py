"""A page of tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from delaytasks.core.task import DelayTask


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the tasks that `find` found. Iterating over it yields the tasks.

    Attributes
    ----------
    tasks
        The tasks.
    cursor
        The argument of `find` for the next page; None on the last page.

    Examples
    --------
    >>> page = delays.find(status="FAILED")
    >>> if page.cursor is not None:
    ...     page = delays.find(status="FAILED", cursor=page.cursor)
    """

    tasks: list[DelayTask]
    cursor: str | None

    def __iter__(self) -> Any:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)
