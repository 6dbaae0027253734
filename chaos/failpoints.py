"""Failpoints: steps of a task at which a process kills itself, fails or stops for a while.

A failpoint is a method of delaytasks and the side of the method, before or after. delaytasks itself
contains no code for failpoints: a process that is to fail wraps these methods when it starts
(`Orders`), and other processes are unchanged.

An order to fail is a file with the name of a failpoint. The first process that reaches the
failpoint carries the order out and removes the file. `echo "kill 3 x" > FOLDER/claimed` kills the
first process that has claimed a chunk for the third time, if it runs with CHAOS_ORDERS=FOLDER and
imports `chaos.project`. Other acts are `raise` and `sleep`, which takes longer than a lease.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from types import GeneratorType
from typing import Any, Literal, NamedTuple

from chaos.history import Effect, Fault, Notebook, now_us
from chaos.pids import children_of

#: The environment variable with the folder of the orders.
ORDERS = "CHAOS_ORDERS"
#: The lease of the deployments under test.
LEASE_S = 2.0
SLEEP_S = 1.5 * LEASE_S
Act = Literal["kill", "raise", "sleep"]
#: The additional recovery time. Rows that an error leaves behind in a living process are recovered
#: one lease later.
EXTRA_RECOVERY_S: dict[Act, float] = {"kill": 0, "raise": LEASE_S, "sleep": SLEEP_S}


class Failpoint(NamedTuple):
    name: str
    #: "producer", "main" for the main process of a worker, or "pool" for a process of its pool.
    process_kind: str
    side: str
    #: Alternative methods; a deployment calls one of them.
    methods: list[str]
    #: The bound of the recovery. R1: grace + sweep + dispatch. R2: lease + sweep + dispatch.
    bound: str
    #: The kind of tasks that are scheduled, chosen so that they reach the failpoint.
    mix: str = "mixed"
    #: "redis": only this timer reaches the failpoint. "refused": the call fails, and must leave no
    #: row behind. "stopped": a worker is asked to stop.
    special: str = ""

    def fits(self, timer: str) -> bool:
        return timer == "redis" or self.special != "redis"


#: Each with its name, its process, its side, its methods, its bound, and what `Failpoint` says.
_CATALOGUE = """
# schedule and move
inserted: producer after db.statements:NewRows.insert, R1
inserted with a key: producer after db.task_rows:Tasks.insert_keyed, R1, keyed
before the commit: producer before db.sessions:SessionTransaction.after_commit, R1, in a session, \
refused
after the commit: producer before db.producer:Producer.arm_entries, R1, in a session
between batches: producer before db.producer:Producer.schedule_batch, R1, many
batch inserted: producer after db.statements:NewRows.insert_many, R1, many
batches before the commit: producer before db.sessions:SessionTransaction.after_commit, R1, \
many in a session, refused
batches after the commit: producer before db.producer:Producer.arm_entries, R1, many in a session
cancelled: producer after db.task_rows:Tasks.cancel, R1, cancelled
retried: producer after db.task_rows:Tasks.rerun, R1, retried
touched: producer after db.task_rows:Tasks.touch, R1, touched
moved: producer after db.task_rows:Tasks.reschedule, R1, moved
waiting to be armed: producer after broker.arming:BackgroundTimer.arm, R1
arming: producer before broker.arming:EtaTimer.arm broker.redis_timer:RedisTimer.arm, R1
# the tasks of later calls wait to be armed
armed: producer after broker.arming:EtaTimer.arm broker.redis_timer:RedisTimer.arm, R1

# hold in a worker
received: main before worker.dispatcher:Dispatcher.receive, R1
held: main after worker.dispatcher:Dispatcher.receive, R1
fell due: main before worker.dispatcher:Dispatcher.take, R1
to the pool: main before worker.dispatcher:Dispatcher._send, R1
in the pool: main after worker.dispatcher:Dispatcher._send, R2
reported: main before worker.dispatcher:Dispatcher._done, R2
sending back: main after worker.dispatcher:Dispatcher.close, R1, mixed, stopped

