"""Durable delayed tasks on Celery: tasks are rows of a database, and the broker makes them fast."""

from typing import TYPE_CHECKING, Any

from delaytasks.celery import aschedule_delay, current_delays, processor, schedule_delay
from delaytasks.client import DelayTasks
from delaytasks.model import errors
from delaytasks.model.errors import *  # noqa: F403 - the list of errors is in model/errors.py only
from delaytasks.model.filters import LogEntry
from delaytasks.model.moves import Cancel, Done, Fail, Outcome, Retry, RetrySchedule, Snooze, Status
from delaytasks.model.policies import Policy
from delaytasks.model.task import Attempt, CancelResult, DelayedTask, NewTask, Page, TouchResult
from delaytasks.operate.task_calls import BulkResult
from delaytasks.registry import Processor
from delaytasks.shards import Shards

if TYPE_CHECKING:
    from delaytasks.operate.checks import Finding
    from delaytasks.operate.forecast import Forecast
    from delaytasks.recurring.definition import RecurringSchedule

#: Values that most processes do not use, and the modules that have them.
_LATER = {
    "Finding": "operate.checks",
    "Forecast": "operate.forecast",
    "RecurringSchedule": "recurring.definition",
}

__all__ = [
    "Attempt",
    "BulkResult",
    "Cancel",
    "CancelResult",
    "DelayTasks",
    "DelayedTask",
    "Done",
    "Fail",
    "Finding",
    "Forecast",
    "LogEntry",
    "NewTask",
    "Outcome",
    "Page",
    "Policy",
    "Processor",
    "RecurringSchedule",
    "Retry",
    "RetrySchedule",
    "Shards",
    "Snooze",
    "Status",
    "TouchResult",
    "aschedule_delay",
    "current_delays",
    "processor",
    "schedule_delay",
]
__all__ += errors.__all__


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
