"""A task to schedule, before it is checked."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from delaytasks.core.errors import InvalidScheduleError
from delaytasks.core.retry_schedule import RetrySchedule
from delaytasks.core.text import shown


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
    delay: Any = None
    when: datetime | None = None
    key: str | None = None
    queue: str | None = None
    priority: int = 0
    id: int | None = None
    retry: RetrySchedule | str | int | None = None
    expires: Any = None
    max_wait: Any = None
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
