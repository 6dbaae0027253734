"""`schedule_many`, fed by a generator."""

from __future__ import annotations

import time

from benchmarks import ours, table
from benchmarks.figures import Target
from benchmarks.stage import Stage

DELAY_S = 86400.0
LEAST = {"mysql": 50_000}


def run(stage: Stage) -> None:
    rows = stage.size(200_000, 40_000)
    table.clear()
    before = time.perf_counter()
    ours.delays.schedule_many((ours.TAG, {"due": 0.5, "order": n, "customer": "c-1234"}, DELAY_S) for n in range(rows))
    took = time.perf_counter() - before
    assert table.count() == rows
    target = Target("value", least=LEAST.get(table.backend(), 100_000))
    figure = stage.figure("bulk", f"schedule_many, {rows:,} rows", "rows/s", target)
    figure.add(rows / took)
    table.clear()
