"""The two quick loops of a worker's main process.

The loop of leases shows that the worker and its processes are alive: it reports the worker in the
table of workers, renews the leases of the rows that the pool runs, and recovers the rows of
processes that died, so that others run them again immediately. This happens in the main process: a
processor that holds the GIL for minutes, or runs C code, is alive as long as its process is.

The loop of policies reads the policies and the requests to cancel tasks once a second, and reports
outages of the database.

Each has a thread of its own. A sweep may take longer than a pause should take to work, and a read
of the policies may take seconds, while a short lease has to be renewed every second.

If the database does not answer, both cut their connections after a few seconds, and the next turn
makes new ones. A worker that is cut off from a primary that was replaced therefore reports to the
new one before others mark it as lost.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Sequence
from math import inf
from typing import TYPE_CHECKING

from delaytasks.db.sweep_queries import PREFORK, ServiceTimes
from delaytasks.loops import Availability, Loop, limit_answers
from delaytasks.model.clock import from_us, monotonic
from delaytasks.model.errors import StoreError, StoreUnavailableError
from delaytasks.model.inputs import POLLING_PREFIX
from delaytasks.model.policies import POLICY_REFRESH_S, Policies
from delaytasks.model.task import Level, Timer
from delaytasks.worker.pool import running_pids
from delaytasks.worker.sweep import emit_recovered

if TYPE_CHECKING:
    from delaytasks.worker.worker_runtime import WorkerRuntime


#: How long a statement of these loops waits for an answer, up to a second more. A worker reports
#: every 5 s, and is lost after a silence of 15 s, so one report may fail in between.
QUICK_ANSWER_S = 4.0


# -- leases and liveness --------------------------------------------------------------------------


#: The longest time between two checks of the pool's processes.
PROCESS_CHECK_S = 1.0
#: Chunks that run for a shorter part of their lease need no renewal yet. Most chunks end before.
YOUNG_CHUNK_PART = 1 / 4


class DatabaseContact:
    """Measures for how long this worker has reported itself without an interruption.

    A worker that could not report cannot tell one that died from one that could not report either.
    A process that was suspended cannot tell.
    """

    def __init__(self, gap_s: float) -> None:
        """After `gap_s` without an answer the contact begins anew."""
        self._gap_s = gap_s
        self._since = self._answered_at = float("-inf")

    def mark_answered(self) -> None:
        now = monotonic()
        if now - self._answered_at > self._gap_s:
            self._since = now
        self._answered_at = now

    def mark_failed(self) -> None:
        self._answered_at = float("-inf")

    def seconds(self) -> float:
        """Return for how long the database has been reached without an interruption."""
        now = monotonic()
        return 0.0 if now - self._answered_at > self._gap_s else now - self._since


class LeasesLoop:
    """Each turn of the loop does this, in this order:

    1. It notes the processes that died since the last turn, and tells the dispatcher.
    2. It renews the leases of the rows of the other processes, when they are due for it.
    3. It reports the worker in the table of workers, once in a sweep interval.
    4. It recovers the rows of the processes that died, and starts drains for them, now and in the
       next turn.
    5. It refreshes the clock, which follows the clock of the database.

    After an error, which is logged, the next turn begins a second later.
    """

    def __init__(self, worker: WorkerRuntime) -> None:
        self._worker = worker
        self._runtime = runtime = worker.runtime
        self._settings = settings = runtime.settings
        self._processes = worker.processes
        self._dispatcher = worker.dispatcher
        self._celery_worker = worker.celery_worker
        self._known_pids: set[int] = set()
        #: The dead processes that the pool has yet to notice.
        self._exited: set[int] = set()
        #: The names of processes that died, whose rows have yet to be recovered.
        self._dead: set[str] = set()
        #: The levels of rows that the last turn recovered.
        self._recovered: Collection[Level] = ()
        self._renewed_at = monotonic()
        self._reported_at = float("-inf")
        self.contact = DatabaseContact(settings.silent_s / 2 + PROCESS_CHECK_S)
        self._has_signed_off = False
        #: Held while the worker's row is written, which is bounded as each turn is.
        self._reporting = threading.Lock()
        #: The rows that the last renewal skipped, because other transactions had locked them. Each
        #: turn tries again: after the lock, a sweep would recover a row whose lease has ended.
        self._locked: Sequence[int] = ()
        self._lease_s = settings.lease_s
        self._pool_prefix = "" if settings.uses_broker else POLLING_PREFIX
        self.loop = Loop("leases", self._turn, runtime.events, answer_s=QUICK_ANSWER_S)

    def _turn(self) -> float:
        # First, since the last report of a process may arrive after its death was found.
        starts, detached_rows = self._dispatcher.running()
        alive = self._find_dead(detached_rows.keys())
        detached = [id for pid, ids in detached_rows.items() if pid in alive for id in ids]
        try:
            self._renew(alive, starts, detached)  # first, so that dead processes cannot delay it
        finally:
            self._report()
        self._start_drains()  # a second time for what the last turn recovered
        self._recovered = ()
        if self._dead:
            self._recover_dead()
        self._runtime.clock.refresh_if_due()
        return min(PROCESS_CHECK_S, self._lease_s / 6, self._settings.sweep_s / 2)

    def _find_dead(self, with_rows: Collection[int]) -> set[int]:
        """Return the processes that are alive, and note those that died, also of `with_rows`."""
        pids = running_pids(self._celery_worker.pool)
        exited = set(filter(has_exited, pids))
        if exited and self._celery_worker.hub is not None:
            # Celery checks the pool when a process closes its pipe, which may be a moment too
            # early, and then only after 5 s.
            self._celery_worker.hub.call_soon(self._celery_worker.pool.maintain_pool)
        alive = pids - exited
        exited_now, self._exited = exited - self._exited, exited
        for pid in self._known_pids.union(exited_now, with_rows) - alive:
            self._dead.add(self._processes.name(pid))
            self._dispatcher.process_died(pid)
        self._known_pids = alive
        return alive

    def _recover_dead(self) -> None:
        dead, runtime = sorted(self._dead), self._runtime
        most, time_limits = self._settings.max_lost_leases, runtime.registry.time_limits
        recovered = runtime.store.leases.recover_dead(dead, most, time_limits)
        self._dead.difference_update(dead)
        emit_recovered(runtime.events, recovered, reason="a pool process died")
        self._recovered = recovered.levels
        self._start_drains()

    def _start_drains(self) -> None:
        """Run recovered rows here now, and not only after the next sweep.

        The first look may skip one: MariaDB and MySQL lock rows of other queues for as long as a
        claim looks at them, and the claims of several queues begin at the same time here.
        """
        for queue, priority in self._recovered:
            self._worker.drain_here(queue, (priority,))

    def _renew(self, alive: set[int], starts: Collection[float], detached: Sequence[int]) -> None:
        now_us = self._runtime.clock.now_us()
        oldest_began_us = min(starts, default=now_us)
        names, leases = [self._processes.name(pid) for pid in alive], self._runtime.store.leases
        young_us = self._lease_s * YOUNG_CHUNK_PART * 1e6
        # The chunks of detached rows have ended, so that their age is unknown.
        has_old_rows = bool(detached) or now_us - oldest_began_us > young_us
        is_time = monotonic() - self._renewed_at >= self._lease_s / 3 - PROCESS_CHECK_S
        if is_time and has_old_rows:
            # This includes rows that were claimed up to one lease before the oldest chunk began,
            # since clocks differ by less. A row that got lost on the way to its process is
            # recovered when the chunks from before its claim have ended, and its lease.
            claimed_since = from_us(int(oldest_began_us - self._lease_s * 1e6))
            asked_at = monotonic()
            self._locked = leases.renew(names, claimed_since, detached).skipped
            self._renewed_at = monotonic()
            self._processes.memory.record_renewal(asked_at, self._renewed_at, self._lease_s)
        elif self._locked:
            self._locked = leases.renew(names, from_us(now_us), self._locked).skipped

    # -- the worker's row -------------------------------------------------------------------------

    def report_soon(self) -> None:
        """Write the worker's row in the next turn, which begins now."""
        self._reported_at = float("-inf")
        self.loop.wake()

    def sign_off(self) -> None:
        """Delete the worker's row. Its leases are renewed as long as its main process lives."""
        self._has_signed_off = True
        limit_answers(QUICK_ANSWER_S)  # the loop needs the lock to renew the leases
        try:
            self._report()
        finally:
            limit_answers(None)

    def _report(self) -> None:
        """Write the worker's row if it is time, or delete it at last. A failure ends no turn.

        A report under way ends before the row is deleted.
        """
        attempt, name = self._runtime.events.attempt, self.loop.name
        with self._reporting:
            if self._has_signed_off:
                attempt(name, "sign off", self._delete_row)  # each turn, as the first one may fail
            elif monotonic() - self._reported_at >= self._settings.sweep_s - PROCESS_CHECK_S:
                self._reported_at = monotonic()  # first: `report_soon` may ask for another one
                if attempt(name, "report", self._write_row):
                    self.contact.mark_answered()
                else:
                    self._reported_at = float("-inf")
                    self.contact.mark_failed()

    def _write_row(self) -> None:
        worker, settings, asked_at = self._celery_worker, self._settings, monotonic()
        reads_beat = settings.uses_broker and settings.default_queue in self._processes.queues
        pool = type(worker.pool).__module__.rpartition(".")[2]
        self._runtime.store.workers.report(
            worker.hostname,
            self._processes.queues,
            self._pool_prefix + pool,
            int(worker.pool.limit or 1),
            int(self._runtime.clock.offset_s * 1e6),
            [processor.tag for processor in self._runtime.registry],
            self._worker.service_watch.times(reads_beat),
            len(self._dispatcher.running()[0]),
        )
        if pool == PREFORK:
            self._processes.memory.record_report(asked_at, monotonic(), settings.lost_s)

    def _delete_row(self) -> None:
        self._runtime.store.workers.remove(self._celery_worker.hostname)
        self._processes.memory.lost_at = inf  # others wait for the end of its leases


