"""The dispatcher: takes what is due, and sends chunks to free processes of the pool.

A chunk has as many rows as fit its time budget, and there are never more chunks than processes.
What arrives, what is decided, and the constants that decide it:

- *Due entries*, from the wheel, from messages and from Redis. They wait in the order of priority
  and age (`ReadyEntries`, `SORTED_SHARE`). They are left to the table, where all workers can claim
  them, if they are late by the grace (by `BACKLOG_WAIT_S` more if the queue has a backlog there),
  or if they are a burst that the pool cannot run in `BURST_BUDGETS` time budgets. While late ones
  wait here, other workers are asked each second to drain their queue.
- *A drain*, from a look for overdue rows, a message, a dead process, or of entries left to the
  table. Processes claim the queue's due rows until a claim is not full, by a chunk that was sent
  after the last request (`QueueDrain`). A process continues with a deep queue for `CONTINUE_S`, or
  for `CONTINUE_IN_TURN_S` if others are drained. Another process helps if a chunk takes longer than
  `HELD_UP_S`.
- *A waitlist*, from a report. `TrackedWaitlists` says when a process looks for held rows that may
  start; changed limits end its pauses. A process serves waitlists for `SERVE_S`, or for
  `SERVE_ALONE_S` if no other process is free.
- *A free process*. Entries, waitlists and drains take turns, so that none of them starves the
  others. `ChunkSize` learns from reports how many rows fit `chunk_time_budget`.
- *A time that passes*: the end of a pause, a drain chunk that counts as held up from now on, or a
  waitlist to check. After each pump the dispatcher plans its next look (`_plan_look`).
- *A request for capacity*, from the Redis poller: how many more entries run in time.
- *A report*. The size is learned, entries of rows that a drain has claimed are forgotten, and early
  entries return to the wheel.
- *A failed chunk*. Its rows are found when they are overdue or when their leases end. Nothing is
  sent for `PAUSE_S` if the database is unavailable, or if the pool takes no chunk.
  Only the entries of chunks that Celery lost on their way (`recall`) are taken again.
- *The stop*. What waits goes back to the timer, and drains to other workers.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from heapq import merge
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from billiard.exceptions import WorkerLostError

from delaytasks.limits.tracked_waitlists import PROBE_S, TrackedWaitlists
from delaytasks.loops import Loop
from delaytasks.model.clock import monotonic
from delaytasks.model.moves import LateReason
from delaytasks.model.task import Entry
from delaytasks.run.chunk import ChunkSize
from delaytasks.run.runner import FailureReason, Report
from delaytasks.worker.pool import ChunkRequest, Pool, SentChunk

if TYPE_CHECKING:
    from delaytasks.worker.worker_runtime import WorkerRuntime

#: Producers and workers may have different horizons for a while.
HORIZON_TOLERANCE_S = 600.0
#: Waiting entries are sorted again if one in this many is new. Sorting for fewer takes too long.
SORTED_SHARE = 8
#: How long one process serves waitlists before its next chunk may be of another kind: the first
#: bound applies while another process is free, the second one otherwise.
SERVE_S, SERVE_ALONE_S = 1.0, 0.05
#: A burst is more than the work of the pool for this number of time budgets.
BURST_BUDGETS = 5
#: After a chunk found the database unavailable, or the pool did not take one, the pool gets none
#: for this long.
PAUSE_S = 1.0
#: A late entry is left to the table. If its queue has a backlog there, the task would come last,
#: so its entry waits here for this much longer.
BACKLOG_WAIT_S = 10.0
#: How long a process continues with a deep queue before it reports, and how long if other queues
#: have drains too. It reports earlier if other tasks wait.
CONTINUE_S, CONTINUE_IN_TURN_S = 2.0, 0.5
#: A drain chunk that takes longer is held up by a slow task, so that other processes drain the
#: same queue as well. The bound is several time budgets, so that a quick chunk on a busy machine
#: does not count as held up.
HELD_UP_S = 0.25


# -- what waits for a process ---------------------------------------------------------------------


#: Due time and id, in the order in which rows were written, so that the rows of a chunk lie on few
#: pages. Entries come mixed, from several Redis slots or in several messages.
_WRITTEN_ORDER = attrgetter("due_us", "id")


class ReadyEntries:
    """Entries by priority and queue, so that the work for a chunk does not grow with the number of
    entries that wait.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, Entry] = {}
        #: An entry that is not in `_waiting` was removed, and is passed over.
        self._levels: dict[tuple[int, str], deque[Entry]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, entries: Sequence[Entry]) -> None:
        """Add entries, except those of rows that wait already with this version or a later one."""
        new: dict[tuple[int, str], list[Entry]] = {}
        for entry in entries:
            known = self._waiting.get(entry.id)
            if known is None or known.version < entry.version:
                self._waiting[entry.id] = entry
                new.setdefault((entry.priority, entry.queue), []).append(entry)
        for level, some in new.items():
            ready = self._levels.setdefault(level, deque())
            if len(some) * SORTED_SHARE >= len(ready) + len(some):
                self._levels[level] = deque(sorted([*ready, *some], key=_WRITTEN_ORDER))
            else:
                ready.extend(sorted(some, key=_WRITTEN_ORDER))

    def pop(self, count: int) -> list[Entry]:
        """Remove and return up to `count` entries, the oldest of the highest priority first."""
        popped: list[Entry] = []
        for priority in sorted({priority for priority, _ in self._levels}, reverse=True):
            levels = (ready for level, ready in self._levels.items() if level[0] == priority)
            passed = list[Entry]()
            for entry in merge(*levels, key=_WRITTEN_ORDER):
                if len(popped) == count:
                    break
                passed.append(entry)
                if self._take(entry):
                    popped.append(entry)
            for entry in passed:
                self._levels[priority, entry.queue].popleft()
        self._forget_empty()
        return popped

    def remove_late(self, before_us: int, wait_s: Callable[[str], float]) -> list[Entry]:
        """Remove and return the entries that were due before `before_us`.

        Those of a queue for which `wait_s` returns a time stay for so much longer.
        """
        removed: list[Entry] = []
        for (_, queue), ready in self._levels.items():
            if ready[0].due_us < before_us:
                late_before = before_us - wait_s(queue) * 1e6
                while ready and ready[0].due_us < late_before:
                    entry = ready.popleft()
                    if self._take(entry):
                        removed.append(entry)
        self._forget_empty()
        return removed

    def levels_before(self, before_us: int) -> list[tuple[int, str]]:
        """Return the priorities and queues of the entries that were due before `before_us`."""
        firsts = (
            (level, next((entry for entry in ready if self._waits(entry)), None))
            for level, ready in self._levels.items()
        )
        return [level for level, first in firsts if first is not None and first.due_us < before_us]

    def remove_claimed(self, versions: Mapping[int, int]) -> None:
        """Remove the entries of rows that were claimed with these versions, by their ids.

        A row that was given back has a later version, with an entry of its own.
        """
        for id, version in versions.items():
            entry = self._waiting.get(id)
            if entry is not None and entry.version < version:
                del self._waiting[id]
        if not self._waiting:
            self._levels.clear()

    def clear(self) -> list[Entry]:
        """Remove and return all entries."""
        waiting = list(self._waiting.values())
        self._waiting.clear()
        self._levels.clear()
        return waiting

    def _waits(self, entry: Entry) -> bool:
        return self._waiting.get(entry.id) is entry

    def _take(self, entry: Entry) -> bool:
        """Let an entry wait no more. Return whether it still did."""
        if not self._waits(entry):
            return False
        del self._waiting[entry.id]
        return True

    def _forget_empty(self) -> None:
        self._levels = {level: ready for level, ready in self._levels.items() if ready}


