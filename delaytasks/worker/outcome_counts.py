"""Counts the outcomes of the tasks of one process, for the report of each chunk."""

from __future__ import annotations

from collections import Counter
from typing import Any

#: The events that are counted, and for which of them each tag is counted.
_COUNTED = {"task.succeeded": False, "task.failed": False, "task.no_processor": True}


class OutcomeCounts:
    """Counts the outcomes of tasks. A subscriber of the events of one process."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        counts_tags = _COUNTED.get(name)
        if counts_tags is not None:
            self._counts[name, fields["tag"] if counts_tags else ""] += fields.get("count", 1)

    def take(self) -> tuple[tuple[str, str, int], ...]:
        counts, self._counts = self._counts, Counter()
        return tuple((name, tag, count) for (name, tag), count in counts.items())
