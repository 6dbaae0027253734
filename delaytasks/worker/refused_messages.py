"""Messages that are not in the form that this version of delaytasks writes."""

from __future__ import annotations

from delaytasks.core.clock import monotonic
from delaytasks.core.events import Events

#: At most one refused message is logged in this time, since any client of the broker can send them.
REFUSAL_LOG_S = 60.0


class RefusedMessages:
    """Counts the messages that a worker drops, and logs one from time to time."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._logged_at = -REFUSAL_LOG_S

    def refuse(self, kind: str, error: Exception) -> None:
        if monotonic() - self._logged_at < REFUSAL_LOG_S:
            self._events.counts["message.refused"] += 1
            return
        self._logged_at = monotonic()
        self._events.emit("message.refused", task=kind, reason=str(error)[:200])
