"""Failpoints: the steps of a task's way, each named by a method of delaytasks and the side of it.

There is nothing of them in delaytasks itself. A process that is to fail wraps these methods when it starts
(`chaos/failpoints/orders.py`); all others know nothing of them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

#: A producer, the main process of a worker, or a process of its pool.
Who = Literal["producer", "main", "pool"]
#: By which time all is to be well again: grace + sweep + dispatch, lease + sweep + dispatch, dispatch.
Bound = Literal["R1", "R2", "D"]
#: What a seed's tasks are: a mix, or such as come to that step.
Mix = Literal[
    "mixed", "keyed", "in a session", "moved", "not armed", "far", "long", "crowd", "fatal", "side by side", "limited",
    "effect", "many", "many in a session", "cancelled", "retried", "touched",
]  # fmt: skip


class Place(NamedTuple):
    name: str
    who: Who
    side: Literal["before", "after"]
    #: Methods, of which a deployment calls one.
    at: tuple[str, ...]
    bound: Bound
    mix: Mix = "mixed"
    #: The timer with which it is reached; both if none.
    timer: Literal["eta", "redis", None] = None
    #: The call fails: nothing of it may be there afterwards.
    is_refused: bool = False
    #: A worker is told to stop.
    is_stopped: bool = False

    def fits(self, timer: str) -> bool:
        return self.timer in (None, timer)


_ARM = ("timers.eta:EtaTimer.arm", "timers.redis:RedisTimer.arm")

PLACES = [
    # schedule, and move
    Place("inserted", "producer", "after", ("store.tasks:Tasks.insert",), "R1"),
    Place("inserted with a key", "producer", "after", ("store.tasks:Tasks.insert_keyed",), "R1", "keyed"),
    Place(
        "before the commit",
        "producer",
        "before",
        ("store.units:SessionUnit.after_commit",),
        "R1",
        "in a session",
        is_refused=True,
    ),
    Place("after the commit", "producer", "before", ("engine.producer:Producer.arm",), "R1", "in a session"),
    Place("between lots", "producer", "before", ("engine.producer:Producer.schedule_lot",), "R1", "many"),
    Place("lot inserted", "producer", "after", ("store.tasks:Tasks.insert_many",), "R1", "many"),
    Place(
        "lots before the commit",
        "producer",
        "before",
        ("store.units:SessionUnit.after_commit",),
        "R1",
        "many in a session",
        is_refused=True,
    ),
    Place("lots after the commit", "producer", "before", ("engine.producer:Producer.arm",), "R1", "many in a session"),
    Place("cancelled", "producer", "after", ("store.tasks:Tasks.cancel",), "R1", "cancelled"),
    Place("retried", "producer", "after", ("store.tasks:Tasks.retry",), "R1", "retried"),
    Place("touched", "producer", "after", ("store.touches:Touches.touch",), "R1", "touched"),
    Place("moved", "producer", "after", ("store.tasks:Tasks.reschedule",), "R1", "moved"),
    Place("arming", "producer", "before", _ARM, "R1"),
    Place("armed", "producer", "after", _ARM, "D"),
    Place("disarming", "producer", "before", ("timers.redis:RedisTimer.disarm",), "R1", "moved", "redis"),
    # hold
    Place("received", "main", "before", ("worker.desk:Desk.hold",), "R1"),
    Place("held", "main", "after", ("worker.desk:Desk.hold",), "R1"),
    Place("fell due", "main", "before", ("worker.dispatcher:Dispatcher.take",), "R1"),
    Place("to the pool", "main", "before", ("worker.dispatcher:Dispatcher._send",), "R1"),
    Place("in the pool", "main", "after", ("worker.dispatcher:Dispatcher._send",), "R2"),
    Place("reported", "main", "before", ("worker.dispatcher:Dispatcher._done",), "R2"),
    Place("asked to drain", "main", "before", ("worker.dispatcher:Dispatcher.drain",), "R2", "not armed"),
    Place("sending back", "main", "after", ("worker.dispatcher:Dispatcher.close",), "R1", is_stopped=True),
    # hold in Redis
    Place("taken", "main", "after", ("timers.redis:RedisTimer.take",), "R1", timer="redis"),
    Place("handing on", "main", "before", ("worker.mover:Mover._hand_on",), "R1", timer="redis"),
    Place("handed on", "main", "after", ("worker.mover:Mover._hand_on",), "R1", timer="redis"),
    # claim, run, settle
    Place("claiming", "pool", "before", ("store.claims:Claims.claim",), "R1"),
    Place("claimed", "pool", "after", ("store.claims:Claims.claim",), "R2"),
    Place("claimed from the table", "pool", "after", ("store.claims:Claims.claim_due",), "R2", "not armed"),
    Place("claimed alone", "pool", "after", ("store.claims:Claims.claim_suspect",), "R2", "fatal"),
    Place("running", "pool", "before", ("engine.running:Running._call",), "R2"),
    Place("ran", "pool", "after", ("engine.running:Running._call",), "R2"),
    Place("ran side by side", "pool", "after", ("engine.running:Running._call",), "R2", "side by side"),
    Place("completing", "pool", "after", ("store.claims:Claims.complete",), "R2", "effect"),
    Place("completed", "pool", "after", ("engine.run:Run._committed",), "R2", "effect"),
    Place("settling", "pool", "before", ("store.claims:Claims.settle",), "R2"),
    Place("settled", "pool", "after", ("store.claims:Claims.settle",), "R1"),
    Place("arming again", "pool", "before", ("engine.settling:Settling._arm_again",), "R1"),
    Place("giving back", "pool", "before", ("engine.chunks:Chunks._look_after",), "R2", "crowd"),
    Place("gave back", "pool", "after", ("engine.chunks:Chunks._look_after",), "R2", "crowd"),
    # lines
    Place("lined up", "pool", "after", ("store.lines:Lines.let_in",), "R1", "limited"),
    Place("admitted", "pool", "after", ("store.lines:Lines.admit",), "R2", "limited"),
    Place("handing over", "pool", "before", ("store.claims:Claims.hand_over",), "R2", "limited"),
    Place("handed over", "pool", "after", ("store.claims:Claims.hand_over",), "R2", "limited"),
    # sweep
    Place("sweep begun", "main", "after", ("store.sweeps:Sweeps.begin_sweep",), "R1"),
    Place("near ones chosen", "main", "after", ("store.sweeps:Sweeps.near",), "R1", "far"),
    Place("near ones armed", "main", "before", ("store.sweeps:Sweeps.mark_armed",), "R1", "far"),
    Place("marked", "main", "after", ("store.sweeps:Sweeps.mark_armed",), "R1", "far"),
    Place("lapsed", "main", "after", ("store.sweeps:Sweeps.lapse",), "R2", "fatal"),
    Place("draining", "main", "before", ("timers.eta:EtaTimer.drain",), "R1", "not armed"),
    Place("drained", "main", "after", ("timers.eta:EtaTimer.drain",), "R1", "not armed"),
    Place("buried", "main", "after", ("store.workers:Workers.bury",), "R1"),
    # leases
    Place("renewing", "main", "before", ("store.leases:Leases.renew",), "R2", "long"),
    Place("renewed", "main", "after", ("store.leases:Leases.renew",), "R2", "long"),
    Place("releasing", "main", "before", ("store.leases:Leases.release",), "R2", "fatal"),
    Place("released", "main", "after", ("store.leases:Leases.release",), "R2", "fatal"),
]
BY_NAME = {place.name: place for place in PLACES}
