"""The health of the connection from a worker's main process to each database."""

from __future__ import annotations

import threading

from delaytasks.core.clock import monotonic
from delaytasks.core.events import Events

#: A database that has not answered a question for this long counts as unavailable.
DATABASE_ANSWER_S = 5.0


class DatabaseOutages:
    """Logs each outage of a database once when it begins and once when it ends. Thread-safe."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._lock = threading.Lock()
        #: When each shard's database was found unavailable, and when it was asked a question
        #: that it has not answered yet.
        self._down_since: dict[int, float] = {}
        self._asked_at: dict[int, float] = {}

    def mark_asked(self, shard: int) -> None:
        with self._lock:
            self._asked_at.setdefault(shard, monotonic())

    def mark_down(self, shard: int, error: object) -> None:
        with self._lock:
            self._asked_at.pop(shard, None)
            is_new = self._down_since.setdefault(shard, now := monotonic()) == now
        if is_new:
            self._events.emit("store.down", error=str(error), shard=shard)

    def mark_up(self, shard: int) -> None:
        with self._lock:
            self._asked_at.pop(shard, None)
            since = self._down_since.pop(shard, None)
        if since is not None:
            self._events.emit("store.up", shard=shard, away_s=round(monotonic() - since, 1))

    def check_answers(self) -> None:
        """Mark the databases that owe an answer; the thread that asked may still be waiting."""
        silent_since = monotonic() - DATABASE_ANSWER_S
        for shard, asked_at in list(self._asked_at.items()):
            if asked_at < silent_since:
                self.mark_down(shard, f"no answer for {DATABASE_ANSWER_S:g} s")


class DatabaseContact:
    """Measures for how long this process has reached one database without an interruption.

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
