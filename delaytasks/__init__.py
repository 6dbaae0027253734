"""Durable delayed tasks on Celery: tasks are rows of a database, and the broker makes them fast."""

from delaytasks import api
from delaytasks.api import *  # noqa: F403 - the list of functions is in api.py only
from delaytasks.client import DelayTasks
from delaytasks.core.attempt import Attempt
from delaytasks.core.bulk import AuditEntry, BulkResult
from delaytasks.core.cancel_result import CancelResult
from delaytasks.core.errors import DelayTaskError
from delaytasks.core.new_task import NewTask
from delaytasks.core.outcomes import Cancel, Done, Fail, Retry, Snooze
from delaytasks.core.page import Page
from delaytasks.core.policies import Policy
from delaytasks.core.retry_schedule import LEVELS, NOTIFY, RetrySchedule
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask

__all__ = [
    "LEVELS",
    "NOTIFY",
    "Attempt",
    "AuditEntry",
    "BulkResult",
    "Cancel",
    "CancelResult",
    "DelayTask",
    "DelayTaskError",
    "DelayTasks",
    "Done",
    "Fail",
    "NewTask",
    "Page",
    "Policy",
    "Retry",
    "RetrySchedule",
    "Snooze",
    "Status",
]
__all__ += api.__all__
