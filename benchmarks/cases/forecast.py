"""The time of a forecast of a week with very many waiting tasks."""

from __future__ import annotations

import statistics
import time

from benchmarks import ours, table
from benchmarks.machine import load
from benchmarks.stage import CaseContext
from delaytasks.model.moves import Status

DAY_S, HOUR_S = 86_400.0, 3600.0
WAITING, QUICK_WAITING = 10_000_000, 200_000
REPEATS = 5


def run(stage: CaseContext) -> None:
    if not table.can_fill():
        stage.say("forecast: skipped, since only PostgreSQL creates these rows in minutes")
        return
    rows = stage.size(WAITING, QUICK_WAITING)
    table.clear()
    with table.indexed_at_the_end():
        table.fill(rows * 9 // 10, Status.NOT_COMPLETE, HOUR_S, 7 * DAY_S - HOUR_S)
        table.fill(rows // 10, Status.NOT_COMPLETE, 2 * DAY_S, 2 * DAY_S)
    table.settle_down()
    took: list[float] = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        forecast = ours.delays.forecast(processes=32)
        took.append((time.perf_counter() - began) * 1000)
    name = f"a week with {rows:,} waiting tasks"
    stage.figure("forecast", name, "ms").add(statistics.median(took))
    stage.say(
        f"forecast: {name}: {statistics.median(took):,.1f} ms, {forecast.due:,} due, "
        f"load {load():.1f}"
    )
    table.clear()
