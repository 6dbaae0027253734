"""A failed attempt to run a task."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple


class Attempt(NamedTuple):
    """A failed run of a task.

    Attributes
    ----------
    number
        The number of the run, from 1.
    began, ended
        The start, if it is known, and the end.
    worker
        The name of the worker.
    error
        The traceback, or the reason that the processor returned.

    Examples
    --------
    >>> [(attempt.number, attempt.ended) for attempt in delays.attempts(task)]
    """

    number: int
    began: datetime | None
    ended: datetime
    worker: str | None
    error: str | None

    def as_json(self) -> dict[str, Any]:
        return {
            **self._asdict(),
            "began": self.began and self.began.isoformat(),
            "ended": self.ended.isoformat(),
        }
