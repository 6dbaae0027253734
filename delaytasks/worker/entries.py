"""The entries in a worker's main process.

`NearEntries` keeps those that are due soon, `ReadyEntries` those that are due and wait for a chunk,
and `WorkSender` sends back what the worker leaves to others.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from celery.utils.log import get_logger

from delaytasks.core.clock import Clock
from delaytasks.core.events import Events
from delaytasks.core.interfaces import Entry, Timer
from delaytasks.core.settings import Settings
from delaytasks.timers.timing_wheel import SharedWheel

if TYPE_CHECKING:
    from delaytasks.storage.sweep_queries import SweepQueries

logger = get_logger(__name__)


#: Producers and workers may have different horizons for a while.
HORIZON_TOLERANCE_S = 600.0


class NearEntries:
    """Keeps the entries in a timing wheel."""

    def __init__(self, settings: Settings, clock: Clock, events: Events) -> None:
        self._horizon_s = settings.horizon_s
        self._clock = clock
        self._events = events
        self.wheel: SharedWheel[Entry] = SharedWheel(clock)

    def hold(self, entries: Sequence[Entry]) -> list[Entry]:
        """Keep the entries until they are due; return those that are due now.

        After the wheel has closed, all entries are returned. Any thread may call this.
        """
        now = self._clock.now_us()
        if self._horizon_s is not None:
            # No timer arms what is due later: such a message is forged, or very old.
            latest = now + int((2 * self._horizon_s + HORIZON_TOLERANCE_S) * 1e6)
            if any(entry.due_us > latest for entry in entries):
                error = ValueError("an entry is far beyond the horizon")
                self._events.refuse("run", error)
                entries = [entry for entry in entries if entry.due_us <= latest]
        early = [entry for entry in entries if entry.due_us > now]
        if early:
            named = [((entry.id, entry.version), entry.due_us, entry) for entry in early]
            if not self.wheel.add(named):
                return list(entries)
        return [entry for entry in entries if entry.due_us <= now]


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


class UnfinishedWork(NamedTuple):
    """Entries, and queues that have more due rows in the table."""

    entries: list[Entry]
    #: The queues whose drains it had started, with their priorities (none if only their waitlists
    #: were served).
    queues: list[tuple[str, set[int]]]
    #: How many drain messages are sent for each queue; None means the setting `drain_messages`.
    messages: int | None = None


class WorkSender:
    """Sends unfinished work back to the timer, so that other workers get it in time."""

    def __init__(
        self, settings: Settings, timer: Timer, sweeps: SweepQueries, events: Events
    ) -> None:
        self._settings = settings
        self._timer = timer
        self._sweeps = sweeps
        self._events = events

    def send_back(self, work: UnfinishedWork) -> None:
        if work.entries:
            if self._timer.arm(work.entries):
                logger.info("delaytasks: sent back %d near tasks", len(work.entries))
            else:
                # The next sweep arms all near tasks again.
                self._events.attempt("stop", "forget", self._sweeps.forget_armed)
        messages = self._settings.drain_messages if work.messages is None else work.messages
        for queue, priorities in work.queues:
            self._timer.request_drain(queue, sorted(priorities), messages, self._settings.sweep_s)
