"""Arms entries in a thread of the producer, which makes the call of the producer shorter."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Iterable, Sequence

from delaytasks.core.clock import Clock, monotonic
from delaytasks.core.forks import reset_in_child
from delaytasks.core.interfaces import Entry, Timer

logger = logging.getLogger("delaytasks")
#: The number of entries that wait for the thread. Further ones are not armed: the sweep finds their
#: rows.
MAX_WAITING_ENTRIES = 100_000
#: Entries wait for others this long, and not longer than half of the time until the first is due.
ARM_DELAY_S = 0.05


class BackgroundTimer:
    """Arms together the entries of several calls.

    A thread that wakes for each entry would cost the caller more time than it saves.
    """

    def __init__(self, timer: Timer, clock: Clock) -> None:
        self._timer = timer
        self._clock = clock
        self.after_fork()
        reset_in_child(self)
        atexit.register(self.flush)

    def after_fork(self) -> None:
        """Forget the entries of the parent process, whose thread arms them."""
        self._changed = threading.Condition()
        self._waiting: list[Entry] = []
        self._send_at: float | None = None
        self._is_sending = False
        self._thread: threading.Thread | None = None

    @property
    def is_up(self) -> bool:
        return self._timer.is_up

    def arm(self, entries: Iterable[Entry]) -> bool:
        entries = list(entries)
        if not entries:
            return True
        left_s = (min(entry.due_us for entry in entries) - self._clock.now_us()) / 1e6
        send_at = monotonic() + min(max(left_s / 2, 0), ARM_DELAY_S)
        with self._changed:
            if len(self._waiting) > MAX_WAITING_ENTRIES:
                return False
            if self._has_thread():
                self._waiting.extend(entries)
                if self._send_at is None or send_at < self._send_at:
                    self._send_at = send_at
                    self._changed.notify_all()
                return True
        return self._timer.arm(entries)

    def _has_thread(self) -> bool:
        """Start the thread if necessary.

        Return False if no thread can be started: at the system's limit, or while the interpreter
        ends.
        """
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._send, name="delaytasks-arm", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:
                self._thread = None
        return self._thread is not None

    def disarm(self, entries: Iterable[Entry]) -> None:
        entries = list(entries)
        names = {(entry.id, entry.version) for entry in entries}
        with self._changed:
            self._waiting = [
                entry for entry in self._waiting if (entry.id, entry.version) not in names
            ]
        self._timer.disarm(entries)

    def request_drain(
        self, queue: str, priorities: Sequence[int], messages: int, expires_s: float, shard: int = 0
    ) -> bool:
        return self._timer.request_drain(queue, priorities, messages, expires_s, shard)

    def flush(self, timeout_s: float = 2.0) -> bool:
        """Wait until all entries are armed, and return False after `timeout_s`.

        At exit the process waits as well, and leaves the other entries to the sweep.
        """
        with self._changed:
            if self._waiting:
                self._send_at = monotonic()
                self._changed.notify_all()
            return self._changed.wait_for(
                lambda: not self._waiting and not self._is_sending, timeout_s
            )

    def close(self) -> None:
        """Arm the waiting entries. The end of the process no longer waits for this timer."""
        self.flush()
        atexit.unregister(self.flush)

    def _send(self) -> None:
        while True:
            with self._changed:
                while self._send_at is None or (left_s := self._send_at - monotonic()) > 0:
                    self._changed.wait(None if self._send_at is None else left_s)
                entries, self._waiting = self._waiting, []
                self._send_at, self._is_sending = None, True
            try:
                self._timer.arm(entries)
            except Exception:  # the thread has to arm the next entries
                logger.exception("arming %d tasks failed; the sweep will find them", len(entries))
            finally:
                with self._changed:
                    self._is_sending = False
                    self._changed.notify_all()
