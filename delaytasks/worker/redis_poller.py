"""Brings what falls due from Redis to this worker: it takes no more than the dispatcher has room for, so that a burst
spreads over all workers by itself."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING

from delaytasks.core.availability import REST_S
from delaytasks.core.clock import monotonic
from delaytasks.core.loop import Loop
from delaytasks.timers.redis import AHEAD_MS, RETURN_S, RedisTimer, Slot, Taken
from delaytasks.timers.redis_location import FAILURES
from delaytasks.timers.redis_scripts import BATCH_ROWS

if TYPE_CHECKING:
    from delaytasks.worker.runtime import WorkerRuntime

#: All slots are looked at so often, whatever was or was not said: a message may be lost, a worker may die.
LOOK_S = 15.0
#: How often the ear looks whether the queues have changed.
LISTEN_S = 1.0
#: What was handed on is deleted on the way to what comes next, or after this time: well before it would be returned.
DELETE_S = RETURN_S / 4
NEVER, LOOK_NOW = float("inf"), 0.0
#: Each step of theirs is bounded by its socket.
STUCK_S = 5.0


class RedisPoller:
    """One loop that rests until shortly before the next entry is due, as far as it knows, and until there is room for
    it; another one hears of what comes before that."""

    def __init__(self, timer: RedisTimer, runtime: WorkerRuntime) -> None:
        self._timer = timer
        self._runtime = runtime
        self._dispatcher = runtime.dispatcher
        self._dispatcher.on_room = self._has_room
        self._clock = runtime.delays.clock
        self._events = runtime.delays.events
        self._processes = runtime.delays.processes
        self._lock = threading.Lock()
        #: When there is something to take from each slot, in milliseconds.
        self._next: dict[Slot, float] = {}
        #: When what was taken ahead of its time is due, in microseconds of our clock.
        self._ahead: list[int] = []
        self._queues: list[str] = []
        #: To be deleted in Redis, and when at the latest.
        self._handed_on: list[Taken] = []
        self._deletes_at = 0.0
        self._looks_at = 0.0
        self._is_starved = self._was_down = False
        self._redis_poller = Loop("mover", self._move, self._events, STUCK_S, self._start_over)
        self._listener = Loop("ear", self._hear, self._events, STUCK_S, self._start_over)
        self.loops = [self._redis_poller, self._listener]

    def stop(self) -> None:
        """Waits until what was taken is handed on. The ear ends by itself."""
        self._listener.stop(0)
        self._redis_poller.stop()
        self._timer.take({}, self._handed_on)

    # -- move -------------------------------------------------------------------------------------

    def _move(self) -> float:
        asked, rest_s = self._due()
        if not asked:
            deletes_in_s = self._deletes_at - monotonic() if self._handed_on else NEVER
            if deletes_in_s > 0:
                return min(rest_s, deletes_in_s)
        handed_on, self._handed_on = self._handed_on, []
        try:
            taken = self._timer.take(asked, handed_on, self._dispatcher.grace_s)
            if taken is None:
                self._was_down = True
                self._look_at_all()
                return REST_S
            self._redis_poller.beat()  # what a mover that was replaced had taken goes back
            with self._lock:
                for some in taken:  # what was heard meanwhile may be earlier
                    self._next[some.slot] = min(self._next[some.slot], some.next_ms)
            self._hand_on(taken)
        except BaseException:
            self._look_at_all()
            raise
        if self._was_down or any(some.was_lost for some in taken):
            if self._was_down:
                self._events.attempt(
                    "mover", "check", self._timer.link.check
                )  # it may be another one now
            self._was_down = False
            self._look_at_all()
            self._runtime.forget_armed()
        return 0

    def _due(self) -> tuple[dict[Slot, int], float]:
        """The slots that have something to do, and how much to take of each; else how long to rest at most."""
        self._is_starved = True  # first, or room that comes after the look would not be heard of
        now_us = self._clock.now_us()
        # What waits for hours again, since the clock was set back, takes no room.
        self._ahead = [
            due_us for due_us in self._ahead if now_us < due_us <= now_us + AHEAD_MS * 1000
        ]
        room = self._dispatcher.room(len(self._ahead))
        with self._lock:
            self._follow_queues()
            left_s = self._looks_at - monotonic()
            if left_s <= 0:
                self._looks_at, left_s = monotonic() + LOOK_S, LOOK_S
                self._next = dict.fromkeys(self._next, LOOK_NOW)
            due = {slot: at for slot, at in self._next.items() if at * 1000 <= now_us}
            if due and room:
                asked = {slot: 0 for slot, at in due.items() if at == LOOK_NOW}
                asked |= share(min(room, BATCH_ROWS), due)
                self._next |= dict.fromkeys(asked, NEVER)
                return asked, 0
            if not due:
                self._is_starved = False
                left_s = min(
                    left_s, (min(self._next.values(), default=NEVER) * 1000 - now_us) / 1e6
                )
            return {}, left_s

    def _hand_on(self, taken: list[Taken]) -> None:
        entries = list(chain.from_iterable(some.entries for some in taken))
        self._ahead += [entry.due_us for entry in self._timer.shifted(entries, 1)]
        self._runtime.hold(entries)
        self._handed_on, self._deletes_at = (
            [some for some in taken if some.ticket],
            monotonic() + DELETE_S,
        )
        for some in taken:
            if some.dropped:
                self._events.emit("entry.late", count=some.dropped)
                for lane in self._dispatcher.lanes:
                    self._dispatcher.drain(some.slot.queue, some.priorities, lane.shard)
            if some.refused:
                self._runtime.refuse(
                    "redis", ValueError(f"{some.refused} entries are not of our form")
                )
            if some.returned:
                self._events.emit("entry.returned", count=some.returned)

    def _follow_queues(self) -> None:
        queues = self._processes.queues
        if queues != self._queues:
            self._queues = queues
            slots = [slot for queue in queues for slot in self._timer.slots(queue)]
            self._next = {slot: self._next.get(slot, LOOK_NOW) for slot in slots}

    def _start_over(self) -> None:
        self._timer.link.close()
        self._looks_at = 0.0

    def _look_at_all(self) -> None:
        """At the next turn; that one is not now while Redis is away, or there would be no rest between two tries."""
        with self._lock:
            self._next = dict.fromkeys(self._next, LOOK_NOW)

    def _has_room(self) -> None:
        if self._is_starved and self._dispatcher.room():
            self._is_starved = False
            self._redis_poller.wake()

    # -- hear -------------------------------------------------------------------------------------

    def _hear(self) -> float:
        """Until the connection breaks or the queues change: what is armed before all that waits in its slot."""
        link, queues, failures = self._timer.link, self._processes.queues, self._timer.link.failures
        if not queues:
            return REST_S
        channels = {self._timer.channel(queue): self._timer.slots(queue) for queue in queues}
        slots = {
            (channel.encode(), slot.name.encode()): slot
            for channel, some in channels.items()
            for slot in some
        }
        try:
            listener = self._timer.listen(queues)
            try:
                self._look_at_all()  # nobody told us until now
                self._redis_poller.wake()
                while self._listener.is_running and (queues, failures) == (
                    self._processes.queues,
                    link.failures,
                ):
                    self._listener.beat()
                    message = listener.get_message(timeout=LISTEN_S)
                    if message is not None:
                        self._take_in(message, slots)
            finally:
                listener.close()
        except (*FAILURES, ValueError):  # the last one when it is closed meanwhile
            return REST_S  # the mover tells of it
        return 0

    def _take_in(
        self, message: Mapping[str, bytes], slots: Mapping[tuple[bytes, bytes], Slot]
    ) -> None:
        try:
            name, due = message["data"].split()
            slot, due_ms = slots[message["channel"], name], float(due)
            if not math.isfinite(due_ms):
                raise ValueError("no time")
            self._heard(slot, due_ms)
        except (KeyError, ValueError):  # anybody may publish there
            self._runtime.refuse(
                "redis", ValueError(f"not of our form, on {message['channel']!r:.200}")
            )

    def _heard(self, slot: Slot, due_ms: float) -> None:
        takes_at = max(due_ms - AHEAD_MS, LOOK_NOW)
        with self._lock:
            if takes_at >= self._next.get(slot, LOOK_NOW):
                return
            self._next[slot] = takes_at
        self._redis_poller.wake()


def share(room: int, due: Mapping[Slot, float]) -> dict[Slot, int]:
    """How much to take of which of the slots that are due, by their times: of the highest priority first, then of
    those that were due first; and of no more slots than there is room for."""
    first = max(slot.priority for slot in due)
    slots = [slot for slot in due if slot.priority == first]
    random.shuffle(slots)  # or all workers would come to the same one
    slots = sorted(slots, key=due.__getitem__)[:room]
    return dict.fromkeys(slots, -(-room // len(slots)))
