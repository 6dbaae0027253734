"""The cases: what is measured, on which sides, and the targets.

The measurements are imported when they run, since the app of the benchmarks reads the URLs of the
run's servers from the environment.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

from benchmarks.figures import BARE, OURS
from benchmarks.run import Case

BOTH = (OURS, BARE)
TIMERS = (OURS, "ours_redis")
TWICE_AS_LATE = {"lateness p50, ms": "<= 2 x", "lateness p99, ms": "<= 2 x", "early, tasks": "<= 0"}
TEN_TIMES, EIGHT_TIMES = {"drained/s": ">= 10 x"}, {"drained/s": ">= 8 x"}


def _of(module: str, name: str, *arguments: object, **more: object) -> Callable[..., Any]:
    """Return the function of a module in this package, imported by its first call."""

    def measure(stage: object, side: object) -> Any:
        found = getattr(import_module(f"benchmarks.cases.{module}"), name)
        return found(stage, side, *arguments, **more)

    return measure


_ALL = [
    Case(
        "call",
        _of("calls", "call"),
        targets={
            "inline, x apply_async": "<= 2",
            "x apply_async": "<= 1.2",
            "x the caller's INSERT": "<= 1.2",
        },
    ),
    Case("calls", _of("loads", "calls"), BOTH, is_load=True),
    Case("bulk", _of("loads", "bulk"), targets={"rows/s": ">= 100000"}, is_load=True),
    Case("stream", _of("calls", "stream"), targets={"rows, MB": "<= 10"}),
    Case("burst_bulk", _of("loads", "burst_bulk"), BOTH, TEN_TIMES, is_load=True),
    Case("burst_single", _of("loads", "burst_single"), BOTH, EIGHT_TIMES, is_load=True),
    Case("burst_far", _of("loads", "far"), BOTH, EIGHT_TIMES, is_load=True),
    Case("steady", _of("loads", "steady"), BOTH, TWICE_AS_LATE, is_load=True),
    Case(
        "steady_1000",
        _of("loads", "steady_1000"),
        BOTH,
        {"lateness p99, ms": "<= 20", "servers, ms": "<= 1 x"},
        is_load=True,
    ),
    Case(
        "backlog",
        _of("loads", "backlog"),
        targets={"it, ratio": "<= 1.5", "by, MB": "<= 5"},
        is_load=True,
    ),
    Case(
        "far_10m",
        _of("loads", "backlog", 10_000_000),
        targets={"it, ratio": "<= 1.1", "by, MB": "<= 5"},
        is_load=True,
    ),
    Case("recovery", _of("loads", "recovery"), BOTH, is_load=True),
    Case("idle", _of("loads", "idle"), (*TIMERS, "ours_direct", BARE), is_load=True),
    Case("durable_eta", _of("loads", "durable_eta"), ("ours_eta", BARE), TWICE_AS_LATE),
    Case("standing", _of("depth", "standing"), targets={"x a burst": ">= 0.9"}),
    Case("memory", _of("depth", "memory"), targets={", MB": "<= 20"}),
    Case(
        "overload",
        _of("depth", "overload"),
        TIMERS,
        {
            "first run, s": "<= 5",
            "around it": ">= 0.7",
            "meanwhile, 50/s, lateness p99, ms": "<= 2000",
            "broker, most": "<= 100",
            "start, MB": "<= 30",
        },
        needs_postgresql=True,
    ),
    Case("overload_random", _of("depth", "overload", in_order=False), needs_postgresql=True),
    Case("growth", _of("depth", "growth"), needs_postgresql=True),
    Case(
        "at_size",
        _of("at_size", "at_size"),
        targets={"x 10,000": "<= 3"},
        needs_postgresql=True,
        is_once=True,
    ),
    Case("long_transaction", _of("at_size", "long_transaction"), targets={"x without one": "<= 3"}),
    Case(
        "console",
        _of("console", "console"),
        targets={
            "page one task: p95, ms": "<= 50",
            "p95, ms": "<= 150",
            "% of a core of the database": "<= 2",
        },
        needs_postgresql=True,
        is_once=True,
    ),
]
CASES = {case.name: case for case in _ALL}
#: Names that stand for several cases.
GROUPS = {
    "all": list(CASES),
    #: The default: the figures that interest most readers.
    "short": ["call", "bulk", "burst_bulk", "burst_single", "steady"],
    #: The default with `--peers`.
    "peers": ["calls", "bulk", "burst_bulk", "steady", "steady_1000", "backlog", "recovery"],
}


def work_case(load: str, processor: str) -> Case:
    """Return a case of `bench work`, whose processor is like `sleep:20`, or `0` for no time."""
    if not re.fullmatch(r"0|(sleep|compute):\d+(\.\d+)?", processor):
        raise ValueError(f"{processor} is no processor: sleep:20, compute:20 or 0")
    kind, _, ms = processor.rpartition(":")
    measure = _of("loads", f"timed_{load}", kind or "sleep", float(ms))
    return Case(f"{load}, {kind} {ms} ms".replace(",  ", ", "), measure, BOTH, is_load=True)


def network_case(load: str, database_ms: float, broker_ms: float) -> Case:
    """Return a case of `bench networks`. A round trip to the database concerns only us."""
    name = f"{load}, database {database_ms:g} ms, broker {broker_ms:g} ms"
    measure = _of("loads", "across", load, database_ms, broker_ms)
    return Case(name, measure, (OURS,) if database_ms else BOTH, is_load=True)
