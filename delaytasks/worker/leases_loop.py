"""Renews the leases of the rows that the pool runs, and ends those of processes that died.

This happens in the main process: a processor that holds the GIL for minutes, or runs C code, is
alive as long as its process is. The rows of a process that died are released immediately, and
other processes run them again.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from delaytasks.loops import Loop
from delaytasks.model.clock import from_us, monotonic
from delaytasks.model.task import Level
from delaytasks.worker.pool import running_pids
from delaytasks.worker.processes import serves
from delaytasks.worker.sweep import emit_recovered

if TYPE_CHECKING:
    from delaytasks.worker.worker_runtime import WorkerRuntime

#: The longest time between two checks of the pool's processes.
PROCESS_CHECK_S = 1.0
#: Chunks that run for a shorter part of their lease need no renewal yet. Most chunks end before.
YOUNG_CHUNK_PART = 1 / 4


class LeasesLoop:
    """Each turn of the loop does this, in this order:

    1. It notes the processes that died since the last turn, and tells the dispatcher.
    2. It renews the leases of the rows of the other processes, when they are due for it.
    3. It releases the rows of the processes that died, and starts drains for them, now and in the
       next turn.
    4. It refreshes the clock, which follows the clock of the database.

    After an error, which is logged, the next turn begins a second later.
    """

    def __init__(self, worker: WorkerRuntime) -> None:
        self._runtime = runtime = worker.runtime
        self._processes = worker.processes
        self._dispatcher = worker.dispatcher
        self._celery_worker = worker.celery_worker
        self._known_pids: set[int] = set()
        #: The names of processes that died, whose rows have yet to be released.
        self._dead: set[str] = set()
        #: The levels of rows that the last turn released.
        self._released: Collection[Level] = ()
        self._renewed_at = monotonic()
        #: The rows that the last renewal skipped, because other transactions had locked them. Each
        #: turn tries again: after the lock, a sweep would recover a row whose lease has ended.
        self._locked: Sequence[int] = ()
        self._lease_s = runtime.settings.lease_s
        # Leases are renewed after a third of their time. If that thread is stuck, and the next
        # one is stuck as well, there is still time for a third one.
        close = runtime.store.close
        self.loop = Loop("leases", self._turn, runtime.events, self._lease_s / 6, close)

    def _turn(self) -> float:
        alive = self._find_dead()
        self._renew(alive)  # first, so that dead processes cannot delay it
        self._start_drains()  # a second time for what the last turn released
        self._released = ()
        if self._dead:
            self._release_dead()
        self._runtime.clock.refresh_if_due()
        return min(PROCESS_CHECK_S, self._lease_s / 6)

    def _find_dead(self) -> set[int]:
        """Return the processes that are alive, and note those that died."""
        # The last report of a process may arrive after its death was found.
        _, detached_rows = self._dispatcher.running()
        pids = running_pids(self._celery_worker.pool)
        exited = set(filter(has_exited, pids))
        if exited and self._celery_worker.hub is not None:
            # Celery checks the pool when a process closes its pipe, which may be a moment too
            # early, and then only after 5 s.
            self._celery_worker.hub.call_soon(self._celery_worker.pool.maintain_pool)
        alive = pids - exited
        for pid in (self._known_pids | detached_rows.keys()) - alive:
            self._dead.add(self._processes.name(pid))
            self._dispatcher.process_died(pid)
        self._known_pids = alive
        return alive

    def _release_dead(self) -> None:
        dead, runtime = sorted(self._dead), self._runtime
        most, time_limits = runtime.settings.max_lost_leases, runtime.registry.time_limits
        recovered = runtime.store.leases.release(dead, most, time_limits)
        self._dead.difference_update(dead)
        emit_recovered(runtime.events, recovered, reason="a pool process died")
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
        now_us = self._runtime.clock.now_us()
        oldest_began_us = min(starts, default=now_us)
        names, leases = [self._processes.name(pid) for pid in alive], self._runtime.store.leases
        young_us = self._lease_s * YOUNG_CHUNK_PART * 1e6
        # The chunks of detached rows have ended, so that their age is unknown.
        has_old_rows = bool(detached) or now_us - oldest_began_us > young_us
        is_time = monotonic() - self._renewed_at >= self._lease_s / 3 - PROCESS_CHECK_S
        if is_time and has_old_rows:
            # This includes rows that were claimed up to one lease before the oldest chunk began,
            # since clocks differ by less. A row that got lost on the way is recovered one lease
            # later.
            claimed_since = from_us(int(oldest_began_us - self._lease_s * 1e6))
            asked_at = monotonic()
            self._locked = leases.renew(names, claimed_since, detached).skipped
            self._renewed_at = monotonic()
            self._processes.renewals.record(asked_at, self._renewed_at, self._lease_s)
        elif self._locked:
            self._locked = leases.renew(names, from_us(now_us), self._locked).skipped


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
