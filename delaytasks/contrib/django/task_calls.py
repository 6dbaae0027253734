"""The body of the row of a Django task: its arguments, and the options of the call."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.conf import settings
from django.utils import timezone
from django.utils.module_loading import import_string

from delaytasks.contrib.django.task_framework import InvalidTask, Task
from delaytasks.core.task import DelayTask


@dataclass(frozen=True, slots=True)
class TaskCall:
    """The body of a row. Another program may have written it."""

    args: list[Any]
    kwargs: dict[str, Any]
    #: The alias in settings.TASKS.
    backend: str
    #: From -100 to 100. The column `priority` has ten levels.
    priority: int = 0
    run_after: str | None = None

    def __post_init__(self) -> None:
        for name, kind in (("args", list), ("kwargs", dict), ("backend", str), ("priority", int)):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name} is a {kind.__name__}")
        if self.run_after is not None:
            datetime.fromisoformat(self.run_after)

    def task(self, row: DelayTask) -> Task:
        """Return the task as the caller has enqueued it. The tag of its row is its path."""
        run_after = self.run_after and in_django(datetime.fromisoformat(self.run_after))
        return declared_task(row.tag).using(
            priority=self.priority,
            queue_name=row.queue,
            run_after=run_after or None,
            backend=self.backend,
        )


def declared_task(path: str) -> Task:
    """Return the task that workers import by its path."""
    try:
        found = import_string(path)
    except ImportError:
        found = None
    if not isinstance(found, Task):
        raise InvalidTask(
            f"Workers find a task by the name of its function, and {path} is not a task: "
            "decorate the function where it is defined."
        )
    return found


def column_priority(priority: int) -> int:
    """Return the level from 0 to 9 for a priority from -100 to 100."""
    if priority < 0:
        return (priority + 100) // 25
    return 4 + -(-priority // 20)


def in_django(instant: datetime | None) -> datetime | None:
    """Return an instant as Django's own functions do, which is naive without USE_TZ."""
    if instant is None or settings.USE_TZ:
        return instant
    naive: datetime = timezone.make_naive(instant)
    return naive
