"""Log an event that occurs for each row or message once a minute, with a count."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from delaytasks.core.clock import monotonic
from delaytasks.core.forks import reset_in_child

#: The time between two lines about the same subject.
QUIET_S = 60.0
#: The number of subjects of one event that have a line each; all others share one line.
MOST_SUBJECTS = 20
#: The events that occur for each row or each try, and the field with the subject of each. The
#: failure of a task is not among them, because each failure has its own reason.
SUBJECTS = {
    "task.no_processor": "tag",
    "task.no_key": "tag",
    "task.no_time_limits": "tag",
    "task.expired": "tag",
    "task.left_open": "tag",
    "task.raised_late": "tag",
    "task.lease_lost": "tag",
    "task.interrupted": "tag",
    "result.dropped": "tag",
    "settle.waits": "error",
    "message.refused": "task",
    "queue.blocked": "key",
    "queue.unblocked": "key",
}
#: Each of these events ends the state that the other one reports.
OPPOSITES = {"queue.blocked": "queue.unblocked", "queue.unblocked": "queue.blocked"}
_OTHER_SUBJECTS = object()

LogEvent = Callable[[str, dict[str, Any]], None]


@dataclass
class _Quiet:
    """A subject with a log line less than a minute ago, and the events that were counted since."""

    until: float
    count: int = 0
    fields: dict[str, Any] | None = None


class Repeats:
    """Passes an event on to `log`, or counts it.

    After a minute, one line has the fields of the last event and the number of counted events.
    Thread-safe; each process counts its own events.
    """

    def __init__(self, log: LogEvent) -> None:
        self._log = log
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._quiet: dict[tuple[str, object], _Quiet] = {}
        self._is_waiting = False

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        subject = SUBJECTS.get(name)
        if subject is None or self._is_new(name, fields.get(subject), fields):
            self._log(name, fields)

    def _is_new(self, name: str, subject: object, fields: dict[str, Any]) -> bool:
        self.flush()
        with self._lock:
            opposite = self._quiet.get((OPPOSITES.get(name, ""), subject))
            if opposite is not None:
                opposite.count, opposite.fields = 0, None
            key = (name, subject)
            if (
                key not in self._quiet
                and sum(known == name for known, _ in self._quiet) >= MOST_SUBJECTS
            ):
                key = (name, _OTHER_SUBJECTS)
            quiet = self._quiet.get(key)
            if quiet is None:
                self._quiet[key] = _Quiet(monotonic() + QUIET_S)
                return True
            quiet.count += fields.get("count", 1)
            quiet.fields = fields
            if not self._is_waiting:
                self._is_waiting = True
                self._flush_after(QUIET_S)
            return False

    def flush(self) -> None:
        """Log the counts of the subjects whose minute is over."""
        now, due = monotonic(), []
        with self._lock:
            for key, quiet in list(self._quiet.items()):
                if quiet.until <= now:
                    del self._quiet[key]
                    if quiet.fields is not None:
                        self._quiet[key] = _Quiet(now + QUIET_S)
                        due.append((key[0], {**quiet.fields, "count": quiet.count}))
        for name, fields in due:
            self._log(name, fields)

    def _flush_after(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._flush_later)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # no thread can be started: the next event logs it
            self._is_waiting = False

    def _flush_later(self) -> None:
        self.flush()
        with self._lock:
            self._is_waiting = any(quiet.count for quiet in self._quiet.values())
            if self._is_waiting:
                self._flush_after(QUIET_S / 10)
