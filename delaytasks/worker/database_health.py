"""The health of the connection from a worker's main process to the database."""

from __future__ import annotations

import threading

from delaytasks.core.clock import monotonic
from delaytasks.core.events import Events

#: A database that has not answered a question for this long counts as unavailable.
DATABASE_ANSWER_S = 5.0


class DatabaseOutages:
    """Logs each outage of the database once when it begins and once when it ends. Thread-safe."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._lock = threading.Lock()
        #: When the database was found unavailable, and when it was asked a question that it has
        #: not answered yet.
        self._down_since: float | None = None
        self._asked_at: float | None = None

    def mark_asked(self) -> None:
        with self._lock:
            if self._asked_at is None:
                self._asked_at = monotonic()

    def mark_down(self, error: object) -> None:
        with self._lock:
            self._asked_at = None
            is_new = self._down_since is None
            if is_new:
                self._down_since = monotonic()
        if is_new:
            self._events.emit("store.down", error=str(error))

    def mark_up(self) -> None:
        with self._lock:
            self._asked_at = None
            since, self._down_since = self._down_since, None
        if since is not None:
            self._events.emit("store.up", away_s=round(monotonic() - since, 1))

    def check_answer(self) -> None:
        """Mark the database if it owes an answer; the thread that asked may still be waiting."""
        asked_at = self._asked_at
        if asked_at is not None and asked_at < monotonic() - DATABASE_ANSWER_S:
            self.mark_down(f"no answer for {DATABASE_ANSWER_S:g} s")


class DatabaseContact:
    """Measures for how long this process has reached the database without an interruption.

    A process that did not reach the database cannot tell a worker that died from one that could
    not report. A process that was suspended cannot tell either.
    """

    def __init__(self, gap_s: float) -> None:
        """After `gap_s` without an answer the contact begins anew."""
        self._gap_s = gap_s
        self._since = self._answered_at = float("-inf")

    def mark_answered(self) -> None:
        now = monotonic()
        if now - self._answered_at > self._gap_s:
            self._since = now
        self._answered_at = now

    def mark_failed(self) -> None:
        self._answered_at = float("-inf")

    @property
    def seconds(self) -> float:
        now = monotonic()
        return 0.0 if now - self._answered_at > self._gap_s else now - self._since
