"""What became of the tasks of chunks, counted in the processes that ran them, for who wants to tell of all."""

from __future__ import annotations

from collections import Counter
from typing import Any

#: The events that are counted; of some also for which tags.
_COUNTED = {"task.succeeded": False, "task.failed": False, "task.no_processor": True}
Counts = tuple[tuple[str, str, int], ...]


class Counting:
    """Subscribed to the events of one process."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        names_tag = _COUNTED.get(name)
        if names_tag is not None:
            self._counts[name, fields["tag"] if names_tag else ""] += fields.get("count", 1)

    def take(self) -> Counts:
        """(event, tag, how many) since this was asked last."""
        counts, self._counts = self._counts, Counter()
        return tuple((name, tag, count) for (name, tag), count in counts.items())
