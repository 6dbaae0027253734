"""From entries that fell due to chunks in the pool: as many rows as fit the time box, never more chunks than
processes, so that what waits grows into the next chunk."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from delaytasks.core.clock import Clock, monotonic
from delaytasks.core.events import Events
from delaytasks.core.ports import Entry
from delaytasks.core.settings import Settings
from delaytasks.engine.runner import Report
from delaytasks.worker.pool import Job, run_job

#: Rows in the first chunk, before anything is known about the processors.
FIRST_SIZE = 10
#: How much the last chunk says about the next one.
LEARNING = 0.3
#: After a chunk failed as a whole (the database is away) nothing is sent to the pool for this long.
REST_S = 1.0


@dataclass
class Drain:
    """A queue that is being worked off from the table, by one chunk at first, by all processes once it proves deep."""

    priorities: set[int]
    chunks: int = 0
    is_deep: bool = False
    #: Somebody asked while a chunk was under way, which may have looked too early.
    is_asked_again: bool = False


class Dispatcher:
    """Lives in the worker's main process. The pool may be used from one thread only, the event loop's where there
    is one: `soon` brings a call there."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        events: Events,
        pool: Any,
        soon: Callable[[Callable[[], None]], None],
        rearm: Callable[[Sequence[Entry]], None],
        sends_events: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._events = events
        self._pool = pool
        self._soon = soon
        self._rearm = rearm
        self.sends_events = sends_events
        #: Called when there may be room again.
        self.on_room: Callable[[], None] = lambda: None
        self._lock = threading.RLock()
        self._ready: dict[int, deque[Entry]] = {}
        self._drains: dict[str, Drain] = {}
        self._row_s: float | None = None
        self._drains_next = False
        self._is_pumping = False
        self._is_open = True
        self._rests_until = 0.0
        #: Start of each chunk in the pool, by the database's clock: leases are renewed for what began there.
        self.in_flight: dict[int, float] = {}
        self._jobs = 0

    # -- in ---------------------------------------------------------------------------------------

    def take(self, entries: Sequence[Entry]) -> None:
        """Entries that are due now; called by the wheel's thread."""
        with self._lock:
            for entry in entries:
                self._ready.setdefault(entry.priority, deque()).append(entry)
        self._soon(self.pump)

    def drain(self, queue: str, priorities: Sequence[int]) -> None:
        """Claim by ourselves what is overdue in `queue`, until a chunk comes back that is not full."""
        with self._lock:
            self._ask(queue, priorities)
        self._soon(self.pump)

    def close(self) -> list[Entry]:
        """No more chunks; returns the entries that wait."""
        with self._lock:
            self._is_open = False
            waiting = [entry for queue in self._ready.values() for entry in queue]
            self._ready.clear()
            self._drains.clear()
            return waiting

    @property
    def waiting(self) -> int:
        return sum(map(len, self._ready.values()))

    @property
    def room(self) -> int:
        """How many more entries are welcome: a chunk now for each free process, and another one for each that can be
        expected to end its chunk soon. What it can not run in time is better left to other workers."""
        with self._lock:
            if not self._is_open:
                return 0
            chunks = free = self._slots() - len(self.in_flight)
            if self._row_s is None or self._row_s < self._settings.chunk_time_box_s:
                lately = self._clock.now_us() - 2e6 * self._settings.chunk_time_box_s
                chunks += free + sum(began > lately for began in self.in_flight.values())
            return max(chunks * self._size() - self.waiting, 0)

    # -- out --------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Fills the pool. A solo pool runs the chunk inside this call, and then calls us back from within."""
        with self._lock:
            if self._is_pumping:
                return
            self._is_pumping = True
        try:
            while (job := self._next_job()) is not None:
                if self._send(job):
                    self._soon(self.pump)  # it ran inline: the loop may look after its messages in between
                    return
        finally:
            with self._lock:
                self._is_pumping = False
            self.on_room()

    def _next_job(self) -> Job | None:
        with self._lock:
            self._drop_late()  # first, so that a pool that is busy for long does not let them pile up
            if not self._is_open or monotonic() < self._rests_until:
                return None
            free = self._slots() - len(self.in_flight)
            if free <= 0:
                return None
            waiting = self.waiting
            # When both wait they take turns: neither a backlog nor a stream of fresh tasks starves the other.
            if self._drains_next or not waiting:
                job = self._next_drain()
                if job is not None:
                    self._drains_next = False
                    return job
            if not waiting:
                return None
            self._drains_next = True
            return Job(tuple(self._take_ready(min(self._size(), -(-waiting // free)))), events=self.sends_events())

    def _next_drain(self) -> Job | None:
        for queue, drain in self._drains.items():
            if not drain.chunks or drain.is_deep:
                drain.chunks += 1
                self._drains[queue] = self._drains.pop(queue)  # the next one's turn comes first
                return Job((), queue, tuple(drain.priorities), self._size(), self.sends_events())
        return None

    def _ask(self, queue: str, priorities: Iterable[int]) -> None:
        drain = self._drains.setdefault(queue, Drain(set()))
        drain.priorities.update(priorities)
        drain.is_asked_again = drain.chunks > 0

    def _drop_late(self) -> None:
        """What is late belongs to the table, where every worker helps."""
        late_before = self._clock.now_us() - int(self._settings.grace_s * 1e6)
        for priority, queue in self._ready.items():
            dropped = 0
            while queue and queue[0].due_us < late_before:
                self._ask(queue.popleft().queue, (priority,))
                dropped += 1
            if dropped:
                self._events.emit("entry.late", count=dropped)

    def _take_ready(self, count: int) -> list[Entry]:
        taken: list[Entry] = []
        for priority in sorted(self._ready, reverse=True):
            queue = self._ready[priority]
            while queue and len(taken) < count:
                taken.append(queue.popleft())
            if not queue:
                del self._ready[priority]
        return taken

    def _size(self) -> int:
        if self._row_s is None:
            return FIRST_SIZE
        fitting = self._settings.chunk_time_box_s / max(self._row_s, 1e-6)
        return int(min(max(fitting, 1), self._settings.chunk_max))

    def _slots(self) -> int:
        return int(getattr(self._pool, "num_processes", None) or self._pool.limit or 1)

    def _send(self, job: Job) -> bool:
        """True if the job is over already, as in a solo pool."""
        with self._lock:
            self._jobs += 1
            number = self._jobs
            self.in_flight[number] = self._clock.now_us()

        def done(report: Report) -> None:
            self._done(number, job, report)

        def lost(info: Any) -> None:
            self._failed(number, job, info)

        try:
            result = self._pool.apply_async(run_job, args=(job,), callback=done, error_callback=lost)
        except Exception as error:
            self._failed(number, job, error)
            return False
        if number not in self.in_flight:
            return True
        if result is None:
            self._failed(number, job, "the pool takes no more work")
        return False

    def _done(self, number: int, job: Job, report: Any) -> None:
        if not isinstance(report, Report):
            self._failed(number, job, report)
            return
        with self._lock:
            self.in_flight.pop(number, None)
            if report.ran:
                row_s = report.seconds / report.ran
                known = row_s if self._row_s is None else self._row_s
                self._row_s = known + LEARNING * (row_s - known)
            if job.drain is not None:
                self._drained(job.drain, job.priorities, report.is_full)
        if report.early:
            self._rearm(report.early)
        self._soon(self.pump)

    def _drained(self, queue: str, priorities: Sequence[int], is_full: bool) -> None:
        drain = self._drains.get(queue)
        if drain is None and is_full and self._is_open:
            drain = self._drains[queue] = Drain(set(priorities))
        if drain is None:
            return
        drain.chunks = max(drain.chunks - 1, 0)
        if is_full:
            drain.is_deep = True
        elif drain.is_asked_again:
            drain.is_deep = drain.is_asked_again = False
        else:
            del self._drains[queue]

    def _failed(self, number: int, job: Job, info: Any) -> None:
        """A chunk's process died, or the database is away: its rows are the sweep's and the leases' business."""
        with self._lock:
            self.in_flight.pop(number, None)
            self._rests_until = monotonic() + REST_S
            if job.drain is not None:
                self._drains.pop(job.drain, None)  # the next sweep's token begins anew
        self._events.emit("chunk.failed", error=str(getattr(info, "exception", info)))
        timer = threading.Timer(REST_S, self._soon, (self.pump,))
        timer.daemon = True
        timer.start()