# hold in Redis
taken: main after broker.redis_timer:RedisTimer.take, R1, mixed, redis
handing on: main before broker.redis_timer:RedisPoller._pass_on, R1, mixed, redis
handed on: main after broker.redis_timer:RedisPoller._pass_on, R1, mixed, redis

# claim, run and settle
claiming: pool before db.claims:Claims.claim, R1
claimed: pool after db.claims:Claims.claim, R2
claimed from the table: pool after db.claims:Claims.claim_due, R2, not armed
claimed alone: pool after db.claims:Claims.claim_recovered, R2, fatal
claiming ahead: pool before run.runner:Runner._close_and_claim, R2, overdue backlog
claimed ahead: pool after run.runner:Runner._close_and_claim, R2, overdue backlog
running: pool before run.calls:Calls.run, R2
ran: pool after run.calls:Calls.run, R2
ran simultaneously: pool after run.calls:Calls.run, R2, simultaneous
completing: pool after db.claims:Claims.complete, R2, effect
completed: pool after run.calls:TaskRun._committed, R2, effect
settling: pool before db.claims:Claims.settle, R2
settled: pool after db.claims:Claims.settle, R1
settling later: pool after run.chunk:ChunkRunner.settle_later, R2, queued
arming again: pool before run.chunk:Settler._arm_again, R1
giving back: pool before run.chunk:ChunkRunner._expire, R2, overdue backlog
gave back: pool after run.chunk:ChunkRunner._expire, R2, overdue backlog

# waitlists
added to the waitlist: pool after limits.admission:Admission.hold_excess, R1, limited
admitted: pool after limits.admission:Admission.admit, R2, limited
handing over: pool before limits.admission:Admission.settle_and_admit, R2, limited
handed over: pool after limits.admission:Admission.settle_and_admit, R2, limited

# sweep
sweep begun: main after db.sweep_queries:SweepQueries.begin_sweep, R1
near rows selected: main after db.sweep_queries:SweepQueries.due_between, R1, far
near rows armed: main before db.sweep_queries:SweepQueries.mark_armed, R1, far
marked: main after db.sweep_queries:SweepQueries.mark_armed, R1, far
recovered: main after db.sweep_queries:Leases.recover, R2, fatal
starting a drain: main before worker.dispatcher:Dispatcher.start_drain, R1, not armed
drain started: main after worker.dispatcher:Dispatcher.start_drain, R1, not armed
worker expired: main after db.sweep_queries:WorkerTable.expire, R1

# recurring schedules, whose tasks a sweep writes
occurrences planned: main before recurring.creation:RecurringTable.write, R1, recurring
occurrences written: main after recurring.creation:RecurringTable.write, R1, recurring
schedules advanced: main after recurring.creation:RecurringTable.advance, R1, recurring
occurrences committed: main after recurring.creation:RecurringTable.transaction, R1, recurring
occurrences armed: main after recurring.creation.create, R1, recurring

# durable Celery tasks
message captured: producer before durable_eta.messages:CeleryTasks._schedule, R1, Celery tasks
message stored: producer after durable_eta.messages:CeleryTasks._schedule, R1, Celery tasks
revoked row found: producer before durable_eta.messages:CeleryTasks._cancel, R1, \
revoked Celery tasks
row revoked: producer after durable_eta.messages:CeleryTasks._cancel, R1, revoked Celery tasks
publishing: pool before durable_eta.messages:CeleryTasks.publish, R2, Celery tasks
message sent: pool after broker.link:BrokerLink._send_one, R2, Celery tasks
published: pool after durable_eta.messages:CeleryTasks.publish, R2, Celery tasks

