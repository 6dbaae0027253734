"""Keeps in touch with a shard: follows its clock, and renews the leases of what the pool runs. From the main process: a
processor that holds the GIL for minutes, or sits in C, is alive as long as its process is. What a dead process held is
released at once, and run again by the others."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from delaytasks.core.clock import from_us, monotonic
from delaytasks.core.interfaces import Lapsed
from delaytasks.core.loop import Loop
from delaytasks.maintenance.sweeper import tell_lapsed
from delaytasks.worker.worker_shares import serves

if TYPE_CHECKING:
    from delaytasks.app import DelayTasks
    from delaytasks.sharding.shard import Shard
    from delaytasks.worker.dispatcher import Dispatcher

#: How often the pool's processes are counted, at least.
LOOK_S = 1.0


class LeaseKeeper:
    def __init__(
        self, delays: DelayTasks, shard: Shard, worker: Any, dispatcher: Dispatcher
    ) -> None:
        self._delays = delays
        self._shard = shard
        self._hub = worker.hub
        self._pool = worker.pool
        self._dispatcher = dispatcher
        self._lease_s = delays.settings.lease_s
        self._known: set[int] = set()
        self._dead: set[str] = set()
        self._renewed_at = monotonic()
        self._look_s = min(LOOK_S, self._lease_s / 6)
        # Renewed after a third of it: when a thread is stuck then, and the next one too, there is still time.
        self.loop = Loop(
            shard.named("leases"), self._turn, delays.events, self._lease_s / 6, shard.close
        )

    def _turn(self) -> float:
        delays = self._delays
        alive, lane = self._alive(), self._dispatcher.lanes[self._shard.number]
        for pid in self._known - alive:
            self._dead.add(delays.processes.name(pid))
            lane.left(pid, ())
        self._known = alive
        if not self._dispatcher.shard_health.hear(
            self._shard.number, lambda: self._shard.store.tasks.now()
        ):
            return self._look_s
        if dead := sorted(self._dead):
            lapsed = self._shard.store.leases.release(
                dead, delays.settings.max_lost_leases, delays.registry.time_limits
            )
            self._dead.difference_update(dead)
            tell_lapsed(delays.events, lapsed, reason="a pool process died")
            self._run_again(lapsed)
        now = self._shard.clock.now_us()
        oldest = min(list(lane.in_flight.values()), default=now)
        left = [id for pid, ids in list(lane.running_on.items()) if pid in alive for id in ids]
        is_old = left or now - oldest > self._lease_s * 0.25e6
        if is_old and monotonic() - self._renewed_at >= self._lease_s / 3 - LOOK_S:
            names = [delays.processes.name(pid) for pid in alive]
            # A lease's time of slack: clocks agree better than that, and what was lost on the way lapses a lease later.
            asked_at = monotonic()
            self._shard.store.leases.renew(names, from_us(int(oldest - self._lease_s * 1e6)), left)
            self._renewed_at = monotonic()
            delays.processes.renewals.tell(self._shard.number, asked_at)
        self._shard.clock.refresh_if_due()
        return self._look_s

    def _run_again(self, lapsed: Lapsed) -> None:
        """Here and now, instead of at the next sweep."""
        served = self._delays.processes.queues
        for queue, priority in lapsed.levels:
            if serves(served, queue):
                self._dispatcher.drain(queue, (priority,), self._shard.number)

    def _alive(self) -> set[int]:
        try:
            known = set((self._pool.info or {}).get("processes") or [os.getpid()])
        except AttributeError:
            return set()  # a prefork pool that has stopped knows nothing any more
        dead = set(filter(has_exited, known))
        if dead and self._hub is not None:
            # It looks when the process closes its pipe, which may be too early by a moment; and then after 5 s.
            self._hub.call_soon(self._pool.maintain_pool)
        return known - dead


def has_exited(pid: int) -> bool:
    """Whether a child of ours is dead, which its parent's pool may not know yet."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except AttributeError:  # older macOS
        return False
    except ChildProcessError:
        # This process itself, for threads run in it; or a child that was waited for, as each start of another one does.
        return not is_there(pid)


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
