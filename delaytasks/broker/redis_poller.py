"""The worker's part of the timer `redis`: takes entries that are due from Redis.

It takes no more than the dispatcher has capacity for, so that a burst spreads over all workers.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Mapping
from itertools import chain
from math import inf
from typing import TYPE_CHECKING

from delaytasks.broker.redis_timer import (
    AHEAD_MS,
    FAILURES,
    MAX_ENTRIES,
    RETURN_S,
    RedisTimer,
    Slot,
    Taken,
)
from delaytasks.loops import SERVICE_REST_S, Loop
from delaytasks.model.clock import monotonic

if TYPE_CHECKING:
    from delaytasks.worker.worker_runtime import WorkerRuntime

#: All slots are read this often, whatever was published: a message may be lost, a worker may die.
READ_ALL_S = 15.0
#: How often the listener checks whether the queues of the worker have changed.
LISTEN_S = 1.0
#: Entries that were passed on are deleted together with the next read, or after this time. That is
#: well before Redis would return them.
DELETE_S = RETURN_S / 4
#: A slot with this time is read in the next turn.
READ_NOW = 0.0


class RedisPoller:
    """Reads slots of Redis in one loop, and listens for entries that are due earlier in another.

    The first loop rests until shortly before the next known entry is due, and until there is
    capacity for it.
    """

    def __init__(self, worker: WorkerRuntime, timer: RedisTimer) -> None:
        self._timer = timer
        self._worker = worker
        self._clock = worker.runtime.clock
        self._events = events = worker.runtime.events
        self._processes = worker.processes
        self._dispatcher = worker.dispatcher
        self._lock = threading.Lock()
        #: When each slot should be read, in milliseconds.
        self._read_at: dict[Slot, float] = {}
        #: The due times of entries that were taken before these times, in microseconds of `clock`.
        self._ahead: list[int] = []
        self._queues: list[str] = []
        #: The entries that Redis should delete, and the latest time for it.
        self._passed_on: list[Taken] = []
        self._delete_at = 0.0
        self._read_all_at = 0.0
        self._was_down = False
        self._poll_loop = Loop("redis_poller", self._poll, events)
        self._listen_loop = Loop("redis_listener", self._listen, events)
        self.loops = [self._poll_loop, self._listen_loop]

    def stop(self) -> None:
        """Wait until everything that was taken has been passed on. The listener ends by itself."""
        self._listen_loop.stop(0)
        self._poll_loop.stop()
        self._timer.take({}, self._passed_on)

    # -- polling ----------------------------------------------------------------------------------

    def _poll(self) -> float:
        wanted, rest_s = self._slots_to_read()
        if not wanted:
            delete_in_s = self._delete_at - monotonic() if self._passed_on else inf
            if delete_in_s > 0:
                return min(rest_s, delete_in_s)
        passed_on, self._passed_on = self._passed_on, []
        try:
            taken = self._timer.take(wanted, passed_on, self._dispatcher.grace_s)
            if taken is None:
                self._was_down = True
                self._read_all_soon()
                return SERVICE_REST_S
            with self._lock:
                for some in taken:  # an earlier time may have been published meanwhile
                    self._read_at[some.slot] = min(self._read_at[some.slot], some.next_ms)
            self._pass_on(taken)
        except BaseException:
            self._read_all_soon()
            raise
        if self._was_down or any(some.was_lost for some in taken):
            self._was_down = False
            self._read_all_soon()
            self._worker.sweep_loop.forget_armed()
        return 0

    def _slots_to_read(self) -> tuple[dict[Slot, int], float]:
        """Return how many entries to take of each slot that is due, or how long to rest at most."""
        # First, or capacity that comes meanwhile would be missed.
        self._dispatcher.on_capacity = self._poll_loop.wake
        now_us = self._clock.now_us()
        # If the clock was set back, entries may wait for hours again. They use no capacity.
        latest_us = now_us + AHEAD_MS * 1000
        self._ahead = [due_us for due_us in self._ahead if now_us < due_us <= latest_us]
        capacity = self._dispatcher.capacity(len(self._ahead))
        with self._lock:
            self._follow_queues()
            rest_s = self._read_all_at - monotonic()
            if rest_s <= 0:
                self._read_all_at, rest_s = monotonic() + READ_ALL_S, READ_ALL_S
                self._read_at = dict.fromkeys(self._read_at, READ_NOW)
            due = {slot: at for slot, at in self._read_at.items() if at * 1000 <= now_us}
            if due and capacity:
                wanted = {slot: 0 for slot, at in due.items() if at == READ_NOW}
                wanted |= share(min(capacity, MAX_ENTRIES), due)
                self._read_at |= dict.fromkeys(wanted, inf)
                return wanted, 0
            if not due:
                self._dispatcher.on_capacity = None
                next_ms = min(self._read_at.values(), default=inf)
                rest_s = min(rest_s, (next_ms * 1000 - now_us) / 1e6)
            return {}, rest_s

    def _pass_on(self, taken: list[Taken]) -> None:
        entries = list(chain.from_iterable(some.entries for some in taken))
        self._ahead += [entry.due_us for entry in entries]
        self._dispatcher.receive(entries)
        self._passed_on = [some for some in taken if some.ticket]
        self._delete_at = monotonic() + DELETE_S
        for some in taken:
            if some.dropped:
                self._events.emit("entry.late", count=some.dropped)
                self._dispatcher.start_drain(some.slot.queue, [some.slot.priority])
            if some.refused:
                error = ValueError(f"{some.refused} entries are not of our form")
                self._events.refuse("redis", error)
            if some.returned:
                self._events.emit("entry.returned", count=some.returned)

    def _follow_queues(self) -> None:
        """Read the slots of the queues that the worker serves now. The caller has the lock."""
        queues = self._processes.queues
        if queues != self._queues:
            self._queues = queues
            slots = [slot for queue in queues for slot in self._timer.slots(queue)]
            self._read_at = {slot: self._read_at.get(slot, READ_NOW) for slot in slots}

    def _read_all_soon(self) -> None:
        """Read all slots in the next turn. While Redis is down that turn comes after a rest."""
        with self._lock:
            self._read_at = dict.fromkeys(self._read_at, READ_NOW)

    # -- listening --------------------------------------------------------------------------------

    def _listen(self) -> float:
        """Listen until the connection breaks or the queues change.

        Producers publish the time of an entry that is due before all others in its slot.
        """
        link, queues, failures = self._timer.link, self._processes.queues, self._timer.link.failures
        if not queues:
            return SERVICE_REST_S
        channels = {self._timer.channel(queue): self._timer.slots(queue) for queue in queues}
        slots = {
            (channel.encode(), slot.name.encode()): slot
            for channel, some in channels.items()
            for slot in some
        }
        try:
            listener = self._timer.listen(queues)
            try:
                self._read_all_soon()  # nothing was heard until now
                self._poll_loop.wake()
                while self._listen_loop.is_running and (queues, failures) == (
                    self._processes.queues,
                    link.failures,
                ):
                    message = listener.get_message(timeout=LISTEN_S)
                    if message is not None:
                        self._receive(message, slots)
            finally:
                listener.close()
        except (*FAILURES, ValueError):  # ValueError if the connection is closed meanwhile
            return SERVICE_REST_S  # the poll loop reports that Redis is down, with the error
        return 0

    def _receive(
        self, message: Mapping[str, bytes], slots: Mapping[tuple[bytes, bytes], Slot]
    ) -> None:
        try:
            name, due = message["data"].split()
            slot, due_ms = slots[message["channel"], name], float(due)
            if not math.isfinite(due_ms):
                raise ValueError("no time")
        except (KeyError, ValueError):  # any client of Redis can publish there
            error = ValueError(f"not of our form, on {message['channel']!r:.200}")
            self._events.refuse("redis", error)
            return
        with self._lock:
            read_at = max(due_ms - AHEAD_MS, READ_NOW)
            is_earlier = read_at < self._read_at.get(slot, READ_NOW)
            if is_earlier:
                self._read_at[slot] = read_at
        if is_earlier:
            self._poll_loop.wake()


def share(capacity: int, due: Mapping[Slot, float]) -> dict[Slot, int]:
    """Return how many entries to take of each slot that is due.

    Only slots of the highest priority are read, those that were due first come first, and there
    are no more slots than there is capacity.
    """
    highest = max(slot.priority for slot in due)
    slots = [slot for slot in due if slot.priority == highest]
    random.shuffle(slots)  # or all workers would read the same one
    slots = sorted(slots, key=due.__getitem__)[:capacity]
    return dict.fromkeys(slots, -(-capacity // len(slots)))
