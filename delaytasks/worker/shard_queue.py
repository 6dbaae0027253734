"""The queue of one shard in a worker: entries that are due, drains of queues, and waitlists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import TYPE_CHECKING

from delaytasks.core.clock import Clock, monotonic
from delaytasks.core.interfaces import Entry
from delaytasks.execution.failure_reason import FailureReason
from delaytasks.execution.runner import Report
from delaytasks.worker.chunk_request import ChunkRequest
from delaytasks.worker.queue_drain import QueueDrain
from delaytasks.worker.ready_entries import ReadyEntries

if TYPE_CHECKING:
    from delaytasks.limits.tracked_waitlists import TrackedWaitlists

#: After a chunk found the database unavailable, the pool gets no chunk of the shard for this long.
FAILED_SHARD_PAUSE_S = 1.0
#: A shard that has not answered a question for this long gets no chunk.
SHARD_ANSWER_S = 2.0
#: A chunk that takes longer is in a processor, and no longer at its claim.
LONG_CHUNK_S = 1.0
#: A late entry is left to the table. If its queue has a backlog there, the task would come last,
#: so its entry waits here for this much longer.
BACKLOG_WAIT_S = 10.0
#: How long a process continues with a deep queue before it reports, and how long if other queues or
#: shards have drains too. It reports earlier if other tasks wait.
CONTINUE_S, CONTINUE_IN_TURN_S = 2.0, 0.5


class ShardQueue:
    """Not thread-safe: the lock of the dispatcher guards it.

    If there are several shards, a shard that failed or does not answer gets no chunk until it has
    answered a question that another thread asks. While it is uncertain whether a shard answers,
    that shard leaves one process of the pool to the others.
    """

    def __init__(self, shard: int, clock: Clock, is_only_shard: bool) -> None:
        self.shard = shard
        self.clock = clock
        self._is_only_shard = is_only_shard
        self._asked_at: float | None = None
        self._failed_at = self._sent_at = 0.0
        self._answered_at = monotonic()
        self._paused_until = 0.0
        self.is_down = False
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

    def drop_late(self, grace_s: float) -> int:
        """Leave late entries to the table, where all workers can claim them. Return how many."""
        late_before = self.clock.now_us() - int(grace_s * 1e6)
        late = self._ready.remove_late(late_before, self.backlog_wait_s)
        self._leave_to_table(late)
        return len(late)

    def drop_burst(self, most: int) -> int:
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

    def take_left_to_table(self) -> dict[str, set[int]]:
        """Return the priorities of each queue whose entries were left since the last call."""
        left, self._left_to_table = self._left_to_table, {}
        return left

    def backlog_wait_s(self, queue: str) -> float:
        """Return how much longer late entries of the queue wait here."""
        drain = self._drains.get(queue)
        return BACKLOG_WAIT_S if drain is not None and drain.is_deep else 0.0

    def clear(self) -> list[Entry]:
        """Forget everything that waits, and return the entries."""
        self._drains.clear()
        self._left_to_table.clear()
        self.waitlists = None
        return self._ready.clear()

    @property
    def unfinished_queues(self) -> dict[str, set[int]]:
        """The priorities of each queue's drain. The set is empty if it only has waitlists."""
        waitlist_queues = self.waitlists.queues if self.waitlists else ()
        priorities: dict[str, set[int]] = {queue: set() for queue in waitlist_queues}
        return priorities | {queue: drain.priorities for queue, drain in self._drains.items()}

    @property
    def drain_count(self) -> int:
        """How many queues are drained, or wait for their turn."""
        return len(self._drains)

    @property
    def needs_process(self) -> bool:
        """Whether tasks wait for which no process works, so that none should continue a drain.

        These are entries that are due, a drain without a chunk, or a waitlist.
        """
        return self.may_send() and bool(
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

    def soon_over(self, seconds: float) -> int:
        """Return how many chunks began in the last `seconds`, or end soon if other tasks wait."""
        recent = self.clock.now_us() - seconds * 1e6
        return sum(
            began > recent or number in self._continuing for number, began in self.in_flight.items()
        )

    def update_waitlists(self, report: Report, request: ChunkRequest) -> float | None:
        """Record the waitlists that a chunk reports.

        Return the number of seconds until a further check is needed, or None.
        """
        if self.waitlists is None and not report.waitlists:
            return None
        # Imported here: most shards have no limits.
        from delaytasks.limits.tracked_waitlists import PROBE_S, TrackedWaitlists

        if self.waitlists is None:
            self.waitlists = TrackedWaitlists()
        was_probe = request.is_probe and report.seconds < PROBE_S
        return self.waitlists.update(report.waitlists, request.waitlist, was_probe)

    @property
    def waitlist_check_due_in_s(self) -> float:
        """In how many seconds the next check of a waitlist is due."""
        return inf if self.waitlists is None else self.waitlists.next_check_due_in_s

    # -- the state of the shard -------------------------------------------------------------------

    def may_send(self) -> bool:
        """Whether the pool may get chunks of this shard."""
        if monotonic() < self._paused_until:
            return False
        return self._is_only_shard or (self._failed_at < self._answered_at and not self.is_silent())

    def may_take_last(self) -> bool:
        """Whether the shard may use the last free process, while all others have its chunks."""
        return self._is_only_shard or self._answered_at > self._sent_at + LONG_CHUNK_S

    def chunk_sent(self, request: ChunkRequest) -> None:
        self._sent_at = monotonic()
        self.in_flight[request.number] = self.clock.now_us()
        self._continuing &= self.in_flight.keys()
        if request.continue_s:
            self._continuing.add(request.number)

    def mark_failed(self) -> None:
        self._failed_at = monotonic()
        self._paused_until = self._failed_at + FAILED_SHARD_PAUSE_S

    def set_detached(self, pid: int, ids: Sequence[int]) -> None:
        """Record the rows that still run in a process whose chunk has ended."""
        if ids:
            self.detached[pid] = ids
        else:
            self.detached.pop(pid, None)

    def needs_question(self) -> bool:
        """Whether the shard should be asked. It need not be while nothing waits for it."""
        has_work = self.in_flight or self._ready or self._drains or self.waitlists
        return bool(has_work) or not self.may_send()

    def mark_asked(self) -> None:
        if self._asked_at is None:
            self._asked_at = monotonic()

    def mark_answered(self) -> None:
        self._asked_at = None
        self._answered_at = monotonic()

    def mark_up(self) -> None:
        """Record an answer to a question, after which the shard is no longer down."""
        self.is_down = False
        self.mark_answered()

    def mark_down(self) -> None:
        self.is_down = True

    def is_silent(self) -> bool:
        return self._asked_at is not None and monotonic() - self._asked_at > SHARD_ANSWER_S

    # -- chunks -----------------------------------------------------------------------------------

    def extra_chunk_in_s(self) -> float:
        """Return in how many seconds a drain may have another chunk because one takes long."""
        if not self.may_send():
            return inf
        return min((drain.extra_chunk_in_s() for drain in self._drains.values()), default=inf)

    def next_chunk(
        self, number: int, size: int, free: int, at_least: int = 1
    ) -> ChunkRequest | None:
        """Return chunk `number`, of at most `size` rows.

        Entries, waitlists and drains take turns, so that none of them starves the others. The
        `free` processes share the waiting entries, but no chunk gets less than `at_least`.
        """
        share = min(size, max(-(-self.waiting // free), at_least))
        sources = {
            "entries": lambda: self._entry_chunk(number, share),
            "waitlists": lambda: self._waitlist_chunk(number, size),
            "drains": lambda: self._drain_chunk(number, size),
        }
        for name in self._source_turns:
            request = sources[name]()
            if request is not None:
                self._source_turns.remove(name)
                self._source_turns.append(name)
                return request
        return None

    def _entry_chunk(self, number: int, size: int) -> ChunkRequest | None:
        if not self._ready:
            return None
        return ChunkRequest(tuple(self._ready.pop(size)), shard=self.shard, number=number)

    def _waitlist_chunk(self, number: int, size: int) -> ChunkRequest | None:
        visit = self.waitlists.next_visit() if self.waitlists else None
        if visit is None:
            return None
        return ChunkRequest(
            (),
            limit=size,
            shard=self.shard,
            number=number,
            waitlist=visit.waitlist,
            is_probe=visit.is_probe,
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
                    shard=self.shard,
                    number=number,
                    continue_s=self._continue_s if drain.is_deep else 0.0,
                )
        return None

    @property
    def _continue_s(self) -> float:
        is_alone = self._is_only_shard and len(self._drains) == 1
        return CONTINUE_S if is_alone else CONTINUE_IN_TURN_S

    def drain_chunk_ended(self, request: ChunkRequest, queue: str, is_full: bool) -> None:
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

    def drain_chunk_failed(self, request: ChunkRequest, queue: str, reason: FailureReason) -> None:
        """End the drain, unless only the process died: other processes continue it then.

        The next chunk would meet the same rows, and fail again and again without a pause. The next
        sweep requests it again.
        """
        if reason is not FailureReason.PROCESS_LOST:
            self._drains.pop(queue, None)
        elif (drain := self._drains.get(queue)) is not None:
            drain.chunks.pop(request.number, None)
