"""Finds near rows where no broker delivers them: in the table, or in Redis.

With the timer `direct`, `TablePoller` reads the rows shortly before they are due, and keeps them
until then. If the database can send notices about tasks that are due soon, `NotifyListener`
listens to them, and the table is read at a notice, and once a second. Otherwise, and while the
listener has no connection, it is read more often, and even more often after a task was found too
late.

With the timer `redis`, `RedisPoller` takes entries that are due. It takes no more than its
dispatcher has capacity for, so that a burst spreads over all workers.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, Any

from delaytasks.broker.arming import NOTICE_SLACK_S, NOTIFIED_POLL_S
from delaytasks.broker.redis_timer import (
    AHEAD_MS,
    FAILURES,
    MAX_ENTRIES,
    RETURN_S,
    RedisTimer,
    Slot,
    Taken,
)
from delaytasks.db.database import limit_answers
from delaytasks.loops import SERVICE_REST_S, Availability, Loop
from delaytasks.model.clock import from_us, monotonic
from delaytasks.model.inputs import ALL_QUEUES
from delaytasks.model.task import Entry
from delaytasks.model.workers import POLLING_PREFIX
from delaytasks.settings import SILENT_SWEEPS
from delaytasks.worker.processes import serves
from delaytasks.worker.sweep import MOST_OTHERS, OverdueQueues

if TYPE_CHECKING:
    from delaytasks.db.statements import Listener
    from delaytasks.runtime import Runtime
    from delaytasks.worker.worker_runtime import WorkerRuntime


# -- Receives the notices of the database about tasks that are due soon ---------------------------

#: How long one turn waits for a notice.
NOTICE_WAIT_S = 1.0
#: How long the listener rests after a notice. The table is read once for all notices meanwhile.
NOTICE_REST_S = 0.005
#: How long the listener rests after a failure.
RECONNECT_REST_S = 5.0


class NotifyListener:
    """Calls `on_notice` when there is something new to read in the table."""

    def __init__(self, runtime: Runtime, on_notice: Callable[[], None]) -> None:
        self._notices = runtime.store.notices
        self._events = events = runtime.events
        self._on_notice = on_notice
        self._listener: Listener | None = None
        self._connection = Availability(
            lambda error: events.emit("notices.down", error=error),
            lambda: events.emit("notices.up"),
        )
        #: Whether notices arrive.
        self.is_listening = False
        self.loop = Loop("notify_listener", self._turn, events)

    def stop(self) -> None:
        self.loop.stop(0)

    def _turn(self) -> float | None:
        try:
            if self._listener is None:
                self._listener = self._notices.listen()
                if self._listener is None:
                    return None  # this database has no notices
                self.is_listening = True
                self._connection.answered()
                self._on_notice()  # nothing was heard until now
            if self._listener.wait(NOTICE_WAIT_S):
                self._on_notice()
                time.sleep(NOTICE_REST_S)
            if not self.loop.is_running:
                self._disconnect()
            return 0
        except Exception as error:  # each driver has errors of its own
            self._disconnect()
            self._connection.failed(f"{type(error).__name__}: {error}")
            self._on_notice()
            return RECONNECT_REST_S

    def _disconnect(self) -> None:
        listener, self._listener, self.is_listening = self._listener, None, False
        if listener is not None:
            self._events.attempt(self.loop.name, "disconnect", listener.close)


# -- Which entries are this worker's -------------------------------------------------------------


_PRIME = 1_000_003


class WorkerShares:
    """The shares as one worker knows them. The share of each worker is as large as its pool."""

    def __init__(self, hostname: str) -> None:
        self._hostname = hostname
        self._workers: Sequence[tuple[str, int, Sequence[str]]] = ()
        #: The number of parts of each queue, and which of them are this worker's.
        self._parts: dict[str, tuple[int, range]] = {}

    def learn(self, workers: Sequence[Mapping[str, Any]], now: datetime, sweep_s: float) -> None:
        """Read the rows of the table of workers."""
        known = [
            (worker["name"], max(worker["concurrency"], 1), worker["queues"])
            for worker in workers
            if worker["pool"].startswith(POLLING_PREFIX)
            and abs((now - worker["seen_at"]).total_seconds()) < SILENT_SWEEPS * sweep_s
        ]
        if known != self._workers:
            self._workers, self._parts = known, {}

    def is_mine(self, entry: Entry) -> bool:
        parts = self._parts.get(entry.queue)
        if parts is None:
            parts = self._parts[entry.queue] = self._parts_of(entry.queue)
        total, mine = parts
        return not mine or entry.id % _PRIME % total in mine

    def _parts_of(self, queue: str) -> tuple[int, range]:
        """Return an empty range as long as this worker has no row, so that it takes every task."""
        total, mine = 0, range(0)
        for hostname, size, queues in self._workers:
            if serves(queues, queue):
                if hostname == self._hostname:
                    mine = range(total, total + size)
                total += size
        return total, mine


# -- Reads the table -------------------------------------------------------------------------------


#: The rest between two reads of a table without notices. It grows from the first to the second
#: bound, by this factor, while no task is found late.
MIN_POLL_REST_S, MAX_POLL_REST_S = 0.02, 0.5
REST_GROWTH = 1.5
#: Rows in one read. If there are more, the next read comes soon.
MAX_READ_ROWS = 2000
#: How often the poller looks for overdue tasks, and for other workers.
OVERDUE_CHECK_S = 1.0
#: How long a read waits for an answer. If the database is silent, another connection may not be.
POLL_ANSWER_S = 10.0


class TablePoller:
    def __init__(self, worker: WorkerRuntime) -> None:
        self._runtime = runtime = worker.runtime
        self._store = runtime.store
        self._settings = runtime.settings
        self._processes = worker.processes
        self._dispatcher = worker.dispatcher
        self._shares = WorkerShares(worker.celery_worker.hostname)
        #: The rows that were passed on, which the next read may find again, and their due times.
        self._passed_on: dict[tuple[int, int], int] = {}
        self._rest_s = MIN_POLL_REST_S
        self._overdue_check_at = 0.0
        self.loop = Loop("table_poller", self._turn, runtime.events)
        self._overdue = OverdueQueues(self._store.sweeps, self._settings.grace_s)
        self.listener = NotifyListener(runtime, self.loop.wake)
        self.loops = [self.loop, self.listener.loop]

    def stop(self) -> None:
        self.listener.stop()
        self.loop.stop()

    def take(self, entries: Iterable[Entry]) -> Sequence[Entry]:
        """Keep those near entries that are this worker's and were not passed on before.

        Return them.
        """
        mine = [
            entry
            for entry in entries
            if (entry.id, entry.version) not in self._passed_on
            and serves(self._processes.queues, entry.queue)
            and self._shares.is_mine(entry)
        ]
        self._passed_on.update(((entry.id, entry.version), entry.due_us) for entry in mine)
        if mine:
            self._dispatcher.receive(mine)
        return mine

    # -- reading ----------------------------------------------------------------------------------

    def _turn(self) -> float:
        limit_answers(POLL_ANSWER_S)
        store = self._store
        checks_overdue = monotonic() >= self._overdue_check_at
        if checks_overdue:
            self._overdue_check_at = monotonic() + OVERDUE_CHECK_S
            now = self._runtime.clock.now()
            self._shares.learn(store.workers.all(), now, self._settings.sweep_s)
        now_us, grace_us = self._runtime.clock.now_us(), self._settings.grace_s * 1e6
        hears_notices = self.listener.is_listening
        rest_s = NOTIFIED_POLL_S if hears_notices else self._rest_s
        until_us = now_us + (rest_s + NOTICE_SLACK_S) * 1e6
        found = store.sweeps.first_due_between(
            from_us(int(now_us - grace_us)), from_us(int(until_us)), MAX_READ_ROWS
        )
        mine = self.take(found)
        if checks_overdue:
            self._start_overdue_drains()
        passed_on = list(self._passed_on.items())
        self._passed_on = {name: due for name, due in passed_on if due > now_us - 2 * grace_us}
        was_late = any(entry.due_us <= now_us for entry in mine)
        longer_s = min(self._rest_s * REST_GROWTH, MAX_POLL_REST_S)
        self._rest_s = MIN_POLL_REST_S if was_late else longer_s
        rest_s = NOTIFIED_POLL_S if hears_notices else self._rest_s
        if len(found) == MAX_READ_ROWS:
            # There are more rows, which are due later than these. Read them before they are due.
            rest_s = min(rest_s, (found[-1].due_us - now_us) / 2e6)
        return max(rest_s, MIN_POLL_REST_S)

    def _start_overdue_drains(self) -> None:
        """Start drains of what no worker took in time, whichever worker's it was."""
        queues = set(self._processes.queues)
        serves_all = ALL_QUEUES in queues
        if serves_all:
            queues = self._runtime.queues.all()
        late = self._overdue.of_named(queues)
        if serves_all:
            # No more unknown queues than can have their turn soon, in between the known ones.
            most = MOST_OTHERS - self._dispatcher.drain_count
            late |= self._overdue.of_others(queues, most)
        for queue, priorities in late.items():
            self._dispatcher.start_drain(queue, priorities)


# -- Takes entries from Redis ---------------------------------------------------------------------


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
        has_capacity = worker.dispatcher.capacity_granted
        self._poll_loop = Loop("redis_poller", self._poll, events, has_capacity)
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
        self._dispatcher.is_capacity_wanted = True
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
                self._dispatcher.is_capacity_wanted = False
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
