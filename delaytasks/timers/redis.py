"""The `redis` timer: near tasks wait in sorted sets of Redis, where every worker sees them, and movers in the workers
take what falls due."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

from delaytasks.core.clock import Clock, monotonic
from delaytasks.core.events import Events
from delaytasks.core.ids import MAX_ID, shard_of
from delaytasks.core.inputs import MAX_PRIORITY, is_queue
from delaytasks.core.interfaces import Entry
from delaytasks.core.settings import Settings
from delaytasks.timers.eta import EtaTimer
from delaytasks.timers.redis_link import RedisLink, call, execute, is_wrong_type
from delaytasks.timers.redis_location import RedisLocation
from delaytasks.timers.redis_scripts import ARM, BATCH_ROWS, TAKE

#: What a mover took and has not handed on for so long goes back: the mover is dead.
RETURN_S = 2.0
#: Movers take entries so long before they are due, and wait for the rest of the time themselves: nothing has to be
#: brought at the moment when it is due.
AHEAD_MS = 100
#: It is told so often that a slot's key is something else.
BLOCKED_S = 60.0
#: A member and its score, as TAKE answers; of no more digits than the table's columns can hold.
_ENTRY = re.compile(
    rb"(?<!\S)(\d{1,19}):(\d{1,18})(?::(-?\d{1,4}))? (\d{1,14}(?:\.\d{1,9})?)(?!\S)"
)


class Slot(NamedTuple):
    """A part of a queue's near tasks; in a cluster each may be on another node. Ordinary ones are spread by their ids;
    those of a higher priority have a slot of their own, which is emptied first."""

    queue: str
    name: str
    priority: int = 0


class Taken(NamedTuple):
    """What a mover has to hand on; then it is deleted by its ticket."""

    slot: Slot
    entries: list[Entry]
    #: The score of its entries in `prepare`, which no other taking has; 0 if there is nothing.
    ticket: float
    #: Entries that were not of our form.
    refused: int
    #: How many were too late, and their priorities: the table's business.
    dropped: int
    priorities: list[int]
    #: How many another mover had taken and not handed on.
    returned: int
    #: The slot was empty in a way that it never is: Redis lost it.
    was_lost: bool
    #: When there is something to take next, in milliseconds; infinite if there is nothing.
    next_ms: float


class RedisTimer:
    """Thread-safe. What fails is not tried again: the database is the truth."""

    def __init__(
        self,
        place: RedisLocation,
        settings: Settings,
        eta: EtaTimer,
        clocks: Sequence[Clock],
        events: Events,
    ) -> None:
        self.link = RedisLink(place, settings.publish_limit_s, events)
        self._settings = settings
        self._eta = eta
        #: Of each shard's database; slots go by the first one.
        self._clocks = clocks
        self._slots: dict[str, list[Slot]] = {}
        self._events = events
        #: Makes tickets unique: this process numbers the takings of a millisecond, and other processes begin at another
        #: number. A taking whose entries were all armed again leaves its ticket free in Redis; if another taking got
        #: the same ticket, the first mover's late deletion would delete what the second one took.
        self._takings = itertools.count(random.randrange(1000))
        self._blocked_told_at = float("-inf")

    @property
    def is_up(self) -> bool:
        return self.link.is_up

    # -- where things are -------------------------------------------------------------------------

    def slots(self, queue: str) -> list[Slot]:
        found = self._slots.get(queue)
        if found is None:
            found = [Slot(queue, str(number)) for number in range(self._settings.redis_slots)]
            found += [
                Slot(queue, f"p{priority}", priority) for priority in range(1, MAX_PRIORITY + 1)
            ]
            self._slots[queue] = found
        return found

    def slot(self, entry: Entry) -> Slot:
        slots = self._slots.get(entry.queue) or self.slots(entry.queue)
        if entry.priority > 0:
            return slots[min(entry.priority, MAX_PRIORITY) - 1 - MAX_PRIORITY]
        return slots[crc32(b"%d" % entry.id) & self._settings.redis_slots - 1]

    def keys(self, slot: Slot) -> tuple[str, str]:
        """Of what waits and of what is on its way. In a cluster one hash tag keeps both on one node."""
        tag = f"{{{self._settings.namespace}.{slot.queue}.{slot.name}}}"
        return f"{tag}.store", f"{tag}.prepare"

    def channel(self, queue: str) -> str:
        """Where movers hear of entries that are due before all others of their slot."""
        return f"{self._settings.namespace}.{queue}.earlier"

    def _by_slot(self, entries: Iterable[Entry]) -> dict[Slot, list[Entry]]:
        found: dict[Slot, list[Entry]] = {}
        for entry in entries:
            # Others are another program's: no worker would take them, and the table has their rows.
            if entry.id > 0 and entry.version >= 0 and entry.due_us >= 0 and is_queue(entry.queue):
                found.setdefault(self.slot(entry), []).append(entry)
        return found

    def shifted(self, entries: Iterable[Entry], sign: int) -> Iterable[Entry]:
        """Due by the first shard's clock (1) instead of their own one's, or the other way round (-1)."""
        if len(self._clocks) == 1:
            return entries
        now_us = self._clocks[0].now_us()
        ahead_us = {
            number: sign * (now_us - clock.now_us()) for number, clock in enumerate(self._clocks)
        }
        return [
            entry._replace(due_us=entry.due_us + ahead_us.get(shard_of(entry.id), 0))
            for entry in entries
        ]

    # -- the timer --------------------------------------------------------------------------------

    def arm(self, entries: Iterable[Entry]) -> bool:
        slots = self._by_slot(self.shifted(entries, 1))

        def work(client: Any) -> bool:
            pipe, asked = client.pipeline(transaction=False), []
            for slot, some in slots.items():
                some.sort(key=lambda entry: entry.due_us)
                for start in range(0, len(some), BATCH_ROWS):
                    words: list[Any] = [self.channel(slot.queue), slot.name]
                    for entry in some[start : start + BATCH_ROWS]:
                        words += (entry.due_us / 1000, _member(entry))
                    pipe.execute_command(*call(client, ARM), 2, *self.keys(slot), *words)
                    asked.append(slot)
            return not self._tell_blocked(asked, execute(pipe))

        return not slots or bool(self.link.attempt(work))

    def disarm(self, entries: Iterable[Entry]) -> None:
        slots = self._by_slot(entries)

        def work(client: Any) -> bool:
            pipe = client.pipeline(transaction=False)
            for slot, some in slots.items():
                for key in self.keys(slot):
                    pipe.zrem(key, *map(_member, some))
            execute(pipe)
            return True

        if slots:
            self.link.attempt(work)

    def drain(
        self, queue: str, priorities: Sequence[int], tokens: int, expires_s: float, shard: int = 0
    ) -> bool:
        return self._eta.drain(queue, priorities, tokens, expires_s, shard)

    # -- for movers -------------------------------------------------------------------------------

    def take(
        self,
        most: Mapping[Slot, int],
        handed_on: Iterable[Taken] = (),
        grace_of: Callable[[str], float] | None = None,
    ) -> list[Taken] | None:
        """What is due in each slot or is soon to be, so many entries at most: they are this mover's until it has handed
        them on, or RETURN_S is over. What it has handed on is deleted, and so is what is later than the grace of its
        queue. None while Redis is away."""
        now_us = self._clocks[0].now_us()
        now = now_us / 1000  # to the microsecond, as movers wake for it

        def work(client: Any) -> list[Taken]:
            pipe = client.pipeline(transaction=False)
            for slot, count in most.items():
                grace_s = self._settings.grace_s if grace_of is None else grace_of(slot.queue)
                ticket = int(now) + RETURN_S * 1000 - next(self._takings) % 1000 / 1000
                times = now, int(now) - int(grace_s * 1000), now + AHEAD_MS, ticket
                pipe.execute_command(
                    *call(client, TAKE), 2, *self.keys(slot), *times, min(count, BATCH_ROWS)
                )
            for some in handed_on:
                pipe.zremrangebyscore(self.keys(some.slot)[1], some.ticket, some.ticket)
            answers = execute(pipe)
            self._tell_blocked(most, answers)
            pairs = zip(most, answers, strict=False)
            taken = [_taken(slot, answer) for slot, answer in pairs if not is_wrong_type(answer)]
            return [some._replace(entries=list(self.shifted(some.entries, -1))) for some in taken]

        return self.link.attempt(work)

    def _tell_blocked(self, slots: Iterable[Slot], answers: Iterable[Any]) -> bool:
        """Whether somebody has put something else in a slot's place. What is ours there is left to the sweep."""
        blocked = [
            slot for slot, answer in zip(slots, answers, strict=False) if is_wrong_type(answer)
        ]
        if blocked and monotonic() > self._blocked_told_at + BLOCKED_S:
            self._blocked_told_at = monotonic()
            for slot in blocked:
                keys = " or ".join(self.keys(slot))
                remedy = f"delete {keys}, whichever is no sorted set; until then the sweep sends what is due"
                self._events.emit("timer.blocked", key=keys, remedy=remedy)
        return bool(blocked)

    def listen(self, queues: Iterable[str]) -> Any:
        """A subscription to what is armed in these queues before all that waits."""
        listener = self.link.connect().pubsub(ignore_subscribe_messages=True)
        listener.subscribe(*map(self.channel, queues))
        return listener

    # -- for people -------------------------------------------------------------------------------

    def counts(self, queues: Sequence[str]) -> dict[str, tuple[int, int]] | None:
        """By queue: how many entries wait, and how many are on their way. None while Redis is away."""

        def work(client: Any) -> dict[str, tuple[int, int]]:
            pipe = client.pipeline(transaction=False)
            for queue in queues:
                for slot in self.slots(queue):
                    for key in self.keys(slot):
                        pipe.zcount(key, "-inf", "(+inf")
            numbers = iter(0 if is_wrong_type(answer) else answer for answer in execute(pipe))
            pairs = {
                queue: [(next(numbers), next(numbers)) for _ in self.slots(queue)]
                for queue in queues
            }
            return {
                queue: (sum(p[0] for p in both), sum(p[1] for p in both))
                for queue, both in pairs.items()
            }

        return self.link.attempt(work)


def _member(entry: Entry) -> str:
    return (
        f"{entry.id}:{entry.version}:{entry.priority}"
        if entry.priority
        else f"{entry.id}:{entry.version}"
    )


def _taken(slot: Slot, answer: Any) -> Taken:
    was_lost, returned, dropped, levels, ticket, text, waiting, prepared = answer
    entries = [
        Entry(number, int(version), round(float(due_ms) * 1000), slot.queue, int(priority or 0))
        for id, version, priority, due_ms in _ENTRY.findall(text)
        if 0 < (number := int(id)) <= MAX_ID
    ]
    return Taken(
        slot,
        entries,
        float(ticket),
        len(text.split()) // 2 - len(entries),
        dropped,
        [int(level) for level in levels.split()],
        returned,
        bool(was_lost),
        min(float(waiting) - AHEAD_MS, float(prepared)),
    )
