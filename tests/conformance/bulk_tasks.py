"""What several suites of operations on many tasks use."""

from __future__ import annotations

from datetime import datetime, timezone

from delaytasks import BulkResult

NOON = datetime(2031, 1, 31, 12, tzinfo=timezone.utc)


def counts(result: BulkResult) -> tuple[int, int, int]:
    return result.matched, result.changed, result.refused
