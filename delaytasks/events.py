"""The stream of events, to which the log, the counters and Flower subscribe."""

from __future__ import annotations

import logging
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from delaytasks.model.clock import monotonic
from delaytasks.model.errors import OutcomeUnknownError, StoreUnavailableError
from delaytasks.model.text import DEFERRALS, traceback_text

# -- Log an event that occurs for each row, message or turn once a minute, with a count -----------


#: The time between two lines about the same subject.
QUIET_S = 60.0
#: The number of subjects of one event that have a line each; all others share one line.
MOST_SUBJECTS = 20
#: The events that occur for each row or each try, and the field with the subject of each. The
#: failure of a task is not among them, because each failure has its own reason. All stages and
#: loops that meet the same error share its line.
SUBJECTS = {
    **{f"task.{code}": "tag" for code in DEFERRALS},
    "task.expired": "tag",
    "task.left_open": "tag",
    "task.raised_late": "tag",
    "task.row_locked": "id",
    "task.lease_lost": "tag",
    "task.interrupted": "tag",
    "result.dropped": "tag",
    "settle.waits": "error",
    "chunk.failed": "error",
    "loop.failed": "error",
    "recurring.failed": "schedule",
    "message.refused": "task",
}
_OTHER_SUBJECTS = object()

LogEvent = Callable[[str, dict[str, Any]], None]


class Repeats:
    """Passes an event on to `log`, or counts it if its subject had a line less than a minute ago.

    The next line about the subject has the number of events since its last line. Two threads that
    count simultaneously may lose a count, and `Events.counts` has them all.
    """

    def __init__(self, log: LogEvent) -> None:
        self._log = log
        #: The time of the last line about each subject of each event, and the events since.
        self._lines: dict[tuple[str, object], tuple[float, int]] = {}

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        if name in SUBJECTS:
            now, key = monotonic(), self._key(name, _repr(fields.get(SUBJECTS[name])))
            said_at, count = self._lines.get(key, (now - QUIET_S, 0))
            count += fields.get("count", 1)
            if now < said_at + QUIET_S:
                self._lines[key] = said_at, count
                return
            self._lines[key] = now, 0
            if count > 1:
                fields = {**fields, "count": count}
        self._log(name, fields)

    def _key(self, name: str, subject: object) -> tuple[str, object]:
        """Return the key of a subject. If an event has too many, new ones share one."""
        if (name, subject) not in self._lines:
            known = [key for key in [*self._lines] if key[0] == name]
            if len(known) >= MOST_SUBJECTS:
                oldest = min(known, key=lambda key: self._lines[key][0])
                if monotonic() < self._lines[oldest][0] + QUIET_S:
                    return name, _OTHER_SUBJECTS
                del self._lines[oldest]
        return name, subject


Subscriber = Callable[[str, dict[str, Any]], None]

logger = logging.getLogger("delaytasks")

#: Types of fields that the log shows. Fields of other types are for subscribers only.
_SHOWN = (str, int, float, BaseException)

#: The longest traceback in the log.
MOST_TRACEBACK_BYTES = 16 * 1024
OUTAGES = (StoreUnavailableError, OutcomeUnknownError)
#: Events that repeat while a database is unavailable. They are logged at DEBUG then, because
#: `store.down` reports the outage once. If the database answers but cannot execute statements, only
#: these events report it.
_BY_OUTAGE = frozenset({"loop.failed", "chunk.failed", "settle.waits"})

#: The events that an operator should read, by their levels. All others are logged at DEBUG.
_EVENTS_OF_LEVELS = {
    logging.ERROR: (
        "task.failed task.left_open task.row_locked task.worker_lost store.down loop.failed "
        "chunk.failed recurring.failed"
    ),
    logging.WARNING: (
        "task.retry_scheduled task.raised_late task.expired result.dropped task.no_processor "
        "task.no_key task.no_time_limits task.timed_out task.recovered task.lease_lost "
        "task.interrupted message.refused content.unsafe timer.down "
        "notices.down tables.shared wheel.late sweep.self queue.unserved queue.refused "
        "queue.blocked worker.lost settle.waits recurring.missed "
        "celery_task.not_stored celery_task.not_published task.newer_body metrics.not_served"
    ),
    logging.INFO: (
        "task.done timer.up notices.up store.up "
        "queue.unblocked policy.changed recurring.changed recurring.overlapped"
    ),
}
_LOG_LEVELS = {name: level for level, names in _EVENTS_OF_LEVELS.items() for name in names.split()}


