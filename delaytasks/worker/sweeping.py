"""Sweeps in a thread of the worker's main process, never behind busy pool processes: when beat's message asks for
it, or when nobody swept for a while."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from delaytasks.core.clock import monotonic
from delaytasks.worker.loop import Loop

if TYPE_CHECKING:
    from delaytasks.app import DelayTasks


class Sweeping:
    def __init__(self, delays: DelayTasks, worker: Any) -> None:
        self._delays = delays
        self._worker = worker
        self._lock = threading.Lock()
        self._asked: set[int] = set()
        self._forgets = False
        self._seen_at = self._checked_at = float("-inf")
        self._started_at = monotonic()
        self._loop = Loop("sweep", min(delays.settings.sweep_s, 1.0), self._turn, delays.events)
        self.start = self._loop.start

    def request(self, house: int | None) -> None:
        with self._lock:
            self._asked.update(range(self._delays.settings.houses) if house is None else [house])
        self._loop.wake()

    def forget(self) -> None:
        """The broker was away: what waited in it may be lost, and is armed again by the next sweep."""
        self._forgets = True
        self._loop.wake()

    def stop(self) -> None:
        self._loop.stop()
        try:
            self._delays.store.workers.gone(self._worker.hostname)
        except Exception as error:
            self._delays.events.emit("loop.failed", loop="sweep", error=str(error))

    def _turn(self) -> None:
        delays, settings = self._delays, self._delays.settings
        if monotonic() - self._seen_at >= settings.sweep_s:
            self._seen_at = monotonic()
            delays.store.workers.seen(
                self._worker.hostname,
                delays.processes.queues,
                type(self._worker.pool).__module__.rpartition(".")[2],
                int(self._worker.pool.limit or 1),
                int(delays.clock.offset_s * 1e6),
            )
        if self._forgets:
            delays.store.sweeps.forget_armed()
            self._forgets = False
        with self._lock:
            asked, self._asked = self._asked, set()
        for house in sorted(asked):
            delays.sweeper.sweep(house)
        if monotonic() - self._checked_at >= settings.self_sweep_s / 2:
            self._checked_at = monotonic()
            for house in delays.store.sweeps.stale_houses(settings.houses, settings.self_sweep_s):
                if monotonic() - self._started_at > settings.self_sweep_s:
                    delays.events.emit("sweep.self", house=house, remedy="is celery beat running?")
                delays.sweeper.sweep(house)
