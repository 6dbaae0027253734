"""Arms entries in a thread of the producer, which makes the call of the producer shorter."""

from __future__ import annotations

import atexit
import logging
import multiprocessing.process
import multiprocessing.util
import sys
import threading
from collections.abc import Iterable, Sequence
from math import inf

from delaytasks.core.clock import Clock, monotonic, reset_in_child
from delaytasks.core.interfaces import Entry, Timer

logger = logging.getLogger("delaytasks")
#: A call with more entries arms them itself: for each of them the round trip hardly counts, and a
#: producer of many tasks must not be faster than the broker.
MAX_GATHERED_ENTRIES = 100
#: The number of entries that wait for the thread. Further ones are not armed: the sweep finds their
#: rows.
MAX_WAITING_ENTRIES = 100_000
#: Entries wait for others this long, and not longer than this part of the time until the first one
#: is due.
ARM_DELAY_S, ARM_DELAY_PART = 0.1, 0.1
#: The thread begins to send no more often than this. In a loop of calls whose tasks are due
#: immediately, it would otherwise send a message for each call, which takes longer than the call.
SEND_INTERVAL_S = 0.002


class BackgroundTimer:
    """Arms together the entries of several calls.

    A thread that wakes for each entry would cost the caller more time than it saves. The caller
    arms its entries itself if no thread can be started, and while the interpreter ends.
    """

    def __init__(self, timer: Timer, clock: Clock) -> None:
        self._timer = timer
        self._clock = clock
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        """Forget the entries of the parent process, whose thread arms them."""
        self._changed = threading.Condition()
        self._waiting: list[Entry] = []
        self._send_at: float | None = None
        self._sent_at = -inf
        self._is_sending = False
        #: The thread that sends. A thread ends when it is no longer this one.
        self._thread: threading.Thread | None = None
        self._is_exiting = False

    @property
    def is_up(self) -> bool:
        return self._timer.is_up

    def arm(self, entries: Iterable[Entry]) -> bool:
        entries = list(entries)
        if not entries:
            return True
        if len(entries) <= MAX_GATHERED_ENTRIES:
            left_s = (min(entry.due_us for entry in entries) - self._clock.now_us()) / 1e6
            send_at = monotonic() + min(max(left_s * ARM_DELAY_PART, 0), ARM_DELAY_S)
            with self._changed:
                send_at = max(send_at, self._sent_at + SEND_INTERVAL_S)
                if len(self._waiting) > MAX_WAITING_ENTRIES:
                    return False
                if not self._is_exiting and self._has_thread():
                    self._waiting.extend(entries)
                    if self._send_at is None or send_at < self._send_at:
                        self._send_at = send_at
                        self._changed.notify_all()
                    return True
        return self._timer.arm(entries)

    def disarm(self, entries: Iterable[Entry]) -> None:
        entries = list(entries)
        names = {(entry.id, entry.version) for entry in entries}
        with self._changed:
            self._waiting = [
                entry for entry in self._waiting if (entry.id, entry.version) not in names
            ]
        self._timer.disarm(entries)

    def request_drain(
        self, queue: str, priorities: Sequence[int], messages: int, expires_s: float
    ) -> bool:
        return self._timer.request_drain(queue, priorities, messages, expires_s)

    def flush(self, timeout_s: float = 2.0) -> bool:
        """Wait until all entries are armed, and return False after `timeout_s`."""
        with self._changed:
            if not self._waiting or self._has_thread():
                if self._waiting:
                    self._send_at = monotonic()
                    self._changed.notify_all()
                return self._changed.wait_for(
                    lambda: not self._waiting and not self._is_sending, timeout_s
                )
            entries, self._waiting = self._waiting, []
        return self._timer.arm(entries)

    def close(self) -> None:
        """Arm the waiting entries and end the thread. A later call starts another thread."""
        self.flush()
        with self._changed:
            if not self._waiting:
                self._thread = None
                self._changed.notify_all()
                atexit.unregister(self._exit)

    def _exit(self) -> None:
        """Arm the waiting entries while the process ends, and leave those of a slow broker to the
        sweep.
        """
        self._is_exiting = True
        self.flush()

    def _has_thread(self) -> bool:
        """Start the thread if necessary.

        Return False if no thread can be started: at the system's limit, in a subinterpreter without
        daemon threads, or while the interpreter ends.
        """
        if self._thread is not None and self._thread.is_alive():
            return True
        try:
            self._thread = threading.Thread(target=self._send, name="delaytasks-arm", daemon=True)
            self._thread.start()
        except RuntimeError:
            self._thread = None
            return False
        atexit.register(self._exit)
        if multiprocessing.process.parent_process() is not None:
            # A child of multiprocessing ends without the functions of atexit.
            multiprocessing.util.Finalize(None, self._exit, exitpriority=0)
        return True

    def _send(self) -> None:
        thread = threading.current_thread()
        while True:
            with self._changed:
                while self._thread is thread and (
                    self._send_at is None or (left_s := self._send_at - monotonic()) > 0
                ):
                    self._changed.wait(None if self._send_at is None else left_s)
                if self._thread is not thread:
                    return
                entries, self._waiting = self._waiting, []
                self._send_at, self._sent_at, self._is_sending = None, monotonic(), True
            try:
                self._timer.arm(entries)
            except Exception:  # the thread has to arm the next entries
                logger.exception("arming %d tasks failed; the sweep will find them", len(entries))
            finally:
                with self._changed:
                    self._is_sending = False
                    self._changed.notify_all()


def can_run_threads() -> bool:
    """Return False in uWSGI without its option `enable-threads`: there a thread stands still
    between the requests.
    """
    uwsgi = sys.modules.get("uwsgi")
    options = {} if uwsgi is None else uwsgi.opt
    # The option `threads` implies `enable-threads`.
    return uwsgi is None or "threads" in options or "enable-threads" in options
