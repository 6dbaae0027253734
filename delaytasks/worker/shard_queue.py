"""What waits in a worker for one shard: entries that fell due, and queues to be worked off from the table."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import NamedTuple

from delaytasks.core.clock import Clock, monotonic
from delaytasks.core.interfaces import Entry
from delaytasks.worker.job import Job
from delaytasks.worker.waitlists import Waitlists

#: After a chunk failed as a whole (the database is away) nothing of its shard is sent to the pool for this long.
REST_S = 1.0
#: A shard that owes an answer for longer is not asked by the pool.
SILENT_S = 2.0
#: A chunk that is under way for longer is a processor's, which takes its time.
LONG_S = 1.0
#: A chunk of a queue's backlog that takes longer is held up by a slow row: other processes look at that queue as well.
#: That is several time boxes, so that a quick chunk on a busy machine does not count as held up.
HELD_UP_S = 0.25
#: What is late belongs to the table, but where its queue has a backlog there it would come last: here it waits for so
#: much longer.
BACKLOG_S = 10.0
#: What waits is put in turn again when one in so many of it has just come: to sort it for fewer would take too long.
SORTED_SHARE = 8
#: By due time and id, as rows were written, so that those of a chunk lie on few pages: entries come from several slots
#: of Redis, or in several messages, side by side.
_IN_TURN = attrgetter("due_us", "id")


class Look(NamedTuple):
    """A chunk of a queue's backlog that is under way."""

    sent_at: float
    #: How often the queue had been asked for by then.
    asks: int


@dataclass
class QueueDrain:
    """A queue that is being worked off from the table: by one chunk at first, by all processes once the queue proves
    deep. A chunk that a slow row holds up says nothing about the queue, so that meanwhile other processes look: as many
    as are held up, which finds each process that is needed soon and costs an empty queue few claims."""

    priorities: set[int]
    #: The chunks that are under way, by number.
    looks: dict[int, Look] = field(default_factory=dict)
    is_deep: bool = False
    #: How often somebody asked: a chunk that was sent before the last time may have looked too early.
    asks: int = 0

    def wants_look(self) -> bool:
        began_after = monotonic() - HELD_UP_S
        quick = sum(look.sent_at > began_after for look in self.looks.values())
        return self.is_deep or quick < max(len(self.looks) - quick, 1)

    def held_up_in_s(self) -> float:
        """How soon another one of its chunks counts as held up."""
        now = monotonic()
        waits = (look.sent_at + HELD_UP_S - now for look in self.looks.values())
        return min((wait_s for wait_s in waits if wait_s >= 0), default=inf)


