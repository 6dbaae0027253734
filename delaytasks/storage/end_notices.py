"""Notices that tasks have ended, for the threads of one process that wait for them.

All of them share one connection. One of the waiting threads reads it, and wakes the others.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from delaytasks.core.forks import reset_in_child
from delaytasks.storage.notices import Listener, Notices


class EndNotices:
    def __init__(self, channel: Notices) -> None:
        self._channel = channel
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        """Forget the threads and the connection of the parent process."""
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._listener: Listener | None = None
        self._has_failed = False
        #: The events of the threads that wait, by the ids of their tasks.
        self._waiting: dict[int, list[threading.Event]] = defaultdict(list)

    @property
    def is_listening(self) -> bool:
        return self._listener is not None

    @contextmanager
    def about(self, id: int) -> Iterator[EndNotice]:
        """Listen for the end of a task inside the context. A later read misses no notice."""
        event = threading.Event()
        with self._lock:
            self._waiting[id].append(event)
            if self._listener is None and not self._has_failed:
                try:
                    self._listener = self._channel.listen()
                except Exception:  # each driver has errors of its own; the caller reads the row
                    self._has_failed = True
        try:
            yield EndNotice(self, event)
        finally:
            with self._lock:
                self._waiting[id].remove(event)
                if not self._waiting[id]:
                    del self._waiting[id]
                if not self._waiting:
                    self._disconnect()
                    self._has_failed = False  # the next thread tries again
                for [other, *_] in self._waiting.values():
                    other.set()  # in case this thread was the one that read
                    break

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait for a notice for up to `timeout_s`. Return False if no notices can arrive."""
        if self._listener is None:
            return False
        if not self._reading.acquire(blocking=False):
            if event.wait(timeout_s):  # another thread reads
                event.clear()
            return True
        try:
            listener = self._listener
            payloads = () if listener is None else listener.wait(timeout_s)
        except Exception:  # each driver has errors of its own; the caller reads the row
            with self._lock:
                self._has_failed = True
                self._disconnect()
            return False
        finally:
            self._reading.release()
        ended = {int(id) for payload in payloads for id in payload.split() if id.isdecimal()}
        with self._lock:
            for id in ended & self._waiting.keys():
                for waiting in self._waiting[id]:
                    waiting.set()
        return True

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    def _disconnect(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()


class EndNotice:
    """The notice that one task has ended."""

    def __init__(self, notices: EndNotices, event: threading.Event) -> None:
        self._notices = notices
        self._event = event

    @property
    def is_listening(self) -> bool:
        return self._notices.is_listening

    def wait(self, timeout_s: float) -> bool:
        return self._notices.wait(self._event, timeout_s)
