"""Calls of processors that run side by side: threads of this process, and for each tag a number of places."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from delaytasks.core.clock import monotonic
from delaytasks.core.forks import reset_in_child

T = TypeVar("T")
#: Places of one tag, and threads of one process.
MOST_PLACES = 1000


class ThreadSlots:
    """One for a process, whose chunks share the places. A thread is made when a call finds none idle, and stays."""

    def __init__(self) -> None:
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._changed = threading.Condition()
        self._taken: Counter[str] = Counter()
        self._all_taken = 0
        self._threads = ThreadPoolExecutor(MOST_PLACES, "delaytasks-row")
        #: Of those that ended since somebody asked.
        self._ended, self._seconds = 0, 0.0

    def take(self, tag: str, places: int, until: float) -> bool:
        """One of the tag's places, as soon as one is free; False if none is until then."""
        with self._changed:
            if not self._wait(lambda: self._is_free(tag, places), until):
                return False
            self._taken[tag] += 1
            self._all_taken += 1
            return True

    def give_back(self, tag: str) -> None:
        """A place that was taken for nothing."""
        with self._changed:
            self._leave(tag)
            self._changed.notify_all()

    def start(
        self, tag: str, places: int, rows: int, call: Callable[[], T], done: Callable[[T], None]
    ) -> None:
        """Runs `call` in a thread, on a place that was taken for it; its place is free when `done` gets the answer."""
        self._threads.submit(self._run, tag, places, rows, call, done)

    def free(self, tag: str, places: int) -> int:
        with self._changed:
            return min(places - self._taken[tag], MOST_PLACES - self._all_taken)

    def wait(self, is_so: Callable[[], bool], until: float | None = None) -> bool:
        """Asks again whenever a call has ended or somebody `told`; False when time is up before."""
        with self._changed:
            return self._wait(is_so, until)

    def tell(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def ended(self) -> tuple[int, float]:
        """Rows whose calls ended since this was asked last, and what they took: of the places' time, one's share."""
        with self._changed:
            ended, self._ended, self._seconds = (self._ended, self._seconds), 0, 0.0
            return ended

    def _run(
        self, tag: str, places: int, rows: int, call: Callable[[], T], done: Callable[[T], None]
    ) -> None:
        began = monotonic()
        answer = call()
        with self._changed:
            self._ended += rows
            self._seconds += (monotonic() - began) / places
            self._leave(tag)
        done(answer)
        self.tell()

    def _leave(self, tag: str) -> None:
        self._taken[tag] -= 1
        self._all_taken -= 1

    def _is_free(self, tag: str, places: int) -> bool:
        return self._taken[tag] < places and self._all_taken < MOST_PLACES

    def _wait(self, is_so: Callable[[], bool], until: float | None) -> bool:
        while not is_so():
            left = None if until is None else until - monotonic()
            if left is not None and left <= 0:
                return False
            self._changed.wait(left)
        return True
