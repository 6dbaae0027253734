"""Durable delayed tasks on Celery: the database is the truth, the broker makes it fast."""

from delaytasks.api import (
    cancel,
    find,
    get,
    processor,
    reschedule,
    retry,
    schedule_at,
    schedule_delay,
    schedule_many,
    touch,
)
from delaytasks.app import DelayTasks
from delaytasks.core.errors import DelayTaskError
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask, NewTask, Page

__all__ = [
    "DelayTask",
    "DelayTaskError",
    "DelayTasks",
    "NewTask",
    "Page",
    "Status",
    "cancel",
    "find",
    "get",
    "processor",
    "reschedule",
    "retry",
    "schedule_at",
    "schedule_delay",
    "schedule_many",
    "touch",
]
