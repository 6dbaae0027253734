"""A timer that remembers what it was given, and a `DelayTasks` on it: what was sent can be counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from celery import Celery

from delaytasks import DelayTask, DelayTasks
from delaytasks.core.interfaces import Entry


class RecordingTimer:
    def __init__(self) -> None:
        self.armed: list[Entry] = []
        self.disarmed: list[Entry] = []
        self.drained: list[tuple[str, list[int], int]] = []
        self.is_up = True

    def arm(self, entries: Iterable[Entry]) -> bool:
        self.armed += entries if self.is_up else ()
        return self.is_up

    def disarm(self, entries: Iterable[Entry]) -> None:
        self.disarmed += entries

    def drain(
        self, queue: str, priorities: Sequence[int], tokens: int, expires_s: float, shard: int = 0
    ) -> bool:
        self.drained.append((queue, list(priorities), tokens))
        return self.is_up

    @property
    def ids(self) -> list[int]:
        return [entry.id for entry in self.armed]


def delays_on(url: str | Sequence[str], **settings: Any) -> DelayTasks:
    """On a broker in memory."""
    app = Celery("test", broker="memory://", set_as_current=False)
    return DelayTasks(app, url, **settings)


def record(delays: DelayTasks) -> RecordingTimer:
    """From now on `delays` arms this timer."""
    timer = RecordingTimer()
    for shard in delays.shards:
        shard.producer._timer = timer
    return timer


def run_now(delays: DelayTasks, task: DelayTask) -> DelayTask:
    """As if its time had come, in this process; as it is afterwards."""
    there = delays.get(task)
    moved = delays.reschedule(task.id, 0) if there.expected_time > delays.clock.now() else there
    delays.runner().run([Entry(moved.id, moved.version, 0)])
    return delays.get(task)
