"""Durable delayed tasks on Celery: tasks are rows of a database, and the broker makes them fast."""

from typing import TYPE_CHECKING, Any

from delaytasks import api
from delaytasks.api import *  # noqa: F403 - the list of functions is in api.py only
from delaytasks.client import DelayTasks
from delaytasks.core import errors
from delaytasks.core.errors import *  # noqa: F403 - the list of errors is in core/errors.py only
from delaytasks.core.filters import AuditEntry, BulkResult
from delaytasks.core.policies import Policy
from delaytasks.core.retry_schedule import LEVELS, NOTIFY, RetrySchedule
from delaytasks.core.states import Status
from delaytasks.core.structured_log import LogFormatter
from delaytasks.core.task import (
    Attempt,
    Cancel,
    CancelResult,
    DelayTask,
    Done,
    Fail,
    NewTask,
    Page,
    Retry,
    Snooze,
    TouchResult,
)
from delaytasks.handles import Processor
from delaytasks.shards import Shards

if TYPE_CHECKING:
    from delaytasks.recurrence.recurring import Recurring

    recurring: Recurring

__all__ = [
    "LEVELS",
    "NOTIFY",
    "Attempt",
    "AuditEntry",
    "BulkResult",
    "Cancel",
    "CancelResult",
    "DelayTask",
    "DelayTasks",
    "Done",
    "Fail",
    "LogFormatter",
    "NewTask",
    "Page",
    "Policy",
    "Processor",
    "Retry",
    "RetrySchedule",
    "Shards",
    "Snooze",
    "Status",
    "TouchResult",
]
__all__ += api.__all__
__all__ += errors.__all__


def __getattr__(name: str) -> Any:
    """Return `recurring` of the default `DelayTasks`. Most processes do not need it."""
    if name == "recurring":
        return api.default().recurring
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
