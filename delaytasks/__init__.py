"""Durable delayed tasks on Celery: the database is the truth, the broker makes it fast."""

from delaytasks.api import (
    attempts,
    cancel,
    find,
    get,
    new_id,
    processor,
    reschedule,
    retry,
    schedule_at,
    schedule_callback,
    schedule_delay,
    schedule_many,
    schedule_message,
    shard_for,
    touch,
    touch_many,
)
from delaytasks.app import DelayTasks
from delaytasks.core.errors import DelayTaskError
from delaytasks.core.ladder import LEVELS, NOTIFY, Ladder
from delaytasks.core.outcomes import Cancel, Done, Fail, Retry, Snooze
from delaytasks.core.states import Status
from delaytasks.core.task import Attempt, DelayTask, NewTask, Page

__all__ = [
    "LEVELS",
    "NOTIFY",
    "Attempt",
    "Cancel",
    "DelayTask",
    "DelayTaskError",
    "DelayTasks",
    "Done",
    "Fail",
    "Ladder",
    "NewTask",
    "Page",
    "Retry",
    "Snooze",
    "Status",
    "attempts",
    "cancel",
    "find",
    "get",
    "new_id",
    "processor",
    "reschedule",
    "retry",
    "schedule_at",
    "schedule_callback",
    "schedule_delay",
    "schedule_many",
    "schedule_message",
    "shard_for",
    "touch",
    "touch_many",
]
