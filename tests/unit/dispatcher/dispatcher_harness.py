"""A dispatcher with a simulated pool and clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import Any

import pytest

from delaytasks.core.events import Events
from delaytasks.core.interfaces import Entry
from delaytasks.core.policies import Stamp
from delaytasks.core.settings import Settings
from delaytasks.worker import chunk_queue, pool
from delaytasks.worker.chunk_queue import UnfinishedWork
from delaytasks.worker.chunk_request import ChunkRequest
from delaytasks.worker.dispatcher import CapacityRequest, Dispatcher
from delaytasks.worker.shared_memory import OthersWait
from tests.recording import ManualClock


class Pool:
    """A pool of two processes, whose requests end when a test calls `end`."""

    limit = 2

    def __init__(self) -> None:
        self.requests: list[tuple[ChunkRequest, Callable[[Any], None], Callable[[Any], None]]] = []
        self.is_broken = False

    def apply_async(self, function: Any, args: Any, callback: Any, error_callback: Any) -> object:
        if self.is_broken:
            raise OSError("no more pipes")
        self.requests.append((args[0], callback, error_callback))
        return object()

    def end(self, report: Any) -> ChunkRequest:
        request, callback, _ = self.requests.pop(0)
        callback(report)
        return request


class DispatcherHarness:
    def __init__(self, **settings: Any) -> None:
        self.clock = ManualClock(datetime(2030, 1, 1, tzinfo=timezone.utc))
        self.events = Events()
        self.pool = Pool()
        self.held: list[Entry] = []
        self.sent_back: list[UnfinishedWork] = []
        self.capacity_request = CapacityRequest()
        self.others_wait = OthersWait()
        self.dispatcher = Dispatcher(
            Settings(**settings),
            self.clock,
            self.events,
            self.pool,
            call_soon=lambda call: call(),
            near_entries=self,
            capacity_request=self.capacity_request,
            send_back=self.sent_back.append,
            policy_stamp=Stamp,
            sends_events=lambda: False,
            others_wait=self.others_wait,
        )

    def hold(self, entries: Sequence[Entry]) -> list[Entry]:
        self.held += entries
        return []

    def entries(self, count: int, priority: int = 0, start: int = 1) -> list[Entry]:
        now = self.clock.now_us()
        return [Entry(start + n, 0, now, "default", priority) for n in range(count)]

    def continue_s(self) -> list[float]:
        return [request.continue_s for request, _, _ in self.pool.requests]

    def sizes(self) -> list[int]:
        return [len(request.entries) for request, _, _ in self.pool.requests]


class Hands:
    """Replace the monotonic clock of the chunk queue by one that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = 1000.0
        for module in (pool, chunk_queue):
            monkeypatch.setattr(module, "monotonic", lambda: self.at)
