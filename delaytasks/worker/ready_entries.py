"""The entries that are due and wait for a chunk."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from operator import attrgetter

from delaytasks.core.interfaces import Entry

#: Waiting entries are sorted again if one in this many is new. Sorting for fewer takes too long.
SORTED_SHARE = 8
#: Due time and id, in the order in which rows were written, so that the rows of a chunk lie on few
#: pages. Entries come mixed, from several Redis slots or in several messages.
_WRITTEN_ORDER = attrgetter("due_us", "id")


class ReadyEntries:
    def __init__(self) -> None:
        self._by_priority: dict[int, deque[Entry]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_priority.values()))

    def add(self, entries: Sequence[Entry]) -> None:
        for entry in sorted(entries, key=_WRITTEN_ORDER):
            self._by_priority.setdefault(entry.priority, deque()).append(entry)
        for priority, count in Counter(entry.priority for entry in entries).items():
            ready = self._by_priority[priority]
            if count * SORTED_SHARE >= len(ready):
                self._by_priority[priority] = deque(sorted(ready, key=_WRITTEN_ORDER))

    def pop(self, count: int) -> list[Entry]:
        """Remove and return up to `count` entries, the oldest of the highest priority first."""
        popped: list[Entry] = []
        for priority in sorted(self._by_priority, reverse=True):
            ready = self._by_priority[priority]
            while ready and len(popped) < count:
                popped.append(ready.popleft())
            if not ready:
                del self._by_priority[priority]
        return popped

    def remove_late(self, before_us: int, wait_s: Callable[[str], float]) -> list[Entry]:
        """Remove and return the entries that were due before `before_us`.

        Those of a queue for which `wait_s` returns a time stay for so much longer.
        """
        removed: list[Entry] = []
        late_before: dict[str, float] = {}
        for ready in self._by_priority.values():
            kept: list[Entry] = []
            while ready and ready[0].due_us < before_us:
                entry = ready.popleft()
                if entry.queue not in late_before:
                    late_before[entry.queue] = before_us - wait_s(entry.queue) * 1e6
                is_late = entry.due_us < late_before[entry.queue]
                (removed if is_late else kept).append(entry)
            ready.extendleft(reversed(kept))
        return removed

    def clear(self) -> list[Entry]:
        """Remove and return all entries."""
        waiting = [entry for ready in self._by_priority.values() for entry in ready]
        self._by_priority.clear()
        return waiting
