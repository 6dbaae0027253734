"""Durable delayed tasks on Celery: the database is the truth, the broker makes it fast."""

from delaytasks.api import (
    attempts,
    cancel,
    clear_policy,
    find,
    get,
    new_id,
    pause,
    policies,
    processor,
    reschedule,
    resume,
    retry,
    schedule_at,
    schedule_callback,
    schedule_delay,
    schedule_many,
    schedule_message,
    set_policy,
    shard_for,
    touch,
    touch_many,
)
from delaytasks.app import DelayTasks
from delaytasks.core.errors import DelayTaskError
from delaytasks.core.ladder import LEVELS, NOTIFY, Ladder
from delaytasks.core.outcomes import Cancel, Done, Fail, Retry, Snooze
from delaytasks.core.policies import Policy
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
    "Policy",
    "Retry",
    "Snooze",
    "Status",
    "attempts",
    "cancel",
    "clear_policy",
    "find",
    "get",
    "new_id",
    "pause",
    "policies",
    "processor",
    "reschedule",
    "resume",
    "retry",
    "schedule_at",
    "schedule_callback",
    "schedule_delay",
    "schedule_many",
    "schedule_message",
    "set_policy",
    "shard_for",
    "touch",
    "touch_many",
]
