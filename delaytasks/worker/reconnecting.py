"""A worker's connection to its broker, found again soon after the broker is back."""

from __future__ import annotations

from typing import Any

from kombu.connection import Connection

#: Celery's own pauses before it tries again grow by two seconds, to half a minute.
_CELERYS_STEP_S, _CELERYS_LONGEST_S = 2, 30
LONGEST_PAUSE_S = 4


class SoonReconnected(Connection):
    def ensure_connection(self, errback: Any = None, max_retries: int | None = None, **options: Any) -> Any:
        """Tries every few seconds, and gives up when Celery would have after so many retries with its longer pauses."""
        if max_retries is not None:
            options["timeout"] = sum(min(_CELERYS_STEP_S * n, _CELERYS_LONGEST_S) for n in range(1, max_retries + 1))
        return super().ensure_connection(errback, None, interval_max=LONGEST_PAUSE_S, **options)
