"""A task to schedule, before it is checked."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple, TypedDict

from delaytasks.core.durations import Delay
from delaytasks.core.errors import InvalidScheduleError
from delaytasks.core.interfaces import OnConflict
from delaytasks.core.retry_schedule import RetrySchedule
from delaytasks.core.text import shown


class TaskOptions(TypedDict, total=False):
    """The options of a new task, which `DelayTasks.schedule_delay` explains.

    `TaskBuilder` checks the values.
    """

    key: str | None
    queue: str | None
    priority: int
    id: int | None
    retries: RetrySchedule | str | int | None
    expires: Delay | None
    max_wait: Delay | None
    concurrency_key: str | None
    meta: Mapping[str, str] | None
    body_version: int | None
    spread: Delay | None


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
        Seconds, text such as `"30m"`, or a timedelta. Give either `delay` or `at`.
    at
        An aware datetime.
    key, queue, priority, id, retries, expires, max_wait, concurrency_key, meta, body_version
        See `schedule_delay`.
    spread
        See `schedule_delay`.

    Examples
    --------
    >>> delays.schedule_many(NewTask("mail.send", {"to": user}, 60, key=user) for user in users)
    """

    tag: str
    body: Any
    delay: Delay | None = None
    at: datetime | None = None
    key: str | None = None
    queue: str | None = None
    priority: int = 0
    id: int | None = None
    retries: RetrySchedule | str | int | None = None
    expires: Delay | None = None
    max_wait: Delay | None = None
    concurrency_key: str | None = None
    meta: Mapping[str, str] | None = None
    body_version: int | None = None
    spread: Delay | None = None


def new_task_of(item: object) -> NewTask:
    """Return the task to schedule that `schedule_many` was given."""
    if isinstance(item, NewTask):
        return item
    if isinstance(item, tuple) and len(item) == 3:
        tag, body, at = item
        return NewTask(tag, body, at=at) if isinstance(at, datetime) else NewTask(tag, body, at)
    raise InvalidScheduleError(
        f"schedule_many takes NewTask, or (tag, body, delay or instant), not {shown(item)}"
    )