class Events:
    """Counts every event and passes it to the subscribers. An error of a subscriber is logged."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._subscribers: list[Subscriber] = [Repeats(log_event)]

    def subscribe(self, subscriber: Subscriber) -> None:
        self._subscribers.append(subscriber)

    def log(self, name: str, fields: dict[str, Any]) -> None:
        """Log an event without counting it."""
        self._subscribers[0](name, fields)

    def use_log(self, log: LogEvent) -> None:
        """Log events by `log` from now on. The settings, which choose it, are read later."""
        self._subscribers[0] = Repeats(log)

    def emit(self, name: str, count: int = 1, **fields: Any) -> None:
        self.counts[name] += count
        if count != 1:
            fields["count"] = count
        for subscriber in self._subscribers:
            try:
                subscriber(name, fields)
            except Exception:
                logger.exception("a subscriber failed on %s", name)

    def attempt(self, loop: str, stage: str, work: Callable[[], object]) -> bool:
        """Run one stage of a loop; return whether it succeeded.

        A failure emits `loop.failed` and does not stop the following stages.
        """
        try:
            work()
        except Exception as error:
            self.failed(loop, error, stage)
            return False
        return True

    def failed(self, loop: str, error: BaseException, stage: str = "") -> None:
        """Emit `loop.failed` for a turn or a stage of a loop."""
        at: dict[str, Any] = {"loop": loop, "stage": stage} if stage else {"loop": loop}
        self.emit("loop.failed", **at, error=f"{type(error).__name__}: {error}", cause=error)

    def refuse(self, kind: str, error: Exception) -> None:
        """Emit `message.refused`: `kind` says where the message comes from, `error` what is wrong.

        Any client of the broker can send messages, so the text is bounded.
        """
        self.emit("message.refused", task=kind, reason=str(error)[:200])


def log_event(name: str, fields: Mapping[str, Any]) -> None:
    """Log one line, with the traceback of the field `cause` or, without it, of `error`."""
    level = level_of(name, fields)
    if logger.isEnabledFor(level):
        logger.handle(log_record(name, fields, level))


def level_of(name: str, fields: Mapping[str, Any]) -> int:
    if fields.get("is_logged") or (name in _BY_OUTAGE and is_outage(_cause_of(fields))):
        return logging.DEBUG
    return _LOG_LEVELS.get(name, logging.DEBUG)


def log_record(name: str, fields: Mapping[str, Any], level: int) -> logging.LogRecord:
    """Return the record of an event, whose message is the line for people."""
    # repr escapes CR, LF and ANSI sequences in untrusted text, so the entry stays one line.
    said = {
        key: value
        for key, value in fields.items()
        if isinstance(value, _SHOWN) and key not in ("cause", "is_logged")
    }
    shown = " ".join(f"{key}={_repr(value)}" for key, value in said.items())
    cause = _cause_of(fields)
    has_traceback = isinstance(cause, BaseException)
    record = logger.makeRecord(
        logger.name,
        level,
        __file__,
        0,
        # The name is part of the template, by which error trackers group entries.
        f"{name} %s",
        (shown,),
        (type(cause), cause, cause.__traceback__) if has_traceback else None,
        "log_event",
    )
    record.event_name, record.event_tag = name, str(fields.get("tag", ""))
    if has_traceback:
        # Formatters show this text. Trackers such as Sentry use the exception itself.
        record.exc_text = _traceback(cause)
    return record


def _cause_of(fields: Mapping[str, Any]) -> Any:
    return fields.get("cause", fields.get("error"))


def is_outage(error: object) -> bool:
    """Return whether `store.down` reports this error, too."""
    return isinstance(error, OUTAGES) and not getattr(error, "is_unable", False)


def _repr(value: object) -> str:
    try:
        return f"{value!r:.300}"
    except Exception:
        return f"<{type(value).__name__}>"  # an exception of user code may have no valid repr


def _traceback(error: BaseException) -> str:
    """Return the traceback, shortened and indented, so that it cannot imitate a log entry."""
    text = traceback_text(error, MOST_TRACEBACK_BYTES)
    escaped = "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )
    return textwrap.indent(escaped.rstrip(), "    ")
