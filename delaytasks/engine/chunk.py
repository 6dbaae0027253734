"""Rows claimed together, run one after another, settled together; and the box of time they share."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from delaytasks.core.clock import monotonic
from delaytasks.core.forks import reset_in_child
from delaytasks.core.ports import Settlement
from delaytasks.core.task import DelayTask


class Chunk:
    """Who starts a row owns it: the runner that takes the next one, or the time box that takes the rest."""

    def __init__(self, tasks: Sequence[DelayTask], good_for_s: float) -> None:
        self._lock = threading.Lock()
        self._waiting = deque(tasks)
        self._finished: list[Settlement] = []
        self._good_until = monotonic() + good_for_s

    def start_next(self) -> DelayTask | None:
        """The next row, or None: at the end, after the time box, and when our leases may be over."""
        with self._lock:
            if not self._waiting or monotonic() > self._good_until:
                return None
            return self._waiting.popleft()

    def finish(self, settlement: Settlement) -> None:
        with self._lock:
            self._finished.append(settlement)

    def take_finished(self) -> list[Settlement]:
        with self._lock:
            finished, self._finished = self._finished, []
            return finished

    def take_waiting(self) -> list[DelayTask]:
        with self._lock:
            waiting = list(self._waiting)
            self._waiting.clear()
            return waiting


class TimeBox:
    """One thread that calls `expire(chunk)` for each chunk that is open past its time.

    It needs nothing of the thread that runs the chunk, which may sit in a processor for minutes.
    """

    def __init__(self, box_s: float, expire: Callable[[Chunk], None], on_error: Callable[[Exception], None]) -> None:
        self._box_s = box_s
        self._expire = expire
        self._on_error = on_error
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[Chunk, float] = {}
        self._thread: threading.Thread | None = None

    def open(self, chunk: Chunk) -> None:
        with self._changed:
            was_idle = not self._open
            self._open[chunk] = monotonic() + self._box_s
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._watch, name="delaytasks-timebox", daemon=True)
                self._thread.start()
            elif was_idle:
                self._changed.notify()

    def close(self, chunk: Chunk) -> None:
        with self._changed:
            self._open.pop(chunk, None)

    def _watch(self) -> None:
        while True:
            with self._changed:
                if not self._open:
                    self._changed.wait()
                    continue
                # Chunks are opened in time order, and a box is the same for all: the first is the next.
                chunk, deadline = next(iter(self._open.items()))
                left = deadline - monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
                del self._open[chunk]
            try:
                self._expire(chunk)
            except Exception as error:  # other chunks need this thread
                self._on_error(error)
