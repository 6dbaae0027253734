"""What waits for a process of the pool: entries, drains and waitlists, and the next chunk of them.

Entries that are due, waitlists, and drains of queues take turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from celery.utils.log import get_logger

from delaytasks.events import Events
from delaytasks.model.clock import Clock, monotonic
from delaytasks.model.task import Entry
from delaytasks.model.workers import ChunkSize
from delaytasks.run.runner import FailureReason, Report
from delaytasks.settings import Settings
from delaytasks.worker.chunk_request import ChunkRequest
from delaytasks.worker.pool import Pool
from delaytasks.worker.timing_wheel import SharedWheel

if TYPE_CHECKING:
    from delaytasks.limits.tracked_waitlists import TrackedWaitlists
    from delaytasks.runtime import Runtime
    from delaytasks.worker.worker_runtime import WorkerRuntime


# -- The entries in a worker's main process -------------------------------------------------------

# `NearEntries` keeps those that are due soon, `ReadyEntries` those that are due and wait for a
# chunk, and `WorkSender` sends back what the worker leaves to others.


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

    def _take(self, entry: Entry) -> bool:
        """Let an entry wait no more. Return whether it still did."""
        if self._waiting.get(entry.id) is not entry:
            return False
        del self._waiting[entry.id]
        return True

    def _forget_empty(self) -> None:
        self._levels = {level: ready for level, ready in self._levels.items() if ready}


class UnfinishedWork(NamedTuple):
    """Entries, and queues that have more due rows in the table."""

    entries: list[Entry]
    #: The queues whose drains it had started, with their priorities (none if only their waitlists
    #: were served).
    queues: list[tuple[str, set[int]]]
    #: How many drain messages are sent for each queue; None means the constant `drain_messages`.
    messages: int | None = None


class WorkSender:
    """Sends unfinished work back to the timer, so that other workers get it in time."""

    def __init__(self, runtime: Runtime) -> None:
        self._settings = runtime.settings
        self._timer = runtime.timer
        self._sweeps = runtime.store.sweeps
        self._events = runtime.events

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


#: How long one process serves waitlists before its next chunk may be of another kind: the first
#: bound applies while another process is free, the second one otherwise.
SERVE_S, SERVE_ALONE_S = 1.0, 0.05
#: A burst is more than the work of the pool for this number of time budgets.
BURST_BUDGETS = 5
#: After a chunk found the database unavailable, the pool gets no chunk for this long.
FAILED_PAUSE_S = 1.0
#: A late entry is left to the table. If its queue has a backlog there, the task would come last,
#: so its entry waits here for this much longer.
BACKLOG_WAIT_S = 10.0
#: How long a process continues with a deep queue before it reports, and how long if other queues
#: have drains too. It reports earlier if other tasks wait.
CONTINUE_S, CONTINUE_IN_TURN_S = 2.0, 0.5


class ChunkQueue:
    """Not thread-safe: the lock of the dispatcher guards it.

    Each process of the pool runs one chunk at a time.
    """

    def __init__(self, worker: WorkerRuntime, pool: Pool) -> None:
        self._settings = settings = worker.settings
        self._clock = worker.clock
        self._events = worker.events
        self._pool = pool
        self._others_wait = worker.processes.others_wait
        #: How many more rows may be claimed in all; None means any number.
        self.row_budget = worker.row_budget
        self._size = ChunkSize(settings.chunk_time_budget_s, settings.chunk_max)
        self._last_number = 0
        self._paused_until = 0.0
        self._ready = ReadyEntries()
        self._drains: dict[str, QueueDrain] = {}
        #: The priorities of each queue whose entries were left to the table, until other workers
        #: are asked to help.
        self._left_to_table: dict[str, set[int]] = {}
        #: The sources of chunks. The one that had the last chunk is at the end.
        self._source_turns = ["entries", "waitlists", "drains"]
        #: The waitlists that processes have reported, or None before the first one.
        self.waitlists: TrackedWaitlists | None = None
        #: The start of each chunk in the pool, by the clock of the database. The leases of the
        #: rows that such a chunk claimed are renewed.
        self.in_flight: dict[int, float] = {}
        #: The numbers of chunks whose processes may continue with further ones.
        self._continuing: set[int] = set()
        #: The ids of the rows that still run in each process although their chunk has ended.
        self.detached: dict[int, Sequence[int]] = {}

    # -- what waits -------------------------------------------------------------------------------

    def add(self, entries: Sequence[Entry]) -> None:
        """Add entries that are due."""
        self._ready.add(entries)

    def start_drain(self, queue: str, priorities: Iterable[int]) -> None:
        """Start the drain of a queue, or let the one that is in progress look once more."""
        drain = self._drains.setdefault(queue, QueueDrain(set()))
        drain.priorities.update(priorities)
        drain.starts += 1

    def drop_late(self) -> None:
        """Leave late entries to the table, where all workers can claim them.

        A burst is left too, since its last entries would be late.
        """
        late_before = self._clock.now_us() - int(self._settings.grace_s * 1e6)
        late = self._ready.remove_late(late_before, self._backlog_wait_s)
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
        for queue in self._leave_to_table(burst):
            self._drains[queue].is_deep = True
        return len(burst)

    def _leave_to_table(self, entries: Sequence[Entry]) -> set[str]:
        """Drain the queues of these entries instead. Return the queues."""
        for queue, priority in {(entry.queue, entry.priority) for entry in entries}:
            self.start_drain(queue, (priority,))
            self._left_to_table.setdefault(queue, set()).add(priority)
        return {entry.queue for entry in entries}

    def take_left_to_table(self) -> UnfinishedWork:
        """Return the queues whose entries were left to the table since the last call."""
        left, self._left_to_table = self._left_to_table, {}
        return UnfinishedWork([], list(left.items()))

    def grace_s(self, queue: str) -> float:
        """Return how late an entry of the queue may come."""
        return self._settings.grace_s + self._backlog_wait_s(queue)

    def _backlog_wait_s(self, queue: str) -> float:
        """Return how much longer late entries of the queue wait here."""
        drain = self._drains.get(queue)
        return BACKLOG_WAIT_S if drain is not None and drain.is_deep else 0.0

    def clear(self) -> UnfinishedWork:
        """Forget everything that waits, and return it. Processes report soon."""
        self._others_wait.record(True)
        # The set of priorities is empty for a queue that only has waitlists.
        queues = {queue: set[int]() for queue in (self.waitlists.queues if self.waitlists else ())}
        queues |= {queue: drain.priorities for queue, drain in self._drains.items()}
        self._drains.clear()
        self._left_to_table.clear()
        self.waitlists = None
        return UnfinishedWork(self._ready.clear(), list(queues.items()))

    @property
    def drain_count(self) -> int:
        """How many queues are drained, or wait for their turn."""
        return len(self._drains)

    @property
    def _needs_process(self) -> bool:
        """Whether tasks wait for which no process works, so that none should continue a drain.

        These are entries that are due, a drain without a chunk, or a waitlist.
        """
        return self._may_send() and bool(
            self.waiting
            or any(not drain.chunks for drain in self._drains.values())
            or (self.waitlists and self.waitlists.needs_process)
        )

    @property
    def is_busy(self) -> bool:
        return bool(
            self.in_flight
            or self._ready
            or self._drains
            or (self.waitlists and self.waitlists.is_active)
        )

    @property
    def waiting(self) -> int:
        """How many entries wait."""
        return len(self._ready)

    @property
    def free_processes(self) -> int:
        return self._pool.size - len(self.in_flight)

    def capacity(self, coming: int) -> int:
        """Return how many more entries can run in time.

        `coming` entries are on their way already. The capacity is one time budget of tasks for each
        free process, and another one for each process that will probably end its chunk soon. Other
        entries are left to other workers. The result is 0 while less than half of the capacity is
        free, since it costs as much to bring few entries as to bring many.
        """
        budgets = free = self.free_processes
        if self._size.fits:
            budgets += free + self._soon_over(2 * self._settings.chunk_time_budget_s)
        most = budgets * self._size.prefetch
        waiting = coming + (self.waiting if self._may_send() else 0)
        return most - waiting if 2 * waiting <= most else 0

    def _soon_over(self, seconds: float) -> int:
        """Return how many chunks began in the last `seconds`, or end soon if other tasks wait."""
        recent = self._clock.now_us() - seconds * 1e6
        return sum(
            began > recent or number in self._continuing for number, began in self.in_flight.items()
        )

    @property
    def waitlist_check_due_in_s(self) -> float:
        """In how many seconds the next check of a waitlist is due."""
        return inf if self.waitlists is None else self.waitlists.next_check_due_in_s

    # -- chunks -----------------------------------------------------------------------------------

    def next_chunk(self) -> ChunkRequest | None:
        """Return the next chunk, or None if none may be sent."""
        request = self._next_chunk()
        self._others_wait.record(self._needs_process)
        return request

    def _next_chunk(self) -> ChunkRequest | None:
        """Return a chunk of the source whose turn it is.

        Entries, waitlists and drains take turns, so that none of them starves the others. The free
        processes share the waiting entries, but no chunk gets less than a minimum.
        """
        free, budget = self.free_processes, self.row_budget
        size = self._size.rows if budget is None else min(self._size.rows, budget)
        if free <= 0 or size <= 0 or not self._may_send():
            return None
        number = self._last_number + 1
        share = min(size, max(-(-self.waiting // free), self._size.least))
        sources = {
            "entries": lambda: self._entry_chunk(number, share),
            "waitlists": lambda: self._waitlist_chunk(number, size),
            "drains": lambda: self._drain_chunk(number, size),
        }
        for name in self._source_turns:
            request = sources[name]()
            if request is not None:
                self._last_number = number
                self._source_turns.remove(name)
                self._source_turns.append(name)
                return self._with_budgets(request, free)
        return None

    def _may_send(self) -> bool:
        return monotonic() >= self._paused_until

    def extra_chunk_in_s(self) -> float:
        """Return in how many seconds a drain may have another chunk because one takes long."""
        if not self._may_send():
            return inf
        return min((drain.extra_chunk_in_s() for drain in self._drains.values()), default=inf)

    def _entry_chunk(self, number: int, size: int) -> ChunkRequest | None:
        if not self._ready:
            return None
        return ChunkRequest(tuple(self._ready.pop(size)), number=number)

    def _waitlist_chunk(self, number: int, size: int) -> ChunkRequest | None:
        visit = self.waitlists.next_visit() if self.waitlists else None
        if visit is None:
            return None
        return ChunkRequest(
            (), limit=size, number=number, waitlist=visit.waitlist, is_probe=visit.is_probe
        )

    def _drain_chunk(self, number: int, size: int) -> ChunkRequest | None:
        # Drains take turns, and those without a chunk come first.
        for queue, drain in sorted(self._drains.items(), key=lambda each: bool(each[1].chunks)):
            if drain.wants_chunk():
                drain.begin_chunk(number)
                self._drains[queue] = self._drains.pop(queue)  # to the end
                return ChunkRequest(
                    (),
                    queue,
                    tuple(drain.priorities),
                    size,
                    number=number,
                    continue_s=self._continue_s if drain.is_deep else 0.0,
                )
        return None

    @property
    def _continue_s(self) -> float:
        return CONTINUE_S if len(self._drains) == 1 else CONTINUE_IN_TURN_S

    def _with_budgets(self, request: ChunkRequest, free: int) -> ChunkRequest:
        if self.row_budget is not None:
            self.row_budget -= request.limit
            return request._replace(continue_s=0.0)
        if self._pool.runs_inline:
            request = request._replace(continue_s=0.0)
        serve_s = 0.0 if request.is_probe else SERVE_S if free > 1 else SERVE_ALONE_S
        return request._replace(serve_s=serve_s)

    # -- what becomes of chunks -------------------------------------------------------------------

    def chunk_sent(self, request: ChunkRequest) -> None:
        self.in_flight[request.number] = self._clock.now_us()
        self._continuing &= self.in_flight.keys()
        if request.continue_s:
            self._continuing.add(request.number)

    def set_detached(self, pid: int, ids: Sequence[int]) -> None:
        """Record the rows that still run in a process whose chunk has ended."""
        if ids:
            self.detached[pid] = ids
        else:
            self.detached.pop(pid, None)

    def chunk_ended(self, request: ChunkRequest, ran: int) -> None:
        """Record that the pool has this chunk no more."""
        began = self.in_flight.pop(request.number, None)
        if began is not None and self.row_budget is not None:
            self.row_budget += max(request.limit - ran, 0)

    def continue_after(self, request: ChunkRequest, report: Report) -> float | None:
        """Decide by the report whether the drain and the waitlists of its chunk go on.

        Return the number of seconds until a waitlist has to be checked, or None.
        """
        if request.drained_queue is not None:
            self._drain_chunk_ended(request, request.drained_queue, report.is_full)
            self._ready.remove_claimed(report.drained)
        return self._update_waitlists(report, request)

    def chunk_failed(self, request: ChunkRequest, reason: FailureReason, ran: int) -> None:
        """Record that a chunk failed as a whole."""
        self.chunk_ended(request, ran)
        if request.drained_queue is not None:
            self._drain_chunk_failed(request, request.drained_queue, reason)
        if request.waitlist is not None and self.waitlists is not None:
            self.waitlists.visit_failed(request.waitlist)
        if reason is FailureReason.UNAVAILABLE:
            self._paused_until = monotonic() + FAILED_PAUSE_S

    def learn_size(self, report: Report) -> None:
        """Adapt the size of chunks to how long this one took."""
        rows, seconds = report.sample or (report.ran, report.seconds)
        self._size.learn(rows, seconds, report.wanted)

    def _update_waitlists(self, report: Report, request: ChunkRequest) -> float | None:
        """Record the waitlists that a chunk reports.

        Return the number of seconds until a further check is needed, or None.
        """
        if self.waitlists is None and not report.waitlists:
            return None
        # Imported here: most deployments have no limits.
        from delaytasks.limits.tracked_waitlists import PROBE_S, TrackedWaitlists

        if self.waitlists is None:
            self.waitlists = TrackedWaitlists()
        was_probe = request.is_probe and report.seconds < PROBE_S
        return self.waitlists.update(report.waitlists, request.waitlist, was_probe)

    def _drain_chunk_ended(self, request: ChunkRequest, queue: str, is_full: bool) -> None:
        """Continue the drain of a queue that may have more rows; otherwise end it."""
        drain = self._drains.get(queue)
        if drain is None and is_full:
            drain = self._drains[queue] = QueueDrain(set(request.priorities))
        if drain is None:
            return
        chunk = drain.chunks.pop(request.number, None)
        if is_full:
            drain.is_deep = True
        elif chunk is None:
            pass  # it began before the queue was found empty and its drain was started again
        elif drain.starts > chunk.starts:
            drain.is_deep = False
        else:
            del self._drains[queue]

    def _drain_chunk_failed(self, request: ChunkRequest, queue: str, reason: FailureReason) -> None:
        """End the drain, unless only the process died: other processes continue it then.

        The next chunk would meet the same rows, and fail again and again without a pause. The next
        sweep requests it again.
        """
        if reason is not FailureReason.PROCESS_LOST:
            self._drains.pop(queue, None)
        elif (drain := self._drains.get(queue)) is not None:
            drain.chunks.pop(request.number, None)


#: A drain chunk that takes longer is held up by a slow task, so that other processes drain the
#: same queue as well. The bound is several time budgets, so that a quick chunk on a busy machine
#: does not count as held up.
HELD_UP_S = 0.25


class DrainChunk(NamedTuple):
    """A chunk of a drain that a process works on."""

    sent_at: float
    #: How many times the drain had been started by then.
    starts: int


@dataclass
class QueueDrain:
    """A queue that is drained by one chunk at first, and by all processes once it proves deep.

    A chunk that a slow task holds up says nothing about the queue. Meanwhile as many other
    processes look at the queue as there are chunks held up. This finds all processes that are
    needed soon, and it costs few claims if the queue is empty.
    """

    priorities: set[int]
    #: The chunks that processes work on, by number.
    chunks: dict[int, DrainChunk] = field(default_factory=dict)
    is_deep: bool = False
    #: How many times the drain was started. A chunk that was sent before the last start may have
    #: read the table too early.
    starts: int = 0

    def wants_chunk(self) -> bool:
        """Whether the pool should get another chunk of this drain now."""
        began_after = monotonic() - HELD_UP_S
        quick = sum(chunk.sent_at > began_after for chunk in self.chunks.values())
        return self.is_deep or quick < max(len(self.chunks) - quick, 1)

    def begin_chunk(self, number: int) -> None:
        self.chunks[number] = DrainChunk(monotonic(), self.starts)

    def extra_chunk_in_s(self) -> float:
        """Return in how many seconds the next one of its chunks counts as held up."""
        now = monotonic()
        waits = (chunk.sent_at + HELD_UP_S - now for chunk in self.chunks.values())
        return min((wait_s for wait_s in waits if wait_s >= 0), default=inf)
