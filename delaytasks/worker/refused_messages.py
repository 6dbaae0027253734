"""Counts and logs the messages that a worker refuses, and states which ones it accepts."""

from __future__ import annotations

from delaytasks.core.clock import monotonic
from delaytasks.core.events import Events

#: Longer messages are not ours: 1,000 entries of four 64-bit numbers fit.
MAX_MESSAGE_BYTES = 256 * 1024
#: The only content type that is decoded.
JSON = "application/json"
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
