"""The attributes of spans and metrics, by OpenTelemetry's conventions for messaging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from delaytasks.core.task import DelayTask

SYSTEM = "delaytasks"
#: Scheduling creates the message, and a worker processes it.
CREATE, PROCESS = "schedule", "process"
_TYPES = {CREATE: "create", PROCESS: "process"}
Attributes = Mapping[str, str | int]


def common_attributes(task: DelayTask, operation: str) -> dict[str, str | int]:
    """Return the attributes with few different values, which metrics have."""
    return {
        "messaging.system": SYSTEM,
        "messaging.operation.name": operation,
        "messaging.operation.type": _TYPES[operation],
        "messaging.destination.name": task.queue,
        "delaytasks.tag": task.tag,
    }


def span_attributes(tasks: Sequence[DelayTask], operation: str) -> Attributes:
    """Return the attributes of a span about one task or about several ones of a tag.

    The body is left out, because it may be confidential.
    """
    task = tasks[0]
    found = common_attributes(task, operation)
    if len(tasks) > 1:
        found["messaging.batch.message_count"] = len(tasks)
        return found
    found["messaging.message.id"] = str(task.id)
    if task.key is not None:
        found["delaytasks.key"] = task.key
    if operation == PROCESS:
        found["delaytasks.attempt"] = task.attempts
    return found