@dataclass
class QueueDrain:
    """A queue that is drained by one chunk at first, and by all processes once it proves deep.

    A chunk that a slow task holds up says nothing about the queue. Meanwhile as many other
    processes look at the queue as there are chunks held up. This finds all processes that are
    needed soon, and it costs few claims if the queue is empty.
    """

    priorities: set[int]
    #: From when on each chunk that processes work on counts as held up, by its number.
    chunks: dict[int, float] = field(default_factory=dict)
    is_deep: bool = False
    #: The last chunk that was sent before the drain was requested again.
    last_stale: int = 0

    def may_have_read_too_early(self, number: int) -> bool:
        """Whether this chunk may have missed the rows for which the drain was requested again."""
        return number <= self.last_stale

    def wants_chunk(self) -> bool:
        """Whether the pool should get another chunk of this drain now."""
        now = monotonic()
        quick = sum(held_up_at > now for held_up_at in self.chunks.values())
        return self.is_deep or quick < max(len(self.chunks) - quick, 1)


#: Queues with more due rows in the table: those whose drains this worker had started, with their
#: priorities (none if only their waitlists were served).
UnfinishedDrains = list[tuple[str, set[int]]]


# -- the dispatcher -------------------------------------------------------------------------------


class Dispatcher:
    """Lives in the worker's main process.

    One lock guards its state, and code that holds the lock waits for nothing. `pump`, `_send` and
    `recall` use the pool, and run in the thread to which `call_soon` brings a call. Any thread may
    call the other methods.

    What comes after `close` is sent back.
    """

    def __init__(self, worker: WorkerRuntime) -> None:
        runtime = worker.runtime
        self._worker = worker
        self._settings = settings = runtime.settings
        self._clock = runtime.clock
        self._events = runtime.events
        self._memory = worker.processes.memory
        self._pool = Pool(worker.celery_worker.pool)
        self._lock = threading.RLock()
        self._is_open = True
        self._is_pumping = False
        self._paused_until = 0.0
        self._size = ChunkSize(settings.chunk_time_budget_s, settings.chunk_max)
        self._last_number = 0
        #: The rows that processes have claimed.
        self.claimed = 0
        self._ready = ReadyEntries()
        self._drains: dict[str, QueueDrain] = {}
        #: The priorities of each queue whose entries were left to the table, until other workers
        #: are asked to help.
        self._left_to_table: dict[str, set[int]] = {}
        #: The sources of chunks. The one that had the last chunk is at the end.
        self._source_turns = [self._entry_chunk, self._waitlist_chunk, self._drain_chunk]
        #: The waitlists that processes have reported.
        self._waitlists = TrackedWaitlists()
        #: When to pump although nothing arrives: something begins to wait for a process then.
        self._look_at = inf
        self.loop = Loop("dispatcher", self._look, runtime.events)
        #: The ids of the rows that still run in each process although their chunk has ended.
        self._detached: dict[int, Sequence[int]] = {}
        #: Is called once when there is capacity. The Redis poller sets it while it waits.
        self.on_capacity: Callable[[], object] | None = None

    # -- what arrives -----------------------------------------------------------------------------

    def receive(self, entries: Sequence[Entry]) -> None:
        """Keep the entries in the wheel until they are due, and take those that are due now."""
        now_us, horizon_s = self._clock.now_us(), self._settings.horizon_s
        if horizon_s is not None:
            # No timer arms what is due later: such a message is forged, or very old.
            latest_us = now_us + int((2 * horizon_s + HORIZON_TOLERANCE_S) * 1e6)
            if any(entry.due_us > latest_us for entry in entries):
                error = ValueError("an entry is far beyond the horizon")
                self._events.refuse("run", error)
                entries = [entry for entry in entries if entry.due_us <= latest_us]
        early = [
            ((entry.id, entry.version), entry.due_us, entry)
            for entry in entries
            if entry.due_us > now_us
        ]
        # After the wheel has stopped, all entries are sent back.
        if not early or self._worker.wheel.add(early):
            entries = [entry for entry in entries if entry.due_us <= now_us]
        if entries:
            self.take(entries)

    def take(self, entries: Sequence[Entry]) -> None:
        """Take entries that are due now; called by the wheel's thread, among others."""
        with self._lock:
            is_open = self._is_open
            if is_open:
                self._ready.add(entries)
                if self._drains:
                    self._drain_with(entries)
        if is_open:
            self._pump_soon()
        elif entries:
            self._worker.send_back(list(entries), [])

    def _drain_with(self, entries: Sequence[Entry]) -> None:
        """Let the drains look at the priorities of these entries, too.

        A drain of lower priorities only would take turns with the entries.
        """
        for queue, priority in {(entry.queue, entry.priority) for entry in entries}:
            if queue in self._drains:
                self._drains[queue].priorities.add(priority)

    def start_drain(self, queue: str, priorities: Iterable[int]) -> None:
        """Drain `queue`: send chunks that claim its due rows, until one comes back not full."""
        with self._lock:
            is_open = self._is_open
            if is_open:
                self._drain(queue, priorities)
        if is_open:
            self._pump_soon()
        else:
            # One message for one, since this worker may receive it again before it stops.
            self._worker.send_back([], [(queue, set(priorities))], messages=1)

    def _drain(self, queue: str, priorities: Iterable[int]) -> None:
        """Start the drain of a queue, or let the one that is in progress look once more."""
        drain = self._drains.setdefault(queue, QueueDrain(set()))
        drain.priorities.update(priorities)
        drain.last_stale = self._last_number

    def limits_changed(self, tags: Set[str]) -> None:
        """Check the waitlists of these tags now."""
        with self._lock:
            self._waitlists.limits_changed(tags)
        self._pump_soon()

    def close(self) -> tuple[list[Entry], UnfinishedDrains]:
        """Send no more chunks, and return what waits. Processes report soon."""
        with self._lock:
            self._is_open = False
            self._memory.others_wait = True
            # The set of priorities is empty for a queue that only has waitlists.
            queues = {queue: set[int]() for queue in self._waitlists.queues}
            queues |= {queue: drain.priorities for queue, drain in self._drains.items()}
            self._drains.clear()
            self._left_to_table.clear()
            self._waitlists = TrackedWaitlists()
            return self._ready.clear(), list(queues.items())

    # -- what is left to the table ----------------------------------------------------------------

    def _drop_late(self) -> None:
        """Leave late entries to the table, where all workers can claim them.

        A burst is left too, since its last entries would be late.
        """
        late = self._ready.remove_late(self._late_before_us(), self._backlog_wait_s)
        self._leave_to_table(late)
        dropped = len(late)
        if self._size.is_limited_by_time:
            dropped += self._drop_burst(int(self._pool.size * BURST_BUDGETS * self._size.in_time))
        if dropped:
            self._events.emit("entry.late", count=dropped)

    def _drop_burst(self, most: int) -> int:
        """Leave all entries to the table if more than `most` wait. Return how many.

        Chunks from the table are claimed ahead. If the table may have a backlog already, the tasks
        would come last there, so the entries stay.
        """
        if self._drains or len(self._ready) <= most:
            return 0
        burst = self._ready.clear()
        self._leave_to_table(burst)
        for drain in self._drains.values():
            drain.is_deep = True
        return len(burst)

    def _leave_to_table(self, entries: Sequence[Entry]) -> None:
        """Drain the queues of these entries instead."""
        for queue, priority in {(entry.queue, entry.priority) for entry in entries}:
            self._drain(queue, (priority,))
            self._left_to_table.setdefault(queue, set()).add(priority)

    def left_to_table(self) -> Iterator[tuple[str, set[int]]]:
        """Take the queues that other workers should drain too: those whose entries were left to
        the table since the last call, and those with late entries that wait here for a turn.

        If all processes run long tasks, nothing else looks at late entries. What the caller does
        not ask for comes first in the next call.
        """
        with self._lock:
            for priority, queue in self._ready.levels_before(self._late_before_us()):
                self._left_to_table.setdefault(queue, set()).add(priority)
            queues = list(self._left_to_table)
        for queue in queues:
            with self._lock:
                priorities = self._left_to_table.pop(queue, None)
            if priorities is not None:
                yield queue, priorities

    def _late_before_us(self) -> int:
        return self._clock.now_us() - int(self._settings.grace_s * 1e6)

    def grace_s(self, queue: str) -> float:
        """Return how late an entry of the queue may come."""
        with self._lock:
            return self._settings.grace_s + self._backlog_wait_s(queue)

    def _backlog_wait_s(self, queue: str) -> float:
        """Return how much longer late entries of the queue wait here."""
        drain = self._drains.get(queue)
        return BACKLOG_WAIT_S if drain is not None and drain.is_deep else 0.0

    # -- what other parts of the worker ask -------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether the pool has a chunk, or one could be sent."""
        with self._lock:
            is_sending = self._pool.chunks or self._ready or self._drains
            return bool(is_sending or self._waitlists.is_active)

    @property
    def is_at_work(self) -> bool:
        """Whether a task runs, as far as the main process knows."""
        return bool(self._pool.chunks or self._detached)

    def pids(self) -> set[int]:
        """Return the processes that run tasks, if they are the pool's own."""
        return (self._pool.pids() | set(self._detached)) - {os.getpid()}

    def running(self) -> tuple[list[float], dict[int, Sequence[int]]]:
        """Return the starts of the chunks, by the clock of the database, and by process the rows
        that outlive theirs.
        """
        with self._lock:
            began_us = [chunk.began_us for chunk in self._pool.chunks.values()]
            return began_us, dict(self._detached)

    def process_died(self, pid: int) -> None:
        with self._lock:
            self._detached.pop(pid, None)

    @property
    def waiting(self) -> int:
        """How many entries wait."""
        return len(self._ready)

    @property
    def drain_count(self) -> int:
        """How many queues are drained, or wait for their turn."""
        return len(self._drains)

    def capacity(self, coming: int = 0) -> int:
        """Return how many more entries can run in time, while `coming` others are on their way.

        The capacity is one time budget of tasks for each free process, and another one for each
        process that will probably end its chunk soon. Other entries are left to other workers. The
        result is 0 while less than half of the capacity is free, since it costs as much to bring
        few entries as to bring many.
        """
        with self._lock:
            if not self._is_open:
                return 0
            budgets = free = self._free_processes
            if self._size.fits:
                # Chunks that began a short time ago, or that end soon if other tasks wait.
                recent_us = self._clock.now_us() - 2 * self._settings.chunk_time_budget_s * 1e6
                budgets += free + sum(
                    chunk.began_us > recent_us or chunk.request.continue_s > 0
                    for chunk in self._pool.chunks.values()
                )
            most = budgets * self._size.in_time
            waiting = coming + (self.waiting if self._may_send() else 0)
            return most - waiting if 2 * waiting <= most else 0

    @property
    def _free_processes(self) -> int:
        return self._pool.size - len(self._pool.chunks)

    @property
    def _needs_process(self) -> bool:
        """Whether tasks wait for which no process works, so that none should continue a drain.

        These are entries that are due, a drain without a chunk, or a waitlist.
        """
        return self._may_send() and bool(
            self._ready
            or any(not drain.chunks for drain in self._drains.values())
            or self._waitlists.needs_process
        )

    @property
    def _has_rows_to_send(self) -> bool:
        return bool(self._ready) or any(drain.wants_chunk() for drain in self._drains.values())

    def _may_send(self) -> bool:
        return monotonic() >= self._paused_until

    # -- to the pool ------------------------------------------------------------------------------

    def _pump_soon(self) -> None:
        self._worker.call_soon(self.pump)

    def _look(self) -> float | None:
        """Pump if it is time, which plans the next look; return how long to rest until it."""
        with self._lock:
            rest_s = self._look_at - monotonic()
            if rest_s <= 0:
                self._look_at = inf
        if rest_s <= 0:
            self._pump_soon()
        return rest_s if 0 < rest_s < inf else None

    def _plan_look(self, decided_at: float) -> None:
        """Plan a look for when a pause ends, a chunk counts as held up, or a waitlist is checked.

        These are times after the last decision; some of them may have passed since. Everything else
        that needs a process pumps when it arrives.
        """
        if not self._drains and not self._waitlists and decided_at >= self._paused_until:
            return  # as after nearly every task that is due alone
        with self._lock:
            before = self._look_at
            times = [self._paused_until, self._waitlists.next_check_at(decided_at)]
            for drain in self._drains.values():
                if not drain.is_deep:
                    times += drain.chunks.values()
            self._look_at = min((at for at in times if at > decided_at), default=inf)
            is_earlier = self._look_at < before
        if is_earlier:
            self.loop.wake()

    def pump(self) -> None:
        """Fill the pool. A solo pool runs the chunk within this call, and calls back from there."""
        with self._lock:
            if self._is_pumping:
                return
            self._is_pumping = True
        decided_at = monotonic()
        try:
            while (request := self._next_chunk()) is not None:
                decided_at = monotonic()
                if self._send(request):
                    self._pump_soon()  # the chunk ran inline: let the loop read its messages first
                    return
        finally:
            with self._lock:
                self._is_pumping = False
            self._plan_look(decided_at)
            on_capacity = self.on_capacity
            if on_capacity is not None and self.capacity():
                self.on_capacity = None
                on_capacity()

    def _next_chunk(self) -> ChunkRequest | None:
        """Return the next chunk, or None if none may be sent."""
        worker = self._worker
        with self._lock:
            self._drop_late()  # first: they must not accumulate while the pool is busy
            if not self._is_open:
                return None
            request = self._choose_chunk()
            self._memory.others_wait = self._needs_process
            if request is None:
                return None
            return request._replace(
                sends_events=worker.sends_events(), policies=worker.runtime.policy_cache.stamp
            )

    def _choose_chunk(self) -> ChunkRequest | None:
        """Return a chunk of the source whose turn it is.

        Entries, waitlists and drains take turns, so that none of them starves the others.
        """
        free = self._free_processes
        if free <= 0 or not self._may_send():
            return None
        for source in self._source_turns:
            request = source(self._last_number + 1, self._size.rows)
            if request is not None:
                self._last_number += 1
                self._source_turns.remove(source)
                self._source_turns.append(source)
                return self._with_budgets(request, free)
        return None

    def _entry_chunk(self, number: int, size: int) -> ChunkRequest | None:
        """The free processes share the waiting entries, but no chunk gets less than a minimum."""
        if not self._ready:
            return None
        share = max(-(-self.waiting // self._free_processes), self._size.least)
        return ChunkRequest(tuple(self._ready.pop(min(size, share))), number=number)

    def _waitlist_chunk(self, number: int, size: int) -> ChunkRequest | None:
        visit = self._waitlists.next_visit()
        if visit is None:
            return None
        return ChunkRequest(
            (), limit=size, number=number, waitlist=visit.waitlist, is_probe=visit.is_probe
        )

    def _drain_chunk(self, number: int, size: int) -> ChunkRequest | None:
        """Drains take turns, and those without a chunk come first."""
        for queue, drain in sorted(self._drains.items(), key=lambda each: bool(each[1].chunks)):
            if drain.wants_chunk():
                drain.chunks[number] = monotonic() + HELD_UP_S
                self._drains[queue] = self._drains.pop(queue)  # to the end
                continue_s = CONTINUE_S if len(self._drains) == 1 else CONTINUE_IN_TURN_S
                return ChunkRequest(
                    (),
                    queue,
                    tuple(drain.priorities),
                    size,
                    number=number,
                    continue_s=continue_s if drain.is_deep else 0.0,
                )
        return None

    def _with_budgets(self, request: ChunkRequest, free: int) -> ChunkRequest:
        if self._pool.runs_inline:
            request = request._replace(continue_s=0.0)
        serve_s = 0.0 if request.is_probe else SERVE_S if free > 1 else SERVE_ALONE_S
        return request._replace(serve_s=serve_s)

    def _send(self, request: ChunkRequest) -> bool:
        """Return True if the chunk has ended already, as in a solo pool."""
        with self._lock:
            chunk = SentChunk(request, self._clock.now_us())
            self._pool.chunks[request.number] = chunk
        done, lost = partial(self._done, request), partial(self._lost, request)
        try:
            self._pool.send(chunk, done, lost)
        except Exception as error:
            self._not_sent(request, repr(error), cause=error, is_logged=False)
            return False
        if request.number not in self._pool.chunks:
            return True
        if chunk.result is None:
            self._not_sent(request, "the pool takes no more work")
        return False

    def _not_sent(self, request: ChunkRequest, error: str, **fields: Any) -> None:
        """Pause, or every waiting entry would fail in the same way."""
        self._paused_until = monotonic() + PAUSE_S
        self._ended(request, Report(error=error), **fields)

    # -- from the pool ----------------------------------------------------------------------------
    # `_done` and `_lost` end in `_ended`, which pumps again.

    def recall(self) -> list[Entry]:
        """Restore the chunks that the pool was made to forget.

        Return the entries of those chunks that no process has.
        """
        with self._lock:
            lost = self._pool.recall()
            if self._is_open:  # else a process may have it, and its leases are renewed
                for request in lost:
                    self._chunk_ended(request)
                    self._chunk_failed(request, FailureReason.PROCESS_LOST)
        return [entry for request in lost for entry in request.entries]

    def _done(self, request: ChunkRequest, report: Any) -> None:
        """Called by the pool with the report of a chunk, or with what ended the chunk's thread."""
        if not isinstance(report, Report):
            self._lost(request, report)
            return
        if self._worker.statistics is not None:
            self._worker.statistics.add(report.statistics)
        with self._lock:
            self.claimed += report.claimed
            if report.detached:
                self._detached[report.pid] = report.detached
            else:
                self._detached.pop(report.pid, None)
        self._ended(request, report)

    def _lost(self, request: ChunkRequest, info: Any) -> None:
        """Called by the pool if the process of a chunk could not report."""
        is_dead = getattr(info, "type", None) is WorkerLostError
        reason = FailureReason.PROCESS_LOST if is_dead else FailureReason.UNKNOWN
        error = str(getattr(info, "exception", info)) or "it was lost"
        cause = info if isinstance(info, BaseException) else None
        self._ended(request, Report(error=error, reason=reason), cause=cause, is_logged=is_dead)

    def _ended(
        self,
        request: ChunkRequest,
        report: Report,
        *,
        cause: BaseException | None = None,
        is_logged: bool = True,
    ) -> None:
        """Go on after a chunk. If it failed as a whole, its rows are found when they are overdue or
        when their leases end.

        `is_logged` tells that the process has logged why the chunk failed, or the pool how the
        process died.
        """
        with self._lock:
            is_open = self._is_open
            self._chunk_ended(request)
            if report.error:
                self._chunk_failed(request, report.reason)
            else:
                self._size.learn(*report.sample, report.wanted)
                if is_open:
                    self._continue_after(request, report)
                    if report.early:  # under the lock, or `close` could come before it
                        self.receive(report.early)
        if report.error:
            self._events.emit(
                "chunk.failed",
                error=report.error,
                reason=report.reason.value,
                cause=cause,
                is_logged=is_logged,
            )
        elif not is_open:
            queues = {state.queue for state in report.waitlists}
            self._worker.send_back(list(report.early), [(queue, set()) for queue in queues])
        self._pump_soon()

    def _chunk_ended(self, request: ChunkRequest) -> None:
        """Record that the pool has this chunk no more."""
        if self._free_processes <= 0 and self._has_rows_to_send:
            self._memory.obstacles_us[LateReason.BUSY] = self._clock.now_us()
        self._pool.chunks.pop(request.number, None)

    def _chunk_failed(self, request: ChunkRequest, reason: FailureReason) -> None:
        """Decide what rests after a chunk that failed as a whole.

        Its drain ends, unless only the process died: other processes continue it then. The next
        chunk would meet the same rows, and fail again and again without a pause. The next look for
        overdue rows starts the drain again.
        """
        if request.drained_queue is not None:
            if reason is not FailureReason.PROCESS_LOST:
                self._drains.pop(request.drained_queue, None)
            elif (drain := self._drains.get(request.drained_queue)) is not None:
                drain.chunks.pop(request.number, None)
        if request.waitlist is not None:
            self._waitlists.visit_failed(request.waitlist)
        if reason is FailureReason.UNAVAILABLE:
            self._paused_until = monotonic() + PAUSE_S
            self._memory.obstacles_us[LateReason.DATABASE] = self._clock.now_us()

    def _continue_after(self, request: ChunkRequest, report: Report) -> None:
        """Decide by the report whether the drain and the waitlists of its chunk go on."""
        if request.drained_queue is not None:
            self._drain_chunk_ended(request, request.drained_queue, report.is_full)
            self._ready.remove_claimed(report.drained)
        if report.waitlists or request.waitlist is not None:
            was_probe = request.is_probe and report.seconds < PROBE_S
            self._waitlists.update(report.waitlists, request.waitlist, was_probe)

    def _drain_chunk_ended(self, request: ChunkRequest, queue: str, is_full: bool) -> None:
        """Continue the drain of a queue that may have more rows; otherwise end it."""
        drain = self._drains.get(queue)
        if drain is None and is_full:
            drain = self._drains[queue] = QueueDrain(set(request.priorities))
        if drain is None:
            return
        was_known = drain.chunks.pop(request.number, None) is not None
        if is_full:
            drain.is_deep = True
        elif not was_known:
            pass  # it began before the queue was found empty and its drain was started again
        elif drain.may_have_read_too_early(request.number):
            drain.is_deep = False
        else:
            del self._drains[queue]
