"""Renews the leases of the rows that the pool runs, and ends those of processes that died.

This happens in the main process: a processor that holds the GIL for minutes, or runs C code, is
alive as long as its process is. The rows of a process that died are released immediately, and
other processes run them again.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from delaytasks.loops import Loop
from delaytasks.maintenance.sweeper import POLLING_PREFIX, emit_recovered
from delaytasks.model.clock import from_us, monotonic
from delaytasks.model.inputs import ALL_QUEUES
from delaytasks.model.task import Entry, Level
from delaytasks.settings import SILENT_SWEEPS
from delaytasks.worker.celery_patches import running_pids

if TYPE_CHECKING:
    from delaytasks.worker.worker_runtime import WorkerRuntime

#: The longest time between two checks of the pool's processes.
PROCESS_CHECK_S = 1.0
#: Chunks that run for a shorter part of their lease need no renewal yet. Most chunks end before.
YOUNG_CHUNK_PART = 1 / 4


class LeaseKeeper:
    """Each turn of the loop does this, in this order:

    1. It notes the processes that died since the last turn, and tells the dispatcher.
    2. It renews the leases of the rows of the other processes, when they are due for it.
    3. It releases the rows of the processes that died, and starts drains for them, now and in the
       next turn.
    4. It refreshes the clock, which follows the clock of the database.

    After an error, which is logged, the next turn begins a second later.
    """

    def __init__(self, worker: WorkerRuntime) -> None:
        runtime = worker.runtime
        self._leases = runtime.store.leases
        self._clock = runtime.clock
        self._settings = runtime.settings
        self._events = runtime.events
        self._registry = runtime.registry
        self._processes = worker.processes
        self._dispatcher = worker.dispatcher
        self._pool = worker.celery_worker.pool
        self._hub = worker.celery_worker.hub
        self._known_pids: set[int] = set()
        #: The names of processes that died, whose rows have yet to be released.
        self._dead: set[str] = set()
        #: The levels of rows that the last turn released.
        self._released: Collection[Level] = ()
        self._renewed_at = monotonic()
        #: The rows that the last renewal skipped, because other transactions had locked them. Each
        #: turn tries again: after the lock, a sweep would recover a row whose lease has ended.
        self._locked: Sequence[int] = ()
        self._lease_s = self._settings.lease_s
        self._check_s = min(PROCESS_CHECK_S, self._lease_s / 6)
        # Leases are renewed after a third of their time. If that thread is stuck, and the next
        # one is stuck as well, there is still time for a third one.
        close = runtime.store.close
        self.loop = Loop("leases", self._turn, self._events, self._lease_s / 6, close)

    def _turn(self) -> float:
        alive = self._find_dead()
        self._renew(alive)  # first, so that dead processes cannot delay it
        self._start_drains()  # a second time for what the last turn released
        self._released = ()
        if self._dead:
            self._release_dead()
        self._clock.refresh_if_due()
        return self._check_s

    def _find_dead(self) -> set[int]:
        """Return the processes that are alive, and note those that died."""
        # The last report of a process may arrive after its death was found.
        _, detached_rows = self._dispatcher.running()
        alive = self._alive_pids()
        for pid in (self._known_pids | detached_rows.keys()) - alive:
            self._dead.add(self._processes.name(pid))
            self._dispatcher.process_died(pid)
        self._known_pids = alive
        return alive

    def _release_dead(self) -> None:
        dead = sorted(self._dead)
        recovered = self._leases.release(
            dead, self._settings.max_lost_leases, self._registry.time_limits
        )
        self._dead.difference_update(dead)
        emit_recovered(self._events, recovered, reason="a pool process died")
        self._released = recovered.levels
        self._start_drains()

    def _start_drains(self) -> None:
        """Run released rows here now, and not only after the next sweep.

        The first look may skip one: MariaDB and MySQL lock rows of other queues for as long as a
        claim looks at them, and the claims of several queues begin at the same time here.
        """
        for queue, priority in self._released:
            if serves(self._processes.queues, queue):
                self._dispatcher.start_drain(queue, (priority,))

    def _renew(self, alive: set[int]) -> None:
        starts, detached_rows = self._dispatcher.running()
        detached = [id for pid, ids in detached_rows.items() if pid in alive for id in ids]
        now_us = self._clock.now_us()
        oldest_began_us = min(starts, default=now_us)
        names = [self._processes.name(pid) for pid in alive]
        if self._is_renewal_due((now_us - oldest_began_us) / 1e6, detached):
            # This includes rows that were claimed up to one lease before the oldest chunk began,
            # since clocks differ by less. A row that got lost on the way is recovered one lease
            # later.
            claimed_since = from_us(int(oldest_began_us - self._lease_s * 1e6))
            asked_at = monotonic()
            self._locked = self._leases.renew(names, claimed_since, detached).skipped
            self._renewed_at = monotonic()
            self._processes.renewals.record(asked_at, self._renewed_at, self._lease_s)
        elif self._locked:
            self._locked = self._leases.renew(names, from_us(now_us), self._locked).skipped

    def _is_renewal_due(self, oldest_age_s: float, detached: Sequence[int]) -> bool:
        """Whether this turn has to renew leases.

        `oldest_age_s` is how long the oldest chunk has run, and `detached` has the rows that
        still run although their chunk is over.
        """
        if monotonic() - self._renewed_at < self._lease_s / 3 - PROCESS_CHECK_S:
            return False
        if detached:  # their chunks are not among those with a known age
            return True
        return oldest_age_s > self._lease_s * YOUNG_CHUNK_PART

    def _alive_pids(self) -> set[int]:
        pids = running_pids(self._pool)
        dead = set(filter(has_exited, pids))
        if dead and self._hub is not None:
            # Celery checks the pool when a process closes its pipe, which may be a moment too
            # early, and then only after 5 s.
            self._hub.call_soon(self._pool.maintain_pool)
        return pids - dead


def has_exited(pid: int) -> bool:
    """Return whether a child process is dead, which its parent's pool may not know yet."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except AttributeError:  # older macOS
        return False
    except ChildProcessError:
        # It is this process, in which a pool of threads runs tasks. Or it is a child that was
        # waited for already, as happens whenever Python starts another child.
        return not is_there(pid)


def is_there(pid: int) -> bool:
    """Return whether a process with this id exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


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


def serves(queues: Sequence[str], queue: str) -> bool:
    return ALL_QUEUES in queues or queue in queues