class ServiceWatch:
    """Records when a worker lost a service, for the worker's row.

    Each attribute is written as a whole, so that several threads may use it.
    """

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self._broker_lost_at: float | None = None
        self._timer_lost_at: float | None = None
        self._beat_at = monotonic()

    def mark_broker_lost(self) -> None:
        if self._broker_lost_at is None:
            self._broker_lost_at = monotonic()

    @property
    def is_without_service(self) -> bool:
        return self._broker_lost_at is not None or not self._timer.is_up

    def mark_broker_back(self) -> None:
        if self._broker_lost_at is not None:
            self._beat_at = monotonic()  # no message of beat could arrive in the meantime
        self._broker_lost_at = None

    def mark_beat(self) -> None:
        """Record a message of beat."""
        self._beat_at = monotonic()

    def times(self, reads_beat: bool) -> ServiceTimes:
        """Return the present times. `reads_beat`: the worker consumes beat's messages."""
        now = monotonic()
        if self._timer.is_up:
            self._timer_lost_at = None
        elif self._timer_lost_at is None:
            self._timer_lost_at = now
        broker_lost_at, timer_lost_at = self._broker_lost_at, self._timer_lost_at
        return ServiceTimes(
            None if broker_lost_at is None else now - broker_lost_at,
            None if timer_lost_at is None else now - timer_lost_at,
            now - self._beat_at if reads_beat else None,
        )


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


