"""The targets of schedules: the tasks of a tag, or a Celery task.

Each target is a tag and a body. This is the only module that knows how a Celery task becomes one.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from delaytasks.core.celery_calls import CELERY_PREFIX, celery_tag
from delaytasks.core.errors import InvalidScheduleError
from delaytasks.core.text import shown
from delaytasks.processors.registry import Registry
from delaytasks.recurrence.schedule import RecurringSchedule

#: The fields in the body of a schedule of a Celery task.
CALL_FIELDS = ("args", "kwargs", "options")
_OWN_TIMES = {"countdown", "eta"}


class RecurringTarget(NamedTuple):
    tag: str
    body: Any
    #: The name of a schedule for which the caller gives none.
    name: str


def target_of(target: Any, body: Any, registry: Registry) -> RecurringTarget | None:
    """Return the target that a caller names, or None if it is no tag, processor or Celery task.

    Parameters
    ----------
    target
        A tag, a processor, or a Celery task.
    body
        The body of each task; for a Celery task None, or a mapping with `args`, `kwargs` and
        `options` of `apply_async`.
    """
    tag = target if isinstance(target, str) else getattr(target, "tag", None)
    if isinstance(tag, str):
        return RecurringTarget(tag, body, tag)
    if callable(getattr(target, "apply_async", None)):
        return call_of(target.name, {} if body is None else body)
    for processor in registry:
        if processor.function is target:
            return RecurringTarget(processor.tag, body, processor.tag)
    return None


def call_of(task: str, call: Any) -> RecurringTarget:
    """Return the target that sends a Celery task, with the `args`, `kwargs` and `options`."""
    if not isinstance(call, Mapping) or not call.keys() <= set(CALL_FIELDS):
        raise InvalidScheduleError(
            f"the body of a recurring Celery task has {', '.join(CALL_FIELDS)}, not {shown(call)}"
        )
    if not _OWN_TIMES.isdisjoint(call.get("options") or ()):
        raise InvalidScheduleError(
            f"the options of the recurring Celery task {task} have a countdown or an eta; its "
            "schedule says when it is due"
        )
    return RecurringTarget(celery_tag(task), {"task": task, **call}, task)


def is_known(schedule: RecurringSchedule, registry: Registry, celery_tasks: Container[str]) -> bool:
    """Return whether the code of this process has the processor or the Celery task."""
    if schedule.tag.startswith(CELERY_PREFIX):
        return schedule.body["task"] in celery_tasks
    return registry.get(schedule.tag) is not None
