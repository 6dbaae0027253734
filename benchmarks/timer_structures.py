"""Alternatives to the timing wheel with the same interface.

Adding an existing entry moves it, and `advance` sets the current tick.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import sched
import threading
from collections.abc import Hashable
from typing import Any, Protocol


class Holder(Protocol):
    def add(self, name: Hashable, tick: int, entry: Any) -> object: ...
    def cancel(self, name: Hashable) -> object: ...
    def advance(self, tick: int) -> list[Any]: ...


class Heap:
    """The `heapq` pattern of the standard library: cancelled or moved entries stay until they are
    due.
    """

    def __init__(self) -> None:
        self._heap: list[list[Any]] = []
        self._held: dict[Hashable, list[Any]] = {}
        self._order = itertools.count()

    def add(self, name: Hashable, tick: int, entry: Any) -> None:
        if name in self._held:
            self.cancel(name)
        item = self._held[name] = [tick, next(self._order), name, entry]
        heapq.heappush(self._heap, item)

    def cancel(self, name: Hashable) -> None:
        self._held.pop(name)[-1] = None

    def advance(self, tick: int) -> list[Any]:
        due = []
        while self._heap and self._heap[0][0] <= tick:
            _, _, name, entry = heapq.heappop(self._heap)
            if entry is not None:
                del self._held[name]
                due.append(entry)
        return due


class Sched:
    """The standard library's scheduler."""

    def __init__(self) -> None:
        self._now = 0
        self._scheduler = sched.scheduler(lambda: self._now, lambda _: None)
        self._held: dict[Hashable, sched.Event] = {}
        self._due: list[Any] = []

    def add(self, name: Hashable, tick: int, entry: Any) -> None:
        if name in self._held:
            self.cancel(name)
        self._held[name] = self._scheduler.enterabs(tick, 0, self._fire, (name, entry))

    def cancel(self, name: Hashable) -> None:
        self._scheduler.cancel(self._held.pop(name))

    def advance(self, tick: int) -> list[Any]:
        self._now = tick
        self._scheduler.run(blocking=False)
        due, self._due = self._due, []
        return due

    def _fire(self, name: Hashable, entry: Any) -> None:
        del self._held[name]
        self._due.append(entry)


class Scan:
    """A dictionary that is scanned in each tick."""

    def __init__(self) -> None:
        self._held: dict[Hashable, tuple[int, Any]] = {}

    def add(self, name: Hashable, tick: int, entry: Any) -> None:
        self._held[name] = (tick, entry)

    def cancel(self, name: Hashable) -> None:
        del self._held[name]

    def advance(self, tick: int) -> list[Any]:
        names = [name for name, (due, _) in self._held.items() if due <= tick]
        return [self._held.pop(name)[1] for name in names]


class LoopTimers:
    """One timer per entry in an event loop with a simulated clock. A tick is one iteration."""

    def __init__(self) -> None:
        self._now = 0
        self._loop = asyncio.new_event_loop()
        self._loop.time = lambda: self._now  # type: ignore[method-assign]
        self._held: dict[Hashable, asyncio.TimerHandle] = {}
        self._due: list[Any] = []

    def add(self, name: Hashable, tick: int, entry: Any) -> None:
        if name in self._held:
            self.cancel(name)
        self._held[name] = self._loop.call_at(tick, self._fire, name, entry)

    def cancel(self, name: Hashable) -> None:
        self._held.pop(name).cancel()

    def advance(self, tick: int) -> list[Any]:
        self._now = tick
        self._loop.call_soon(self._loop.stop)
        self._loop.run_forever()
        due, self._due = self._due, []
        return due

    def _fire(self, name: Hashable, entry: Any) -> None:
        del self._held[name]
        self._due.append(entry)


class ThreadTimers:
    """One `threading.Timer` per entry: a thread that waits.

    The kernel is its clock, so ticks cannot be counted.
    """

    def __init__(self) -> None:
        self._held: dict[Hashable, threading.Timer] = {}

    def add(self, name: Hashable, seconds: float) -> None:
        timer = self._held[name] = threading.Timer(seconds, self.cancel, (name,))
        timer.daemon = True
        timer.start()

    def cancel(self, name: Hashable) -> None:
        self._held.pop(name).cancel()
