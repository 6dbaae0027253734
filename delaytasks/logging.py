"""Structured log lines: each event as a document, for logs that programs read.

The log record of an event has the text that people read as its message, and the document as an
attribute. `LogFormatter` prints the document.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from delaytasks.events import MOST_TRACEBACK_BYTES, level_of, log_record, logger
from delaytasks.model.task import DelayedTask
from delaytasks.model.text import traceback_text

#: The events that report a change of a task. Each is one line at INFO, if it has no higher level.
STATE_CHANGES = frozenset(
    (
        "task.scheduled task.started task.done task.failed task.retry_scheduled task.snoozed "
        "task.withdrawn task.expired task.cancelled task.cancel_requested task.rescheduled "
        "task.rerun task.held task.released task.recovered task.worker_lost task.timed_out"
    ).split()
)
LONGEST_VALUE = 1000
#: Fields of events that the document has in another form, or that are for subscribers only.
_NOT_WRITTEN = frozenset({"task", "began", "cause", "is_logged", "id", "meta"})


def log_structured(name: str, fields: Mapping[str, Any]) -> None:
    """Log an event with a document."""
    level = level_of(name, fields)
    if name in STATE_CHANGES:
        level = max(level, logging.INFO)
    if logger.isEnabledFor(level):
        record = log_record(name, fields, level)
        record.event_fields = document_of(fields)
        logger.handle(record)


def document_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an event as JSON values, with those of its task."""
    task = fields.get("task")
    document = _task_fields(task, fields) if isinstance(task, DelayedTask) else {}
    if "id" in fields:
        document["id"] = str(fields["id"])  # JavaScript rounds integers above 2^53
    if fields.get("meta"):
        document["meta"] = dict(fields["meta"])
    for name, value in fields.items():
        if name not in _NOT_WRITTEN and isinstance(value, (str, int, float, BaseException)):
            document[name] = _plain(value)
    return document


def _task_fields(task: DelayedTask, fields: Mapping[str, Any]) -> dict[str, Any]:
    began = fields.get("began")
    late_s = {} if began is None else {"late_s": round((began - task.due).total_seconds(), 6)}
    return {
        "id": str(task.id),
        "tag": task.tag,
        "key": task.key,
        "queue": task.queue,
        "attempt": task.runs,
        "version": task.version,
        **late_s,
    }


def _plain(value: str | float | BaseException) -> str | float | int:
    """Return a value that JSON can represent. A text of a processor may be very long."""
    if isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    try:
        text = value if isinstance(value, str) else f"{type(value).__name__}: {value}"
    except Exception:
        text = type(value).__name__  # an exception of user code may have no valid text
    return text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + "…"


class LogFormatter(logging.Formatter):
    """Prints each log record as one line of JSON, with its traceback.

    A worker and beat use it if the setting `log_format` is `"json"`. Other processes name it in the
    configuration of their log.

    Examples
    --------
    >>> handler = logging.StreamHandler()
    >>> handler.setFormatter(LogFormatter())
    """

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "process": record.processName,
        }
        own = vars(record)
        if "event_fields" not in own:
            line["message"] = record.getMessage()
        else:
            line |= {"event": own["event_name"], **own["event_fields"]}
        if record.exc_info and record.exc_info[1] is not None:
            line["traceback"] = traceback_text(record.exc_info[1], MOST_TRACEBACK_BYTES)
        # Without ASCII escapes, U+2028 and terminal sequences of processors would reach the log.
        return json.dumps(line, default=str)
