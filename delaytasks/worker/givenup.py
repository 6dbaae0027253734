"""Tasks that failed without having been run to an end: their workers died under them, again and again. No process is
left to say so, hence the main process of a worker that let them lapse does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from delaytasks.worker.rowevents import RowEvents

if TYPE_CHECKING:
    from delaytasks.app import DelayTasks

#: The database's clock as we know it may be wrong by less.
SLACK = timedelta(seconds=1)


class GivenUp:
    """A subscriber of `Events`: rows lapsed, so some of them may have been given up."""

    def __init__(self, delays: DelayTasks, rows: RowEvents, sends_events: Callable[[], bool]) -> None:
        self._delays = delays
        self._rows = rows
        self._sends_events = sends_events
        self._lock = threading.Lock()
        self._looked_at = delays.clock.now()
        self._told: set[tuple[int, int]] = set()

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        if name == "task.lapsed":
            with self._lock:
                self._look()

    def _look(self) -> None:
        now = self._delays.clock.now()
        found = self._delays.store.leases.given_up(self._looked_at - SLACK)
        for task in found:
            if (task.id, task.version) in self._told:
                continue
            self._delays.events.emit("task.gave_up", id=task.id, tag=task.tag, error=task.error or "")
            if self._sends_events():
                self._rows.gave_up(task)
        self._rows.flush()
        self._told = {(task.id, task.version) for task in found}
        self._looked_at = now
