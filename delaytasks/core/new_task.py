"""A task to schedule, before it is checked."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypedDict

from delaytasks.core.errors import InvalidScheduleError
from delaytasks.core.interfaces import OnConflict
from delaytasks.core.retry_schedule import RetrySchedule
from delaytasks.core.text import shown


class TaskOptions(TypedDict, total=False):
    """What a new task has besides tag, body and due time; `DelayTasks.schedule_delay` explains it.

    `TaskBuilder` checks the values.
    """

    key: str | None
    queue: str | None
    priority: int
    id: int | None
    retry: RetrySchedule | str | int | None
    expires: float | str | timedelta | None
    max_wait: float | str | timedelta | None
    concurrency_key: str | None


class ScheduleOptions(TaskOptions, total=False):
    """All options of `DelayTasks.schedule_delay`, for callbacks and messages."""

    on_conflict: OnConflict
    session: Any


# A tuple, because a frozen dataclass takes four times as long to make.
class NewTask(NamedTuple):
    """One task for `schedule_many`.

    Parameters
    ----------
    tag, body
        See `schedule_delay`.
    delay
        Seconds, or a timedelta. Give either `delay` or `when`.
    when
        An aware datetime.
    key, queue, priority, id, retry, expires, max_wait, concurrency_key
        See `schedule_delay`.

    Examples
    --------
    >>> delays.schedule_many(NewTask("mail.send", {"to": user}, 60, key=user) for user in users)
    """

    tag: str
    body: Any
    delay: float | timedelta | None = None
    when: datetime | None = None
    key: str | None = None
    queue: str | None = None
    priority: int = 0
    id: int | None = None
    retry: RetrySchedule | str | int | None = None
    expires: float | str | timedelta | None = None
    max_wait: float | str | timedelta | None = None
    concurrency_key: str | None = None


def new_task_of(item: object) -> NewTask:
    """Return the task to schedule that `schedule_many` was given."""
    if isinstance(item, NewTask):
        return item
    if isinstance(item, tuple) and len(item) == 3:
        tag, body, at = item
        return NewTask(tag, body, when=at) if isinstance(at, datetime) else NewTask(tag, body, at)
    raise InvalidScheduleError(
        f"schedule_many takes NewTask, or (tag, body, delay or instant), not {shown(item)}"
    )
