"""Arming in a thread of the producer's, for callers who want the shortest call."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterable, Sequence

from delaytasks.core.forks import reset_in_child
from delaytasks.core.ports import Entry, Timer

#: More than this many entries waiting are dropped: they are rows, and the sweep finds them.
MOST = 100_000


class BackgroundTimer:
    """What is armed while the thread sends travels together in its next messages."""

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self.after_fork()
        reset_in_child(self)
        atexit.register(self.flush)

    def after_fork(self) -> None:
        """What waits belongs to the parent, whose thread sends it."""
        self._changed = threading.Condition()
        self._waiting: list[Entry] = []
        self._is_sending = False
        self._thread: threading.Thread | None = None

    @property
    def is_up(self) -> bool:
        return self._timer.is_up

    def arm(self, entries: Iterable[Entry]) -> bool:
        with self._changed:
            if len(self._waiting) > MOST:
                return False
            self._waiting.extend(entries)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._send, name="delaytasks-arm", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return True

    def drain(self, queue: str, priorities: Sequence[int], tokens: int, expires_s: float) -> bool:
        return self._timer.drain(queue, priorities, tokens, expires_s)

    def flush(self, timeout_s: float = 2.0) -> bool:
        """Waits until all is sent; at exit the process waits a little, then leaves the rest to the sweep."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._is_sending, timeout_s)

    def _send(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                entries, self._waiting, self._is_sending = self._waiting, [], True
            try:
                self._timer.arm(entries)
            finally:
                with self._changed:
                    self._is_sending = False
                    self._changed.notify_all()
