"""Timers of tests: one that records, and one whose messages wait until a test delivers them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from delaytasks import DelayTasks
from delaytasks.broker import arming
from delaytasks.broker.arming import BackgroundTimer, Sender
from delaytasks.model.clock import Clock
from delaytasks.model.task import Entry
from delaytasks.runtime import runtime_of


class RecordingTimer:
    def __init__(self) -> None:
        self.armed: list[Entry] = []
        self.requested_drains: list[tuple[str, list[int], int]] = []
        self.is_up = True

    def arm(self, entries: Iterable[Entry]) -> bool:
        self.armed += entries if self.is_up else ()
        return self.is_up

    def request_drain(
        self, queue: str, priorities: Sequence[int], messages: int, expires_s: float
    ) -> bool:
        self.requested_drains.append((queue, list(priorities), messages))
        return self.is_up

    @property
    def ids(self) -> list[int]:
        return [entry.id for entry in self.armed]


class WorldBroker(RecordingTimer):
    """A broker whose messages a test delivers or loses.

    `armed` has the entries of the messages that wait.
    """

    def lose(self, *ids: int) -> None:
        """Lose the messages of these tasks, or all messages and requests."""
        if ids:
            self.armed = [entry for entry in self.armed if entry.id not in ids]
            return
        self.armed, self.requested_drains = [], []

    def take(self, now_us: int) -> list[Entry]:
        """Remove and return the entries that are due."""
        taken = [entry for entry in self.armed if entry.due_us <= now_us]
        self.armed = [entry for entry in self.armed if entry.due_us > now_us]
        return taken

    def take_requested_drains(self) -> list[tuple[str, list[int], int]]:
        taken, self.requested_drains = self.requested_drains, []
        return taken


class SlowBroker(RecordingTimer):
    """Records each call, and blocks the call while `gate` is closed.

    It raises an error in as many calls as `fails` says.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[Entry]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fails = 0

    def arm(self, entries: Iterable[Entry]) -> bool:
        self.calls.append(list(entries))
        assert self.gate.wait(10)
        self.armed += self.calls[-1]
        if self.fails:
            self.fails -= 1
            raise OSError("as asked")
        return True


class ArmingThread(BackgroundTimer):
    """Arms entries in a thread, as the calls of an application do, and hands them to `broker`."""

    def __init__(self, broker: Any = None, limit_s: float = 10) -> None:
        self.broker = broker or SlowBroker()
        super().__init__(Sender(self.broker, Clock(), limit_s))
        self.sender = self._sender
        self.flush, self.close = self.sender.flush, self.sender.close

    @staticmethod
    def entry(id: int, in_s: float = 10) -> Entry:
        """Return an entry that is due in so many seconds."""
        return Entry(id, 0, Clock().now_us() + int(in_s * 1e6))

    def change(self, monkeypatch: Any, **constants: float) -> None:
        """Change how long entries wait for others, how often they are sent, and how many wait."""
        for name, value in constants.items():
            monkeypatch.setattr(arming, name.upper(), value)

    @property
    def has_died(self) -> bool:
        return not (self.sender._thread and self.sender._thread.is_alive())

    def locked(self) -> AbstractContextManager[Any]:
        """Hold the lock of the thread, as another thread does in the middle of a call."""
        return self.sender._changed


def arms_in_background(delays: DelayTasks) -> bool:
    """Return whether the calls of an instance leave the broker to a thread."""
    return isinstance(runtime_of(delays).producer_timer, BackgroundTimer)
