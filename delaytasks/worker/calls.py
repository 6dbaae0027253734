"""Calls in the thread that may use the pool: the event loop, or a thread in its place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import inf
from queue import Empty, SimpleQueue

from delaytasks.core.clock import monotonic
from delaytasks.core.events import Events
from delaytasks.core.loop import Loop

Call = Callable[[], None]


class CallThread:
    """Takes the place of the event loop if the broker's transport has no event loop.

    A solo pool runs its chunks in this thread. There must be no second thread of this kind, so
    the watchdog never takes it for stuck.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._queue: SimpleQueue[Call] = SimpleQueue()
        self.loop = Loop("calls", self._run_calls, events)

    def call_soon(self, call: Call) -> None:
        self._queue.put(call)
        self.loop.wake()

    def _run_calls(self) -> None:
        while True:
            try:
                call = self._queue.get_nowait()
            except Empty:
                return
            self._events.attempt("calls", "call", call)


class DelayedCall:
    """A call that timers bring to the thread that may use the pool."""

    def __init__(self, call_soon: Callable[[Call], object], call: Call) -> None:
        self._call_soon = call_soon
        self._call = call
        self._planned_at = -inf

    def call_after(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._call_soon, (self._call,))
        timer.daemon = True
        timer.start()

    def call_within(self, seconds: float) -> None:
        """Plan the call unless an earlier call of this method planned one that is yet to come.

        Infinity plans nothing.
        """
        if seconds < inf and monotonic() >= self._planned_at:
            self._planned_at = monotonic() + seconds
            self.call_after(seconds)


class CapacityRequest:
    """One thread requests capacity, and another one grants it by setting the event `granted`."""

    def __init__(self) -> None:
        self.granted = threading.Event()
        self._is_open = False

    def open(self) -> None:
        self._is_open = True

    def withdraw(self) -> None:
        self._is_open = False

    def grant_if(self, has_capacity: Callable[[], int]) -> None:
        """Grant the request if there is one and `has_capacity` returns more than 0."""
        if self._is_open and has_capacity():
            self._is_open = False
            self.granted.set()