class ShardQueue:
    """Not thread-safe: the dispatcher's lock guards it.

    A lane with neighbours is careful for them. A shard that failed, or does not answer, gets no chunk until it has
    answered somebody who asks from a thread of its own; and as long as it is not sure that the shard answers, it
    leaves them one process of the pool.
    """

    def __init__(self, shard: int, clock: Clock, has_neighbours: bool) -> None:
        self.shard = shard
        self.clock = clock
        self._has_neighbours = has_neighbours
        self._asked_at: float | None = None
        self._failed_at = self._sent_at = 0.0
        self._answered_at = monotonic()
        self.is_down = False
        self._ready: dict[int, deque[Entry]] = {}
        self._drains: dict[str, QueueDrain] = {}
        self._drains_next = self._lines_next = False
        self.lines = Waitlists()
        self._rests_until = 0.0
        #: Start of each chunk in the pool, by the database's clock: leases are renewed for what began there.
        self.in_flight: dict[int, float] = {}
        #: By process: the ids of rows that run on, though their chunk is over.
        self.running_on: dict[int, Sequence[int]] = {}

    # -- in ---------------------------------------------------------------------------------------

    def take(self, entries: Sequence[Entry]) -> None:
        for entry in sorted(entries, key=_IN_TURN):
            self._ready.setdefault(entry.priority, deque()).append(entry)
        for priority, count in Counter(entry.priority for entry in entries).items():
            ready = self._ready[priority]
            if count * SORTED_SHARE >= len(ready):
                self._ready[priority] = deque(sorted(ready, key=_IN_TURN))

    def ask(self, queue: str, priorities: Iterable[int]) -> None:
        """To claim what is overdue in `queue`."""
        drain = self._drains.setdefault(queue, QueueDrain(set()))
        drain.priorities.update(priorities)
        drain.asks += 1

    def drop_late(self, grace_s: float) -> int:
        """What is late belongs to the table, where every worker helps. Returns how many were."""
        late_before, dropped = self.clock.now_us() - int(grace_s * 1e6), 0
        for priority, ready in self._ready.items():
            kept: list[Entry] = []
            while ready and ready[0].due_us < late_before:
                entry = ready.popleft()
                if entry.due_us < late_before - self.backlog_s(entry.queue) * 1e6:
                    self.ask(entry.queue, (priority,))
                    dropped += 1
                else:
                    kept.append(entry)
            ready.extendleft(reversed(kept))
        return dropped

    def backlog_s(self, queue: str) -> float:
        """How much longer what is late waits here."""
        drain = self._drains.get(queue)
        return BACKLOG_S if drain is not None and drain.is_deep else 0.0

    def clear(self) -> list[Entry]:
        waiting = [entry for queue in self._ready.values() for entry in queue]
        self._ready.clear()
        self._drains.clear()
        self.lines.clear()
        return waiting

    @property
    def unfinished(self) -> dict[str, set[int]]:
        """By queue, the priorities of what is being worked off from the table; none where it is lines only."""
        priorities: dict[str, set[int]] = {queue: set() for queue in self.lines.queues}
        return priorities | {queue: drain.priorities for queue, drain in self._drains.items()}

    @property
    def drains(self) -> int:
        """How many queues are being worked off from the table, or wait for their turn."""
        return len(self._drains)

    @property
    def is_busy(self) -> bool:
        return bool(self.in_flight or self._ready or self._drains or self.lines.is_wanted)

    @property
    def waiting(self) -> int:
        return sum(map(len, self._ready.values()))

    def began_within(self, seconds: float) -> int:
        """How many chunks began lately."""
        since = self.clock.now_us() - seconds * 1e6
        return sum(began > since for began in self.in_flight.values())

    # -- out --------------------------------------------------------------------------------------

    def is_open(self) -> bool:
        if not self._has_neighbours:
            return monotonic() >= self._rests_until
        return (
            monotonic() >= self._rests_until
            and self._failed_at < self._answered_at
            and not self.is_silent()
        )

    def may_take_last(self) -> bool:
        """Of the pool's processes, when all others have chunks of this lane."""
        return not self._has_neighbours or self._answered_at > self._sent_at + LONG_S

    def sent(self, number: int) -> None:
        self._sent_at = monotonic()
        self.in_flight[number] = self.clock.now_us()

    def failed(self) -> None:
        self._failed_at = monotonic()
        self._rests_until = self._failed_at + REST_S

    def left(self, pid: int, ids: Sequence[int]) -> None:
        """Rows that run on in a process whose chunk is over."""
        if ids:
            self.running_on[pid] = ids
        else:
            self.running_on.pop(pid, None)

    # -- the shard --------------------------------------------------------------------------------

    def is_in_doubt(self) -> bool:
        """Whether somebody should ask the shard: nobody has to while nothing waits for it."""
        return (
            bool(self.in_flight or self._ready or self._drains or self.lines) or not self.is_open()
        )

    def asked(self) -> None:
        if self._asked_at is None:
            self._asked_at = monotonic()

    def answered(self) -> None:
        self._asked_at = None
        self._answered_at = monotonic()

    def is_silent(self) -> bool:
        return self._asked_at is not None and monotonic() - self._asked_at > SILENT_S

    def held_up_in_s(self) -> float:
        """How soon it may have another chunk because one of a backlog takes long."""
        return (
            min((drain.held_up_in_s() for drain in self._drains.values()), default=inf)
            if self.is_open()
            else inf
        )

    def next_job(
        self, number: int, size: int, free: int, sends_events: bool, least: int = 1
    ) -> Job | None:
        """The chunk `number`, of at most `size` rows; `free` processes share what waits, though not by less than
        `least`."""
        waiting = self.waiting
        # When both wait they take turns: neither a backlog nor a stream of fresh tasks starves the other.
        if self._drains_next or not waiting:
            job = self._next_slow(number, size, sends_events)
            if job is not None:
                self._drains_next = False
                return job
        if not waiting:
            return None
        self._drains_next = True
        ready = tuple(self._take_ready(min(size, max(-(-waiting // free), least))))
        return Job(ready, events=sends_events, shard=self.shard)

    def _next_slow(self, number: int, size: int, sends_events: bool) -> Job | None:
        """What comes straight from the table: lines and queues in turn."""
        self._lines_next = not self._lines_next
        if self._lines_next and (job := self._next_line(size, sends_events)) is not None:
            return job
        for queue, drain in self._drains.items():
            if drain.wants_look():
                drain.looks[number] = Look(monotonic(), drain.asks)
                self._drains[queue] = self._drains.pop(queue)  # the next one's turn comes first
                return Job((), queue, tuple(drain.priorities), size, sends_events, self.shard)
        return self._next_line(size, sends_events)

    def _next_line(self, size: int, sends_events: bool) -> Job | None:
        turn = self.lines.next()
        if turn is None:
            return None
        line, is_look = turn
        return Job(
            (), limit=size, events=sends_events, shard=self.shard, line=line, is_look=is_look
        )

    def _take_ready(self, count: int) -> list[Entry]:
        taken: list[Entry] = []
        for priority in sorted(self._ready, reverse=True):
            queue = self._ready[priority]
            while queue and len(taken) < count:
                taken.append(queue.popleft())
            if not queue:
                del self._ready[priority]
        return taken

    def drained(
        self, number: int, queue: str, priorities: Sequence[int], is_full: bool, is_open: bool
    ) -> None:
        """A chunk of it ended."""
        drain = self._drains.get(queue)
        if drain is None and is_full and is_open:
            drain = self._drains[queue] = QueueDrain(set(priorities))
        if drain is None:
            return
        look = drain.looks.pop(number, None)
        if is_full:
            drain.is_deep = True
        elif look is None:
            pass  # it began before the queue was found empty and asked for anew
        elif drain.asks > look.asks:
            drain.is_deep = False
        else:
            del self._drains[queue]

    def failed_to_drain(self, number: int, queue: str, is_down: bool) -> None:
        """A chunk of it failed. When the database is away, the next sweep's token begins anew. When its process died,
        other processes go on."""
        if is_down:
            self._drains.pop(queue, None)
        elif (drain := self._drains.get(queue)) is not None:
            drain.looks.pop(number, None)
