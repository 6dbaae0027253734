"""One module for each case. A case is called once a round, and adds to its figures."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.cases import backlog, bulk, burst, call, kill, steady
from benchmarks.stage import Stage

CASES: dict[str, Callable[[Stage], None]] = {
    "call": call.run,
    "bulk": bulk.run,
    "burst_bulk": burst.run_bulk,
    "burst_single": burst.run_single,
    "steady": steady.run,
    "backlog": backlog.run,
    "kill": kill.run,
}