# leases
renewing: main before db.sweep_queries:Leases.renew, R2, long
renewed: main after db.sweep_queries:Leases.renew, R2, long
recovering dead: main before db.sweep_queries:Leases.recover_dead, R2, fatal
recovered dead: main after db.sweep_queries:Leases.recover_dead, R2, fatal
"""


def _failpoint(line: str) -> Failpoint:
    name, _, text = line.partition(": ")
    where, bound, *others = text.split(", ")
    process_kind, side, *methods = where.split()
    return Failpoint(name, process_kind, side, methods, bound, *others)


_LINES = (line for line in _CATALOGUE.splitlines() if line and not line.startswith("#"))
FAILPOINTS = {failpoint.name: failpoint for failpoint in map(_failpoint, _LINES)}


class FailpointError(Exception):
    """Raised at a failpoint by an order to `raise`."""


class Orders:
    """The orders as seen by the processes that carry them out."""

    def __init__(self, folder: Path, is_producer: bool = False) -> None:
        self._folder = folder
        self._is_producer = is_producer
        self._main = os.getpid()
        self._reached: Counter[tuple[str, str]] = Counter()
        for failpoint in FAILPOINTS.values():
            for path in failpoint.methods:
                self._wrap(failpoint, f"delaytasks.{path}")

    def _wrap(self, failpoint: Failpoint, path: str) -> None:
        where, _, name = path.rpartition(".")
        owner = resolve_name(where)
        method: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if failpoint.side == "before":
                self._reach(failpoint)
            answer = method(*args, **kwargs)
            if isinstance(answer, GeneratorType):
                return self._each(failpoint, answer)
            if failpoint.side == "after":
                self._reach(failpoint)
            return answer

        setattr(owner, name, wrapped)

    def _each(self, failpoint: Failpoint, answers: Iterator[Any]) -> Iterator[Any]:
        for answer in answers:
            if failpoint.side == "after":
                self._reach(failpoint)
            yield answer

    @property
    def _process_kind(self) -> str:
        if self._is_producer:
            return "producer"
        return "main" if os.getpid() == self._main else "pool"

    def _reach(self, failpoint: Failpoint) -> None:
        order = self._folder / failpoint.name
        try:
            text = order.read_text()
            if failpoint.process_kind != self._process_kind:
                return
            self._reached[failpoint.name, text] += 1
            act, nth, _serial = text.split()
            if self._reached[failpoint.name, text] < int(nth):
                return
            order.unlink()  # another process may have removed it already
        except (FileNotFoundError, ValueError):
            return
        if act == "kill":
            kill_this_process(failpoint.name)
        elif act == "sleep":
            record_fault(f"{failpoint.name}: sleep", SLEEP_S, "away")
            time.sleep(SLEEP_S)
        else:
            record_fault(f"{failpoint.name}: raise", 2 * LEASE_S, "away")
            raise FailpointError(failpoint.name)


def record_fault(kind: str, lasts_s: float, effect: Effect) -> None:
    """Record a fault that affects the leases of this process and of its child processes."""
    pid, from_us = os.getpid(), now_us()
    key_owners = tuple(f"/{holder}-" for holder in (pid, *children_of(pid)))
    times = from_us, from_us + int(lasts_s * 1e6)
    # Redis keeps what a dead worker has received until the end of the visibility timeout.
    loses_messages = effect == "dead"
    fault = Fault(kind, f"process {pid}", *times, effect, key_owners, loses_messages)
    Notebook(Path(os.environ[ORDERS]) / "faults").note(fault)


def kill_this_process(kind: str) -> None:
    """Kill this process. Its other tasks keep their leases for at most one lease."""
    record_fault(f"{kind}: kill", LEASE_S, "dead")
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # until the signal arrives


def write_order(folder: Path, name: str, act: Act, nth: int) -> Path:
    """Write an order, and return its file."""
    path = folder / name
    draft = folder / ".draft"
    draft.write_text(f"{act} {nth} {time.monotonic_ns()}")
    draft.rename(path)
    return path
