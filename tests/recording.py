"""A timer that records its entries, and a `DelayTasks` with this timer."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Sequence
from typing import Any

from celery import Celery

from delaytasks import DelayTask, DelayTasks
from delaytasks.core.interfaces import Entry
from delaytasks.runtime import Runtime, runtime_of


def new_key() -> str:
    """Return an encryption key."""
    return base64.urlsafe_b64encode(os.urandom(32)).decode()


class CrashError(BaseException):
    """Simulates the death of the process."""


class RecordingTimer:
    def __init__(self) -> None:
        self.armed: list[Entry] = []
        self.disarmed: list[Entry] = []
        self.requested_drains: list[tuple[str, list[int], int]] = []
        self.is_up = True

    def arm(self, entries: Iterable[Entry]) -> bool:
        self.armed += entries if self.is_up else ()
        return self.is_up

    def disarm(self, entries: Iterable[Entry]) -> None:
        self.disarmed += entries

    def request_drain(
        self, queue: str, priorities: Sequence[int], messages: int, expires_s: float
    ) -> bool:
        self.requested_drains.append((queue, list(priorities), messages))
        return self.is_up

    @property
    def ids(self) -> list[int]:
        return [entry.id for entry in self.armed]


def delays_on(url: str, **settings: Any) -> DelayTasks:
    """Return a `DelayTasks` with an in-memory broker."""
    app = Celery("test", broker="memory://", set_as_current=False)
    return DelayTasks(app, url, **settings)


def record(delays: DelayTasks) -> RecordingTimer:
    """Replace the timer of `delays` by a recording one."""
    timer = RecordingTimer()
    runtime_of(delays).producer._timer = timer
    return timer


def record_sweeps(runtime: Runtime, timer: RecordingTimer) -> None:
    """Replace the timer of the sweeps."""
    sweeper: Any = runtime.sweeper
    for part in (sweeper, sweeper._drain_requests, sweeper._pauses):
        part._timer = timer


def run_now(delays: DelayTasks, task: DelayTask) -> DelayTask:
    """Run the task in this process as if it was due, and return its row afterwards."""
    there = delays.get(task)
    moved = (
        delays.reschedule(task.id, 0)
        if there.expected_time > runtime_of(delays).clock.now()
        else there
    )
    delays.runner().run([Entry(moved.id, moved.version, 0)])
    return delays.get(task)
