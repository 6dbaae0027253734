"""Failpoints: steps in the processing of a task.

A failpoint is a method of delaytasks and the side of the method, before or after. delaytasks itself
contains no code for failpoints. A process that is to fail wraps these methods when it starts
(`chaos/failpoints/orders.py`); other processes are unchanged.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

#: A producer, the main process of a worker, or a process of its pool.
ProcessKind = Literal["producer", "main", "pool"]
#: The bound of the recovery. R1: grace + sweep + dispatch. R2: lease + sweep + dispatch. D:
#: dispatch.
Bound = Literal["R1", "R2", "D"]
#: The kind of tasks that a seed schedules, chosen so that they reach the failpoint.
Mix = Literal[
    "mixed",
    "keyed",
    "in a session",
    "moved",
    "not armed",
    "far",
    "long",
    "overdue backlog",
    "fatal",
    "simultaneous",
    "queued",
    "limited",
    "effect",
    "many",
    "many in a session",
    "cancelled",
    "retried",
    "touched",
    "recurring",
    "Celery tasks",
    "revoked Celery tasks",
]


class Failpoint(NamedTuple):
    name: str
    process_kind: ProcessKind
    side: Literal["before", "after"]
    #: Alternative methods; a deployment calls one of them.
    methods: tuple[str, ...]
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


_ARM = ("broker.arming:EtaTimer.arm", "broker.redis_timer:RedisTimer.arm")

FAILPOINTS = [
    # schedule and move
    Failpoint("inserted", "producer", "after", ("db.statements:NewRows.insert",), "R1"),
    Failpoint(
        "inserted with a key",
        "producer",
        "after",
        ("db.task_rows:Tasks.insert_keyed",),
        "R1",
        "keyed",
    ),
    Failpoint(
        "before the commit",
        "producer",
        "before",
        ("db.sessions:SessionTransaction.after_commit",),
        "R1",
        "in a session",
        is_refused=True,
    ),
    Failpoint(
        "after the commit",
        "producer",
        "before",
        ("db.producer:Producer.arm_entries",),
        "R1",
        "in a session",
    ),
    Failpoint(
        "between batches",
        "producer",
        "before",
        ("db.producer:Producer.schedule_batch",),
        "R1",
        "many",
    ),
    Failpoint(
        "batch inserted", "producer", "after", ("db.statements:NewRows.insert_many",), "R1", "many"
    ),
    Failpoint(
        "batches before the commit",
        "producer",
        "before",
        ("db.sessions:SessionTransaction.after_commit",),
        "R1",
        "many in a session",
        is_refused=True,
    ),
    Failpoint(
        "batches after the commit",
        "producer",
        "before",
        ("db.producer:Producer.arm_entries",),
        "R1",
        "many in a session",
    ),
    Failpoint("cancelled", "producer", "after", ("db.task_rows:Tasks.cancel",), "R1", "cancelled"),
    Failpoint("retried", "producer", "after", ("db.task_rows:Tasks.rerun",), "R1", "retried"),
    Failpoint("touched", "producer", "after", ("db.task_rows:Tasks.touch",), "R1", "touched"),
    Failpoint("moved", "producer", "after", ("db.task_rows:Tasks.reschedule",), "R1", "moved"),
    Failpoint(
        "waiting to be armed", "producer", "after", ("broker.arming:BackgroundTimer.arm",), "R1"
    ),
    Failpoint("arming", "producer", "before", _ARM, "R1"),
    # The tasks of later calls wait to be armed.
    Failpoint("armed", "producer", "after", _ARM, "R1"),
    # hold in a worker
    Failpoint("received", "main", "before", ("worker.dispatcher:Dispatcher.receive",), "R1"),
    Failpoint("held", "main", "after", ("worker.dispatcher:Dispatcher.receive",), "R1"),
    Failpoint("fell due", "main", "before", ("worker.dispatcher:Dispatcher.take",), "R1"),
    Failpoint("to the pool", "main", "before", ("worker.dispatcher:Dispatcher._send",), "R1"),
    Failpoint("in the pool", "main", "after", ("worker.dispatcher:Dispatcher._send",), "R2"),
    Failpoint("reported", "main", "before", ("worker.dispatcher:Dispatcher._done",), "R2"),
    Failpoint(
        "asked to drain",
        "main",
        "before",
        ("worker.dispatcher:Dispatcher.start_drain",),
        "R2",
        "not armed",
    ),
    Failpoint(
        "sending back",
        "main",
        "after",
        ("worker.dispatcher:Dispatcher.close",),
        "R1",
        is_stopped=True,
    ),
    # hold in Redis
    Failpoint(
        "taken", "main", "after", ("broker.redis_timer:RedisTimer.take",), "R1", timer="redis"
    ),
    Failpoint(
        "handing on",
        "main",
        "before",
        ("broker.redis_timer:RedisPoller._pass_on",),
        "R1",
        timer="redis",
    ),
    Failpoint(
        "handed on",
        "main",
        "after",
        ("broker.redis_timer:RedisPoller._pass_on",),
        "R1",
        timer="redis",
    ),
    # claim, run and settle
    Failpoint("claiming", "pool", "before", ("db.claims:Claims.claim",), "R1"),
    Failpoint("claimed", "pool", "after", ("db.claims:Claims.claim",), "R2"),
    Failpoint(
        "claimed from the table",
        "pool",
        "after",
        ("db.claims:Claims.claim_due",),
        "R2",
        "not armed",
    ),
    Failpoint(
        "claimed alone", "pool", "after", ("db.claims:Claims.claim_recovered",), "R2", "fatal"
    ),
    Failpoint(
        "claiming ahead",
        "pool",
        "before",
        ("run.runner:Runner._close_and_claim",),
        "R2",
        "overdue backlog",
    ),
    Failpoint(
        "claimed ahead",
        "pool",
        "after",
        ("run.runner:Runner._close_and_claim",),
        "R2",
        "overdue backlog",
    ),
    Failpoint("running", "pool", "before", ("run.calls:Calls.run",), "R2"),
    Failpoint("ran", "pool", "after", ("run.calls:Calls.run",), "R2"),
    Failpoint(
        "ran simultaneously", "pool", "after", ("run.calls:Calls.run",), "R2", "simultaneous"
    ),
    Failpoint("completing", "pool", "after", ("db.claims:Claims.complete",), "R2", "effect"),
    Failpoint("completed", "pool", "after", ("run.calls:TaskRun._committed",), "R2", "effect"),
    Failpoint("settling", "pool", "before", ("db.claims:Claims.settle",), "R2"),
    Failpoint("settled", "pool", "after", ("db.claims:Claims.settle",), "R1"),
    Failpoint(
        "settling later", "pool", "after", ("run.chunk:ChunkRunner.settle_later",), "R2", "queued"
    ),
    Failpoint("arming again", "pool", "before", ("run.chunk:Settler._arm_again",), "R1"),
    Failpoint(
        "giving back", "pool", "before", ("run.chunk:ChunkRunner._expire",), "R2", "overdue backlog"
    ),
    Failpoint(
        "gave back", "pool", "after", ("run.chunk:ChunkRunner._expire",), "R2", "overdue backlog"
    ),
    # waitlists
    Failpoint(
        "added to the waitlist",
        "pool",
        "after",
        ("limits.admission:Admission.hold_excess",),
        "R1",
        "limited",
    ),
    Failpoint("admitted", "pool", "after", ("limits.admission:Admission.admit",), "R2", "limited"),
    Failpoint(
        "handing over",
        "pool",
        "before",
        ("limits.admission:Admission.settle_and_admit",),
        "R2",
        "limited",
    ),
    Failpoint(
        "handed over",
        "pool",
        "after",
        ("limits.admission:Admission.settle_and_admit",),
        "R2",
        "limited",
    ),
    # sweep
    Failpoint("sweep begun", "main", "after", ("db.sweep_queries:SweepQueries.begin_sweep",), "R1"),
    Failpoint(
        "near rows selected",
        "main",
        "after",
        ("db.sweep_queries:SweepQueries.due_between",),
        "R1",
        "far",
    ),
    Failpoint(
        "near rows armed",
        "main",
        "before",
        ("db.sweep_queries:SweepQueries.mark_armed",),
        "R1",
        "far",
    ),
    Failpoint(
        "marked", "main", "after", ("db.sweep_queries:SweepQueries.mark_armed",), "R1", "far"
    ),
    Failpoint("recovered", "main", "after", ("db.sweep_queries:Leases.recover",), "R2", "fatal"),
    Failpoint(
        "starting a drain",
        "main",
        "before",
        ("worker.dispatcher:Dispatcher.start_drain",),
        "R1",
        "not armed",
    ),
    Failpoint(
        "drain started",
        "main",
        "after",
        ("worker.dispatcher:Dispatcher.start_drain",),
        "R1",
        "not armed",
    ),
    Failpoint("worker expired", "main", "after", ("db.sweep_queries:WorkerTable.expire",), "R1"),
    # recurring schedules, whose tasks a sweep writes
    Failpoint(
        "occurrences planned",
        "main",
        "before",
        ("recurring.creation:RecurringTable.write",),
        "R1",
        "recurring",
    ),
    Failpoint(
        "occurrences written",
        "main",
        "after",
        ("recurring.creation:RecurringTable.write",),
        "R1",
        "recurring",
    ),
    Failpoint(
        "schedules advanced",
        "main",
        "after",
        ("recurring.creation:RecurringTable.advance",),
        "R1",
        "recurring",
    ),
    Failpoint(
        "occurrences committed",
        "main",
        "after",
        ("recurring.creation:RecurringTable.transaction",),
        "R1",
        "recurring",
    ),
    Failpoint(
        "occurrences armed", "main", "after", ("recurring.creation.create",), "R1", "recurring"
    ),
    # durable Celery tasks
    Failpoint(
        "message captured",
        "producer",
        "before",
        ("durable_eta.messages:CeleryTasks._schedule",),
        "R1",
        "Celery tasks",
    ),
    Failpoint(
        "message stored",
        "producer",
        "after",
        ("durable_eta.messages:CeleryTasks._schedule",),
        "R1",
        "Celery tasks",
    ),
    Failpoint(
        "revoked row found",
        "producer",
        "before",
        ("durable_eta.messages:CeleryTasks._cancel",),
        "R1",
        "revoked Celery tasks",
    ),
    Failpoint(
        "row revoked",
        "producer",
        "after",
        ("durable_eta.messages:CeleryTasks._cancel",),
        "R1",
        "revoked Celery tasks",
    ),
    Failpoint(
        "publishing",
        "pool",
        "before",
        ("durable_eta.messages:CeleryTasks.publish",),
        "R2",
        "Celery tasks",
    ),
    Failpoint(
        "message sent", "pool", "after", ("broker.link:BrokerLink._send_one",), "R2", "Celery tasks"
    ),
    Failpoint(
        "published",
        "pool",
        "after",
        ("durable_eta.messages:CeleryTasks.publish",),
        "R2",
        "Celery tasks",
    ),
    # leases
    Failpoint("renewing", "main", "before", ("db.sweep_queries:Leases.renew",), "R2", "long"),
    Failpoint("renewed", "main", "after", ("db.sweep_queries:Leases.renew",), "R2", "long"),
    Failpoint(
        "recovering dead",
        "main",
        "before",
        ("db.sweep_queries:Leases.recover_dead",),
        "R2",
        "fatal",
    ),
    Failpoint(
        "recovered dead", "main", "after", ("db.sweep_queries:Leases.recover_dead",), "R2", "fatal"
    ),
]
BY_NAME = {failpoint.name: failpoint for failpoint in FAILPOINTS}
