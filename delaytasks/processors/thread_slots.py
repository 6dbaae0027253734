"""Threads for concurrent calls of processors; each tag has a limited number of slots."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from delaytasks.core.clock import monotonic, reset_in_child

T = TypeVar("T")
#: The most slots of one tag, and the most threads of one process.
MAX_SLOTS = 1000


class ThreadSlots:
    """The slots of a process, which its chunks share.

    A call that finds no idle thread starts one, which stays.
    """

    def __init__(self) -> None:
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._changed = threading.Condition()
        self._taken: Counter[str] = Counter()
        self._all_taken = 0
        self._threads = ThreadPoolExecutor(MAX_SLOTS, "delaytasks-row")
        #: The calls that ended since the last call of `ended`.
        self._ended, self._seconds = 0, 0.0

    def take(self, tag: str, slots: int, until: float) -> bool:
        """Take one of the tag's slots when one is free.

        Return False if this takes longer than `until`.
        """
        with self._changed:
            if not self._wait(lambda: self._is_free(tag, slots), until):
                return False
            self._taken[tag] += 1
            self._all_taken += 1
            return True

    def give_back(self, tag: str) -> None:
        """Free a slot in which no call was started."""
        with self._changed:
            self._leave(tag)
            self._changed.notify_all()

    def start(
        self, tag: str, slots: int, rows: int, call: Callable[[], T], done: Callable[[T], None]
    ) -> None:
        """Run `call` in a thread for which a slot was taken.

        `done` gets the result after the slot is free.
        """
        self._threads.submit(self._run, tag, slots, rows, call, done)

    def free(self, tag: str, slots: int) -> int:
        with self._changed:
            return min(slots - self._taken[tag], MAX_SLOTS - self._all_taken)

    def wait(self, is_so: Callable[[], bool], until: float | None = None) -> bool:
        """Wait until `is_so` returns True, tested whenever a call has ended.

        Return False after `until`.
        """
        with self._changed:
            return self._wait(is_so, until)

    def notify(self) -> None:
        """Let the callers of `wait` test again."""
        with self._changed:
            self._changed.notify_all()

    def ended(self) -> tuple[int, float]:
        """Return the rows that ended since the last call, and their time divided by the slots."""
        if not self._ended:  # as in a process without concurrent calls
            return 0, 0.0
        with self._changed:
            ended, self._ended, self._seconds = (self._ended, self._seconds), 0, 0.0
            return ended

    def _run(
        self, tag: str, slots: int, rows: int, call: Callable[[], T], done: Callable[[T], None]
    ) -> None:
        began = monotonic()
        answer = call()
        with self._changed:
            self._ended += rows
            self._seconds += (monotonic() - began) / slots
            self._leave(tag)
        done(answer)
        self.notify()

    def _leave(self, tag: str) -> None:
        self._taken[tag] -= 1
        self._all_taken -= 1

    def _is_free(self, tag: str, slots: int) -> bool:
        return self._taken[tag] < slots and self._all_taken < MAX_SLOTS

    def _wait(self, is_so: Callable[[], bool], until: float | None) -> bool:
        while not is_so():
            left = None if until is None else until - monotonic()
            if left is not None and left <= 0:
                return False
            self._changed.wait(left)
        return True
