"""One module per case. A case is called once per round and adds values to its figures."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.cases import (
    at_size,
    backlog,
    bulk,
    burst,
    call,
    callbacks,
    console,
    deploy,
    direct,
    durable_eta,
    growth,
    heartbeats,
    idle,
    kill,
    limits,
    long_transaction,
    overload,
    poison,
    recurring,
    standing,
    steady,
    timers,
)
from benchmarks.stage import CaseContext

CASES: dict[str, Callable[[CaseContext], None]] = {
    "call": call.run,
    "bulk": bulk.run,
    "stream": bulk.run_stream,
    "burst_bulk": burst.run_bulk,
    "burst_single": burst.run_single,
    "burst_far": burst.run_far,
    "growth": growth.run,
    "steady": steady.run,
    "backlog": backlog.run,
    "kill": kill.run,
    "callbacks": callbacks.run,
    "direct": direct.run,
    "durable_eta": durable_eta.run,
    "deploy": deploy.run,
    "timer_steady": timers.run_steady,
    "timer_burst": timers.run_burst,
    "timer_memory": timers.run_memory,
    "heartbeats": heartbeats.run,
    "at_size": at_size.run,
    "idle": idle.run,
    "recurring": recurring.run,
    "limits": limits.run,
    "overload": overload.run,
    "standing": standing.run,
    "poison": poison.run,
    "long_transaction": long_transaction.run,
    "console": console.run,
}
#: Names that stand for several cases.
GROUPS: dict[str, list[str]] = {
    "all": list(CASES),
    #: The default: the figures that interest most readers.
    "short": ["call", "bulk", "burst_bulk", "burst_single", "steady"],
    "timers": ["timer_steady", "timer_burst", "timer_memory", "heartbeats", "at_size", "idle"],
}
#: Cases that take minutes to set up; they compute medians themselves.
ONCE = {"at_size", "console"}
