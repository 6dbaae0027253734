"""Tasks that failed without having been run to an end: their workers died under them, again and again. No process is
left to say so, hence the main process of the worker that let them lapse does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from delaytasks.worker.task_events import TaskEvents


class WorkerLostFailures:
    """A subscriber of `Events`, for the monitors that see rows as tasks."""

    def __init__(self, rows: TaskEvents, sends_events: Callable[[], bool]) -> None:
        self._rows = rows
        self._sends_events = sends_events

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        if name == "task.worker_lost" and self._sends_events():
            self._rows.gave_up(fields["task"])
            self._rows.flush()
