"""Failpoints: steps in the processing of a task.

A failpoint is a method of delaytasks and the side of the method, before or after. delaytasks itself
contains no code for failpoints. A process that is to fail wraps these methods when it starts
(`chaos/failpoints/orders.py`); other processes are unchanged.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

#: A producer, the main process of a worker, or a process of its pool.
Who = Literal["producer", "main", "pool"]
#: The bound of the recovery. R1: grace + sweep + dispatch. R2: lease + sweep + dispatch. D:
#: dispatch.
Bound = Literal["R1", "R2", "D"]
#: The kind of tasks that a seed schedules, chosen so that they reach the failpoint.
Mix = Literal[
    "mixed", "keyed", "in a session", "moved", "not armed", "far", "long", "overdue backlog", "fatal", "simultaneous", "limited",
    "effect", "many", "many in a session", "cancelled", "retried", "touched",
]  # fmt: skip


class DatabaseAddress(NamedTuple):
    name: str
    who: Who
    side: Literal["before", "after"]
    #: Alternative methods; a deployment calls one of them.
    at: tuple[str, ...]
    bound: Bound
    mix: Mix = "mixed"
    #: The timer that reaches the failpoint; None if both do.
    timer: Literal["eta", "redis", None] = None
    #: The call fails, and must leave no row behind.
    is_refused: bool = False
    #: A worker is asked to stop.
    is_stopped: bool = False

    def fits(self, timer: str) -> bool:
        return self.timer in (None, timer)


_ARM = ("timers.eta:EtaTimer.arm", "timers.redis:RedisTimer.arm")

PLACES = [
    # schedule and move
    DatabaseAddress("inserted", "producer", "after", ("storage.tasks:Tasks.insert",), "R1"),
    DatabaseAddress(
        "inserted with a key",
        "producer",
        "after",
        ("storage.tasks:Tasks.insert_keyed",),
        "R1",
        "keyed",
    ),
    DatabaseAddress(
        "before the commit",
        "producer",
        "before",
        ("storage.transactions:SessionTransaction.after_commit",),
        "R1",
        "in a session",
        is_refused=True,
    ),
    DatabaseAddress(
        "after the commit",
        "producer",
        "before",
        ("scheduling.producer:Producer.arm",),
        "R1",
        "in a session",
    ),
    DatabaseAddress(
        "between batches",
        "producer",
        "before",
        ("scheduling.producer:Producer.schedule_batch",),
        "R1",
        "many",
    ),
    DatabaseAddress(
        "lot inserted", "producer", "after", ("storage.tasks:Tasks.insert_many",), "R1", "many"
    ),
    DatabaseAddress(
        "batches before the commit",
        "producer",
        "before",
        ("storage.transactions:SessionTransaction.after_commit",),
        "R1",
        "many in a session",
        is_refused=True,
    ),
    DatabaseAddress(
        "batches after the commit",
        "producer",
        "before",
        ("scheduling.producer:Producer.arm",),
        "R1",
        "many in a session",
    ),
    DatabaseAddress(
        "cancelled", "producer", "after", ("storage.tasks:Tasks.cancel",), "R1", "cancelled"
    ),
    DatabaseAddress(
        "retried", "producer", "after", ("storage.tasks:Tasks.retry",), "R1", "retried"
    ),
    DatabaseAddress(
        "touched", "producer", "after", ("storage.touches:Touches.touch",), "R1", "touched"
    ),
    DatabaseAddress(
        "moved", "producer", "after", ("storage.tasks:Tasks.reschedule",), "R1", "moved"
    ),
    DatabaseAddress("arming", "producer", "before", _ARM, "R1"),
    DatabaseAddress("armed", "producer", "after", _ARM, "D"),
    DatabaseAddress(
        "disarming",
        "producer",
        "before",
        ("timers.redis:RedisTimer.disarm",),
        "R1",
        "moved",
        "redis",
    ),
    # hold in a worker
    DatabaseAddress("received", "main", "before", ("worker.runtime:WorkerRuntime.hold",), "R1"),
    DatabaseAddress("held", "main", "after", ("worker.runtime:WorkerRuntime.hold",), "R1"),
    DatabaseAddress("fell due", "main", "before", ("worker.dispatcher:Dispatcher.take",), "R1"),
    DatabaseAddress("to the pool", "main", "before", ("worker.dispatcher:Dispatcher._send",), "R1"),
    DatabaseAddress("in the pool", "main", "after", ("worker.dispatcher:Dispatcher._send",), "R2"),
    DatabaseAddress("reported", "main", "before", ("worker.dispatcher:Dispatcher._done",), "R2"),
    DatabaseAddress(
        "asked to drain",
        "main",
        "before",
        ("worker.dispatcher:Dispatcher.drain",),
        "R2",
        "not armed",
    ),
    DatabaseAddress(
        "sending back",
        "main",
        "after",
        ("worker.dispatcher:Dispatcher.close",),
        "R1",
        is_stopped=True,
    ),
    # hold in Redis
    DatabaseAddress(
        "taken", "main", "after", ("timers.redis:RedisTimer.take",), "R1", timer="redis"
    ),
    DatabaseAddress(
        "handing on",
        "main",
        "before",
        ("worker.redis_poller:RedisPoller._hand_on",),
        "R1",
        timer="redis",
    ),
    DatabaseAddress(
        "handed on",
        "main",
        "after",
        ("worker.redis_poller:RedisPoller._hand_on",),
        "R1",
        timer="redis",
    ),
    # claim, run and settle
    DatabaseAddress("claiming", "pool", "before", ("storage.claims:Claims.claim",), "R1"),
    DatabaseAddress("claimed", "pool", "after", ("storage.claims:Claims.claim",), "R2"),
    DatabaseAddress(
        "claimed from the table",
        "pool",
        "after",
        ("storage.claims:Claims.claim_due",),
        "R2",
        "not armed",
    ),
    DatabaseAddress(
        "claimed alone", "pool", "after", ("storage.claims:Claims.claim_abandoned",), "R2", "fatal"
    ),
    DatabaseAddress("running", "pool", "before", ("execution.executor:TaskExecutor._call",), "R2"),
    DatabaseAddress("ran", "pool", "after", ("execution.executor:TaskExecutor._call",), "R2"),
    DatabaseAddress(
        "ran side by side",
        "pool",
        "after",
        ("execution.executor:TaskExecutor._call",),
        "R2",
        "simultaneous",
    ),
    DatabaseAddress(
        "completing", "pool", "after", ("storage.claims:Claims.complete",), "R2", "effect"
    ),
    DatabaseAddress(
        "completed", "pool", "after", ("execution.task_run:TaskRun._committed",), "R2", "effect"
    ),
    DatabaseAddress("settling", "pool", "before", ("storage.claims:Claims.settle",), "R2"),
    DatabaseAddress("settled", "pool", "after", ("storage.claims:Claims.settle",), "R1"),
    DatabaseAddress(
        "arming again", "pool", "before", ("execution.settler:Settler._arm_again",), "R1"
    ),
    DatabaseAddress(
        "giving back",
        "pool",
        "before",
        ("execution.chunk_run:ChunkRun._look_after",),
        "R2",
        "overdue backlog",
    ),
    DatabaseAddress(
        "gave back", "pool", "after", ("execution.chunk_run:ChunkRun._look_after",), "R2", "overdue backlog"
    ),
    # waitlists
    DatabaseAddress(
        "lined up", "pool", "after", ("storage.waitlist:Waitlist.let_in",), "R1", "limited"
    ),
    DatabaseAddress(
        "admitted", "pool", "after", ("storage.waitlist:Waitlist.admit",), "R2", "limited"
    ),
    DatabaseAddress(
        "handing over", "pool", "before", ("storage.claims:Claims.hand_over",), "R2", "limited"
    ),
    DatabaseAddress(
        "handed over", "pool", "after", ("storage.claims:Claims.hand_over",), "R2", "limited"
    ),
    # sweep
    DatabaseAddress(
        "sweep begun", "main", "after", ("storage.sweep_queries:SweepQueries.begin_sweep",), "R1"
    ),
    DatabaseAddress(
        "near ones chosen",
        "main",
        "after",
        ("storage.sweep_queries:SweepQueries.near",),
        "R1",
        "far",
    ),
    DatabaseAddress(
        "near ones armed",
        "main",
        "before",
        ("storage.sweep_queries:SweepQueries.mark_armed",),
        "R1",
        "far",
    ),
    DatabaseAddress(
        "marked", "main", "after", ("storage.sweep_queries:SweepQueries.mark_armed",), "R1", "far"
    ),
    DatabaseAddress(
        "lapsed", "main", "after", ("storage.sweep_queries:SweepQueries.lapse",), "R2", "fatal"
    ),
    DatabaseAddress(
        "draining", "main", "before", ("timers.eta:EtaTimer.drain",), "R1", "not armed"
    ),
    DatabaseAddress("drained", "main", "after", ("timers.eta:EtaTimer.drain",), "R1", "not armed"),
    DatabaseAddress("worker expired", "main", "after", ("storage.worker_table:WorkerTable.bury",), "R1"),
    # leases
    DatabaseAddress("renewing", "main", "before", ("storage.leases:Leases.renew",), "R2", "long"),
    DatabaseAddress("renewed", "main", "after", ("storage.leases:Leases.renew",), "R2", "long"),
    DatabaseAddress(
        "releasing", "main", "before", ("storage.leases:Leases.release",), "R2", "fatal"
    ),
    DatabaseAddress("released", "main", "after", ("storage.leases:Leases.release",), "R2", "fatal"),
]
BY_NAME = {place.name: place for place in PLACES}
