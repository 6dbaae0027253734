"""Whether a database answers at its usual pace: told when it has become slow, and when it is quick again."""

from __future__ import annotations

from delaytasks.core.events import Events

#: For one small write. Each chunk takes two of them, each call that schedules at least one.
SLOW_S = 0.15
#: One slow answer says nothing: a server writes its checkpoints, a row may be locked.
IN_A_ROW = 2


class DatabasePace:
    def __init__(self, events: Events, shard: int) -> None:
        self._events = events
        self._shard = shard
        self._slow = 0
        self._is_slow = False

    def took(self, seconds: float) -> None:
        self._slow = self._slow + 1 if seconds > SLOW_S else 0
        if self._slow == IN_A_ROW and not self._is_slow:
            self._is_slow = True
            self._events.emit("store.slow", seconds=round(seconds, 3), shard=self._shard)
        elif not self._slow and self._is_slow:
            self._is_slow = False
            self._events.emit("store.quick", shard=self._shard)
