"""Values that all viewers share, so that many open consoles read the database as often as one."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from delaytasks.core.clock import monotonic

T = TypeVar("T")
#: Values that are kept. The ones that were read longest ago are dropped first.
MOST_VALUES = 200
#: A value is kept 20 times as long as its read took, so that its reads take 5 % of the time.
KEPT_PER_READ = 20.0
#: But not longer than this.
LONGEST_KEPT_S = 60.0
#: Seconds for which the waiting threads get the error of a read instead of repeating it.
ERROR_KEPT_S = 4.0


class _Slot:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.until = float("-inf")
        self.value: Any = None
        self.error: Exception | None = None


class SharedCache:
    """Keeps each value for some seconds. One thread reads it anew while the others wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: OrderedDict[Hashable, _Slot] = OrderedDict()

    def get(
        self,
        key: Hashable,
        kept_s: float,
        read: Callable[[], T],
        *,
        has_failed: Callable[[T], bool] = lambda value: False,
    ) -> T:
        """Return the value of `key`; call `read` if it is older than `kept_s` seconds.

        A value whose read took long is kept for longer, so that a slow database is not read all the
        time. An error of `read` is kept too, and raised in all threads that ask meanwhile.

        Parameters
        ----------
        has_failed
            Says that a value contains an error. It is then kept for `kept_s` seconds, however long
            the database was silent.
        """
        with self._lock:
            slot = self._slots.setdefault(key, _Slot())
            self._slots.move_to_end(key)
            while len(self._slots) > MOST_VALUES:
                self._slots.popitem(last=False)
        with slot.lock:
            if monotonic() >= slot.until:
                began, slot.error = monotonic(), None
                try:
                    slot.value = read()
                except Exception as error:
                    slot.error, slot.until = error, monotonic() + min(kept_s, ERROR_KEPT_S)
                    raise
                ended = monotonic()
                slow_s = min(KEPT_PER_READ * (ended - began), LONGEST_KEPT_S)
                slot.until = ended + (kept_s if has_failed(slot.value) else max(kept_s, slow_s))
            if slot.error is not None:
                raise slot.error.with_traceback(None)  # each raise would make it longer
            value: T = slot.value
            return value

    def forget(self) -> None:
        """Drop all values, after an action whose effect the viewer wants to see."""
        with self._lock:
            self._slots.clear()
