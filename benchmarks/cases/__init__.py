"""One module for each case. A case is called once a round, and adds to its figures."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.cases import (
    at_size,
    backlog,
    bulk,
    burst,
    call,
    callbacks,
    ceiling,
    deploy,
    direct,
    fairness,
    gathering,
    growth,
    heartbeats,
    houses,
    idle,
    kill,
    limits,
    long_transaction,
    overload,
    partitions,
    poison,
    profile,
    steady,
    timers,
    wheel,
)
from benchmarks.stage import Stage

CASES: dict[str, Callable[[Stage], None]] = {
    "call": call.run,
    "bulk": bulk.run,
    "stream": bulk.run_stream,
    "burst_bulk": burst.run_bulk,
    "burst_single": burst.run_single,
    "burst_far": burst.run_far,
    "ceiling": ceiling.run,
    "gathering": gathering.run,
    "growth": growth.run,
    "profile": profile.run,
    "steady": steady.run,
    "backlog": backlog.run,
    "kill": kill.run,
    "callbacks": callbacks.run,
    "direct": direct.run,
    "deploy": deploy.run,
    "timer_steady": timers.run_steady,
    "timer_burst": timers.run_burst,
    "timer_memory": timers.run_memory,
    "wheel": wheel.run,
    "heartbeats": heartbeats.run,
    "at_size": at_size.run,
    "houses": houses.run,
    "idle": idle.run,
    "limits": limits.run,
    "fairness": fairness.run,
    "overload": overload.run,
    "poison": poison.run,
    "long_transaction": long_transaction.run,
    "partitions": partitions.run,
}
#: Names that stand for several cases.
GROUPS: dict[str, list[str]] = {
    "all": list(CASES),
    #: What is measured when nothing is named: what most people ask first.
    "short": ["call", "bulk", "burst_bulk", "burst_single", "steady", "ceiling"],
    "timers": [
        "timer_steady",
        "timer_burst",
        "timer_memory",
        "wheel",
        "heartbeats",
        "at_size",
        "houses",
        "idle",
    ],
}
#: What these build takes minutes, and they take the medians themselves.
ONCE = {"at_size", "partitions"}
