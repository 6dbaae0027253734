"""Everything that waits in a worker, shard by shard, and the next chunk of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from delaytasks.core.clock import Clock
from delaytasks.core.events import Events
from delaytasks.core.interfaces import Entry, by_shard
from delaytasks.core.settings import Settings
from delaytasks.execution.chunk import ChunkSize
from delaytasks.execution.runner import Report
from delaytasks.worker.job import Job
from delaytasks.worker.shard_queue import ShardQueue
from delaytasks.worker.unfinished_work import UnfinishedWork
from delaytasks.worker.waitlists import SERVE_ALONE_S, SERVE_S


class ChunkQueue:
    """Not thread-safe: the lock of the dispatcher guards it.

    `pool_size` is how many processes the pool has, each of which runs one chunk at a time.
    `row_budget` is how many rows may be claimed in all; None means any number.
    """

    def __init__(
        self,
        settings: Settings,
        clocks: Sequence[Clock],
        events: Events,
        pool_size: Callable[[], int],
        row_budget: int | None,
    ) -> None:
        self._settings = settings
        self._events = events
        self._pool_size = pool_size
        #: How many more rows may be claimed.
        self.row_budget = row_budget
        #: The queue of each shard, by its number.
        self.shard_queues = [
            ShardQueue(number, clock, len(clocks) == 1) for number, clock in enumerate(clocks)
        ]
        #: The same ones in the order of their turns.
        self._turns = list(self.shard_queues)
        self._size = ChunkSize(settings.chunk_time_box_s, settings.chunk_max)
        self._jobs = 0

    def add(self, entries: Sequence[Entry]) -> None:
        """Add entries that are due. Those of a shard that is unknown here are left to others."""
        for shard, some in by_shard(entries, len(self.shard_queues)).items():
            self.shard_queues[shard].add(some)

    def clear(self) -> UnfinishedWork:
        """Forget everything that waits, and return it."""
        queues = [
            (queue, priorities, shard_queue.shard)
            for shard_queue in self.shard_queues
            for queue, priorities in shard_queue.unfinished_queues.items()
        ]
        entries = [entry for shard_queue in self.shard_queues for entry in shard_queue.clear()]
        return UnfinishedWork(entries, queues)

    @property
    def waiting(self) -> int:
        """How many entries wait."""
        return sum(one.waiting for one in self.shard_queues)

    @property
    def free_processes(self) -> int:
        return self._pool_size() - sum(len(one.in_flight) for one in self.shard_queues)

    def capacity(self, coming: int) -> int:
        """Return how many more entries can run in time.

        `coming` entries are on their way already. The capacity is one time budget of tasks for each
        free process, and another one for each process that will probably end its chunk soon. Other
        entries are left to other workers. The result is 0 while less than half of the capacity is
        free, since it costs as much to bring few entries as to bring many.
        """
        budgets = free = self.free_processes
        if self._size.fits:
            soon_s = 2 * self._settings.chunk_time_box_s
            budgets += free + sum(one.began_within(soon_s) for one in self.shard_queues)
        most = budgets * self._size.brought
        waiting = coming + sum(one.waiting for one in self.shard_queues if one.may_send())
        return most - waiting if 2 * waiting <= most else 0

    def grace_s(self, queue: str) -> float:
        """Return how late an entry of the queue may come."""
        waits_s = (one.backlog_wait_s(queue) for one in self.shard_queues)
        return self._settings.grace_s + max(waits_s)

    def held_up_in_s(self) -> float:
        """Return in how many seconds a drain may have another chunk because one takes long."""
        return min(one.held_up_in_s() for one in self.shard_queues)

    def drop_late(self) -> None:
        """Leave late entries to the table."""
        for shard_queue in self.shard_queues:
            dropped = shard_queue.drop_late(self._settings.grace_s)
            if dropped:
                self._events.emit("entry.late", count=dropped)

    def next_job(self, sends_events: bool) -> tuple[int, Job] | None:
        """Return the next chunk and its number, or None if none may be sent. Shards take turns."""
        free, budget = self.free_processes, self.row_budget
        size = self._size.rows if budget is None else min(self._size.rows, budget)
        if free <= 0 or size <= 0:
            return None
        for shard_queue in self._turns:
            has_all_others = 0 < len(shard_queue.in_flight) == self._pool_size() - 1
            if not shard_queue.may_send() or (has_all_others and not shard_queue.may_take_last()):
                continue
            number = self._jobs + 1
            job = shard_queue.next_job(number, size, free, sends_events, self._size.least)
            if job is not None:
                self._jobs = number
                self._turns.remove(shard_queue)
                self._turns.append(shard_queue)
                return number, self._with_budgets(job, free)
        return None

    def _with_budgets(self, job: Job, free: int) -> Job:
        if self.row_budget is not None:
            self.row_budget -= job.limit
            return job
        serve_s = 0.0 if job.is_probe else SERVE_S if free > 1 else SERVE_ALONE_S
        return job._replace(serve_s=serve_s)

    def chunk_ended(self, number: int, job: Job, ran: int) -> None:
        """Record that the pool has this chunk no more."""
        was_in_flight = self.shard_queues[job.shard].in_flight.pop(number, None) is not None
        if was_in_flight and self.row_budget is not None:
            self.row_budget += max(job.limit - ran, 0)

    def learn_size(self, report: Report) -> None:
        """Adapt the size of chunks to how long this one took."""
        self._size.learn(report.ran, report.seconds, report.wanted)