# -- policies and requests to cancel --------------------------------------------------------------


class PoliciesLoop:
    """Passes changed policies and requests on to the dispatcher and to the pool's processes.

    It asks the database each second, so it also logs each outage of the database once when it
    begins and once when it ends. Then it does what a worker does once a second.
    """

    def __init__(self, worker: WorkerRuntime) -> None:
        self._runtime = runtime = worker.runtime
        self._worker = worker
        self._seen: Policies | None = None
        self._seen_requests = 0
        self._database = Availability(
            lambda error: runtime.events.emit("store.down", error=error),
            lambda: runtime.events.emit("store.up"),
        )
        self.loop = Loop("policies", self._turn, runtime.events, answer_s=QUICK_ANSWER_S)

    def _turn(self) -> float:
        try:
            self._read_policies()
        except StoreUnavailableError as error:
            if error.is_locked:
                self._database.answered()
            else:
                self._database.failed(str(error))
        except StoreError:  # the database has answered, with a refusal
            self._database.answered()
            raise
        finally:
            self._worker.watch()
        return POLICY_REFRESH_S

    def _read_policies(self) -> None:
        cache = self._runtime.policy_cache
        cache.is_led = True
        # A sweep reads the policies as well, so that the turn before may know older ones.
        before = self._seen or cache.known
        now = cache.refresh()
        self._database.answered()
        self._seen = now
        if now.stamp != before.stamp:
            self._runtime.events.emit("policies.read")
            self._worker.dispatcher.limits_changed(now.limits_changed_from(before))
        # The same statement reads the number of requests.
        if (requests := cache.cancel_requests) != self._seen_requests:
            self._pass_on_requests()
            self._seen_requests = requests

    def _pass_on_requests(self) -> None:
        """Tell the processes which of their rows were asked to stop."""
        processes = self._worker.processes
        names = [processes.name(pid) for pid in running_pids(self._worker.celery_worker.pool)]
        processes.memory.ask_to_stop(self._runtime.store.tasks.cancel_requests.of(names))
