"""The `redis` timer: tasks wait in sorted sets of Redis, from which the workers' Redis pollers take
them.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

from delaytasks.core.clock import Clock, monotonic
from delaytasks.core.events import Events
from delaytasks.core.filters import batches
from delaytasks.core.ids import MAX_ID
from delaytasks.core.inputs import MAX_PRIORITY
from delaytasks.core.interfaces import Entry, by_queue
from delaytasks.core.settings import Settings
from delaytasks.timers.eta import EtaTimer
from delaytasks.timers.redis_link import RedisLink, call, execute, is_wrong_type
from delaytasks.timers.redis_location import RedisLocation
from delaytasks.timers.redis_scripts import ARM, MAX_ENTRIES, TAKE

#: An entry that a poller took and did not hand on within this time returns: the poller has died.
RETURN_S = 2.0
#: Pollers take entries this long before they are due, and keep them until then. No entry travels at
#: the moment when it is due.
AHEAD_MS = 100
#: The event about a slot whose key has another type is emitted at most this often.
BLOCKED_EVENT_S = 60.0
#: A member and its score in an answer of `TAKE`. The table's columns cannot store more digits.
_ENTRY = re.compile(
    rb"(?<!\S)(\d{1,19}):(\d{1,18})(?::(-?\d{1,4}))? (\d{1,14}(?:\.\d{1,9})?)(?!\S)"
)


class Slot(NamedTuple):
    """A part of the entries of a queue. In a cluster each slot may be on another node.

    Entries without a priority are distributed by their ids. Each higher priority has a slot of its
    own, which is emptied first.
    """

    queue: str
    name: str
    priority: int = 0


class Taken(NamedTuple):
    """The result of `take`. The poller hands the entries on, and deletes them by the ticket."""

    slot: Slot
    entries: list[Entry]
    #: The score of the entries in `prepare`, which no other call has; 0 without entries.
    ticket: float
    #: The number of malformed entries.
    refused: int
    #: The number of entries that were too late, and their priorities. The table has their rows.
    dropped: int
    priorities: list[int]
    #: The number of entries that another poller had taken and not handed on.
    returned: int
    #: Whether Redis had lost the slot.
    was_lost: bool
    #: The time of the next entry in milliseconds, or infinity.
    next_ms: float


class RedisTimer:
    """Thread-safe. A call that fails is not repeated, since the sweep finds the rows."""

    def __init__(
        self,
        location: RedisLocation,
        settings: Settings,
        eta: EtaTimer,
        clock: Clock,
        events: Events,
    ) -> None:
        self.link = RedisLink(location, settings.publish_limit_s, events)
        self._settings = settings
        self._eta = eta
        self._clock = clock
        self._slots: dict[str, list[Slot]] = {}
        self._events = events
        #: Makes tickets unique: this process numbers the calls of a millisecond, and other
        #: processes begin at another number. If all entries of a call are armed again, its ticket
        #: is free in Redis. If another call got the same ticket, the late deletion of the first
        #: poller would delete the entries of the second one.
        self._ticket_numbers = itertools.count(random.randrange(1000))
        self._blocked_event_at = float("-inf")

    @property
    def is_up(self) -> bool:
        return self.link.is_up

    # -- keys -------------------------------------------------------------------------------------

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
        """Return the keys of `store` and `prepare`. Their hash tag keeps both on one node."""
        tag = f"{{{self._settings.namespace}.{slot.queue}.{slot.name}}}"
        return f"{tag}.store", f"{tag}.prepare"

    def channel(self, queue: str) -> str:
        """Return the channel that announces entries which are due first in their slot."""
        return f"{self._settings.namespace}.{queue}.earlier"

    def _by_slot(self, entries: Iterable[Entry]) -> dict[Slot, list[Entry]]:
        found: dict[Slot, list[Entry]] = {}
        for queued in by_queue(entries).values():
            for entry in queued:
                found.setdefault(self.slot(entry), []).append(entry)
        return found

    # -- the timer --------------------------------------------------------------------------------

    def arm(self, entries: Iterable[Entry]) -> bool:
        slots = self._by_slot(entries)

        def work(client: Any) -> bool:
            pipe, asked = client.pipeline(transaction=False), []
            for slot, some in slots.items():
                some.sort(key=lambda entry: entry.due_us)
                for batch in batches(some, MAX_ENTRIES):
                    words: list[Any] = [self.channel(slot.queue), slot.name]
                    for entry in batch:
                        words += (entry.due_us / 1000, _member(entry))
                    pipe.execute_command(*call(client, ARM), 2, *self.keys(slot), *words)
                    asked.append(slot)
            return not self._report_blocked(asked, execute(pipe))

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

    def request_drain(
        self, queue: str, priorities: Sequence[int], messages: int, expires_s: float
    ) -> bool:
        return self._eta.request_drain(queue, priorities, messages, expires_s)

    # -- for Redis pollers ------------------------------------------------------------------------

    def take(
        self,
        most: Mapping[Slot, int],
        handed_on: Iterable[Taken] = (),
        grace_of: Callable[[str], float] | None = None,
    ) -> list[Taken] | None:
        """Take the entries of each slot that are due, or will be within `AHEAD_MS`.

        `most` limits the number of entries by slot. The entries of `handed_on`, the results of
        earlier calls, are deleted, and so are entries that are later than `grace_of` their queue.
        The caller owns the entries until it hands them on, or for `RETURN_S`. None if Redis is
        unavailable.
        """
        now_us = self._clock.now_us()
        now = now_us / 1000  # pollers wake to the microsecond

        def work(client: Any) -> list[Taken]:
            pipe = client.pipeline(transaction=False)
            for slot, count in most.items():
                grace_s = self._settings.grace_s if grace_of is None else grace_of(slot.queue)
                ticket = int(now) + RETURN_S * 1000 - next(self._ticket_numbers) % 1000 / 1000
                times = now, int(now) - int(grace_s * 1000), now + AHEAD_MS, ticket
                pipe.execute_command(
                    *call(client, TAKE), 2, *self.keys(slot), *times, min(count, MAX_ENTRIES)
                )
            for some in handed_on:
                pipe.zremrangebyscore(self.keys(some.slot)[1], some.ticket, some.ticket)
            answers = execute(pipe)
            self._report_blocked(most, answers)
            pairs = zip(most, answers, strict=False)
            return [_taken(slot, answer) for slot, answer in pairs if not is_wrong_type(answer)]

        return self.link.attempt(work)

    def _report_blocked(self, slots: Iterable[Slot], answers: Iterable[Any]) -> bool:
        """Return whether the key of a slot has another type. The sweep finds the rows of such a
        slot.
        """
        blocked = [
            slot for slot, answer in zip(slots, answers, strict=False) if is_wrong_type(answer)
        ]
        if blocked and monotonic() > self._blocked_event_at + BLOCKED_EVENT_S:
            self._blocked_event_at = monotonic()
            for slot in blocked:
                keys = " or ".join(self.keys(slot))
                remedy = (
                    f"delete the key that is not a sorted set ({keys}); until then the sweep sends "
                    "the tasks that are due"
                )
                self._events.emit("timer.blocked", key=keys, remedy=remedy)
        return bool(blocked)

    def listen(self, queues: Iterable[str]) -> Any:
        """Return a subscription to the channels of these queues."""
        listener = self.link.connect().pubsub(ignore_subscribe_messages=True)
        listener.subscribe(*map(self.channel, queues))
        return listener

    # -- statistics -------------------------------------------------------------------------------

    def counts(self, queues: Sequence[str]) -> dict[str, tuple[int, int]] | None:
        """Return, by queue, the numbers of waiting and of taken entries; None if Redis is down."""

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
    name = f"{entry.id}:{entry.version}"
    return f"{name}:{entry.priority}" if entry.priority else name


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
