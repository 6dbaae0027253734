"""A monotonic clock that a test sets."""

from __future__ import annotations


class ManualMonotonic:
    """Replaces `time.monotonic`."""

    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at
