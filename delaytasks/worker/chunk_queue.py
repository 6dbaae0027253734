"""Everything that waits in a worker, shard by shard, and the next chunk of it."""

from __future__ import annotations

from collections.abc import Sequence

from delaytasks.core.chunk_size import ChunkSize
from delaytasks.core.clock import Clock
from delaytasks.core.events import Events
from delaytasks.core.interfaces import Entry, by_shard
from delaytasks.core.settings import Settings
from delaytasks.execution.failure_reason import FailureReason
from delaytasks.execution.runner import Report
from delaytasks.worker.chunk_request import ChunkRequest
from delaytasks.worker.pool import Pool
from delaytasks.worker.shard_queue import ShardQueue
from delaytasks.worker.shared_memory import OthersWait
from delaytasks.worker.unfinished_work import UnfinishedWork

#: How long one process serves waitlists before its next chunk may be of another kind: the first
#: bound applies while another process is free, the second one otherwise.
SERVE_S, SERVE_ALONE_S = 1.0, 0.05

#: A burst is more than the work of the pool for this number of time budgets.
BURST_BUDGETS = 5


class ChunkQueue:
    """Not thread-safe: the lock of the dispatcher guards it.

    Each process of the pool runs one chunk at a time. `row_budget` is how many rows may be claimed
    in all; None means any number.
    """

    def __init__(
        self,
        settings: Settings,
        clocks: Sequence[Clock],
        events: Events,
        pool: Pool,
        others_wait: OthersWait,
        row_budget: int | None,
    ) -> None:
        self._settings = settings
        self._events = events
        self._pool = pool
        self._others_wait = others_wait
        #: How many more rows may be claimed.
        self.row_budget = row_budget
        #: The queue of each shard, by its number.
        self.shard_queues = [
            ShardQueue(number, clock, len(clocks) == 1) for number, clock in enumerate(clocks)
        ]
        #: The same ones in the order of their turns.
        self._shard_turns = list(self.shard_queues)
        self._size = ChunkSize(settings.chunk_time_budget_s, settings.chunk_max)
        self._last_number = 0

    def add(self, entries: Sequence[Entry]) -> None:
        """Add entries that are due. Those of a shard that is unknown here are left to others."""
        for shard, some in by_shard(entries, len(self.shard_queues)).items():
            self.shard_queues[shard].add(some)

    def clear(self) -> UnfinishedWork:
        """Forget everything that waits, and return it. Processes report soon."""
        self._others_wait.record(True)
        queues = [
            (queue, priorities, shard_queue.shard)
            for shard_queue in self.shard_queues
            for queue, priorities in shard_queue.unfinished_queues.items()
        ]
        entries = [entry for shard_queue in self.shard_queues for entry in shard_queue.clear()]
        return UnfinishedWork(entries, queues)

    def take_left_to_table(self) -> UnfinishedWork:
        """Return the queues whose entries were left to the table since the last call."""
        queues = [
            (queue, priorities, one.shard)
            for one in self.shard_queues
            for queue, priorities in one.take_left_to_table().items()
        ]
        return UnfinishedWork([], queues)

    @property
    def waiting(self) -> int:
        """How many entries wait."""
        return sum(one.waiting for one in self.shard_queues)

    @property
    def free_processes(self) -> int:
        return self._pool.size - sum(len(one.in_flight) for one in self.shard_queues)

    def capacity(self, coming: int) -> int:
        """Return how many more entries can run in time.

        `coming` entries are on their way already. The capacity is one time budget of tasks for each
        free process, and another one for each process that will probably end its chunk soon. Other
        entries are left to other workers. The result is 0 while less than half of the capacity is
        free, since it costs as much to bring few entries as to bring many.
        """
        budgets = free = self.free_processes
        if self._size.fits:
            soon_s = 2 * self._settings.chunk_time_budget_s
            budgets += free + sum(one.soon_over(soon_s) for one in self.shard_queues)
        most = budgets * self._size.prefetch
        waiting = coming + sum(one.waiting for one in self.shard_queues if one.may_send())
        return most - waiting if 2 * waiting <= most else 0

    def grace_s(self, queue: str) -> float:
        """Return how late an entry of the queue may come."""
        waits_s = (one.backlog_wait_s(queue) for one in self.shard_queues)
        return self._settings.grace_s + max(waits_s)

    def extra_chunk_in_s(self) -> float:
        """Return in how many seconds a drain may have another chunk because one takes long."""
        return min(one.extra_chunk_in_s() for one in self.shard_queues)

    def drop_late(self) -> None:
        """Leave late entries to the table, and bursts, whose last entries would be late."""
        for shard_queue in self.shard_queues:
            dropped = shard_queue.drop_late(self._settings.grace_s)
            if self._size.is_limited_by_time:
                most = int(self._pool.size * BURST_BUDGETS * self._size.in_time)
                dropped += shard_queue.drop_burst(most)
            if dropped:
                self._events.emit("entry.late", count=dropped)

    def next_chunk(self) -> ChunkRequest | None:
        """Return the next chunk, or None if none may be sent. Shards take turns."""
        request = self._next_chunk()
        self._others_wait.record(any(one.needs_process for one in self.shard_queues))
        return request

    def _next_chunk(self) -> ChunkRequest | None:
        free, budget = self.free_processes, self.row_budget
        size = self._size.rows if budget is None else min(self._size.rows, budget)
        if free <= 0 or size <= 0:
            return None
        for shard_queue in self._shard_turns:
            # A shard leaves one process to the others while it is uncertain whether it answers.
            has_all_others = 0 < len(shard_queue.in_flight) == self._pool.size - 1
            if not shard_queue.may_send() or (has_all_others and not shard_queue.may_take_last()):
                continue
            number = self._last_number + 1
            request = shard_queue.next_chunk(number, size, free, self._size.least)
            if request is not None:
                self._last_number = number
                self._shard_turns.remove(shard_queue)
                self._shard_turns.append(shard_queue)
                return self._with_budgets(request, free)
        return None

    def _with_budgets(self, request: ChunkRequest, free: int) -> ChunkRequest:
        if self.row_budget is not None:
            self.row_budget -= request.limit
            return request._replace(continue_s=0.0)
        if self._pool.runs_inline:
            request = request._replace(continue_s=0.0)
        serve_s = 0.0 if request.is_probe else SERVE_S if free > 1 else SERVE_ALONE_S
        return request._replace(serve_s=serve_s)

    def chunk_ended(self, request: ChunkRequest, ran: int) -> None:
        """Record that the pool has this chunk no more."""
        began = self.shard_queues[request.shard].in_flight.pop(request.number, None)
        if began is not None and self.row_budget is not None:
            self.row_budget += max(request.limit - ran, 0)

    def continue_after(self, request: ChunkRequest, report: Report) -> float | None:
        """Decide by the report whether the drain and the waitlists of its chunk go on.

        Return the number of seconds until a waitlist has to be checked, or None.
        """
        shard_queue = self.shard_queues[request.shard]
        if request.drained_queue is not None:
            shard_queue.drain_chunk_ended(request, request.drained_queue, report.is_full)
        return shard_queue.update_waitlists(report, request)

    def chunk_failed(self, request: ChunkRequest, reason: FailureReason, ran: int) -> None:
        """Record that a chunk failed as a whole."""
        shard_queue = self.shard_queues[request.shard]
        self.chunk_ended(request, ran)
        if request.drained_queue is not None:
            shard_queue.drain_chunk_failed(request, request.drained_queue, reason)
        if request.waitlist is not None and shard_queue.waitlists is not None:
            shard_queue.waitlists.visit_failed(request.waitlist)
        if reason is FailureReason.UNAVAILABLE:
            shard_queue.mark_failed()

    def learn_size(self, report: Report) -> None:
        """Adapt the size of chunks to how long this one took."""
        rows, seconds = report.sample or (report.ran, report.seconds)
        self._size.learn(rows, seconds, report.wanted)
