"""The gain of more processes, for bursts of tasks that take no time or wait."""

from __future__ import annotations

import math
import os

from benchmarks import brokers, ours, processes, table
from benchmarks.machine import load
from benchmarks.meters import Meter
from benchmarks.sides import Ours, Side
from benchmarks.stage import CaseContext
from benchmarks.waiting import instant, sleep_until, wall

PROCESSES = (1, 2, 4)
#: The processor's duration in milliseconds, and the number of tasks that are due together.
KINDS = ((0, 20_000), (5, 2_000), (20, 500))
#: Tasks per call.
BATCH_ROWS = 100
DEADLINE_S = 240.0


class Growing(Ours):
    """Tasks are counted by their notes."""

    app_path = "benchmarks.growing:app"

    def schedule_all(self, count: int, ms: float, due: float) -> None:
        task = ours.WORK, {"due": due, "seconds": ms / 1000}, instant(due)
        for start in range(0, count, BATCH_ROWS):
            self.delays.schedule_many([task] * min(BATCH_ROWS, count - start))

    def schedule(self, due: float) -> None:
        self.schedule_all(1, 0, due)

    is_done, ended_at, clear = Side.is_done, Side.ended_at, Side.clear


def run(stage: CaseContext) -> None:
    if not table.can_fill():
        stage.say("growth: skipped, since it needs PostgreSQL")
        return
    with table.private() as database:
        os.environ["BENCH_DATABASE_URL"] = database.url
        side = Growing(stage.ours.folder, stage.ours.notes)
        side.app, side.delays = ours.make("bench_growing", database=database.url)
        for count in PROCESSES:
            with side.serving(1, [*processes.POOL[:-1], str(count)]):
                for ms, tasks in KINDS:
                    _burst(stage, side, count, ms, stage.size(tasks, tasks // 5))
            brokers.clear()
        side.delays.close()


def _burst(stage: CaseContext, side: Growing, count: int, ms: float, tasks: int) -> None:
    side.clear()
    meter, written = Meter(side), table.wal_bytes()
    due = wall() + stage.size(15, 8)
    side.schedule_all(tasks, ms, due)
    sleep_until(due)
    side.wait_for(tasks, DEADLINE_S)
    per_s = tasks / (side.ended_at() - due)
    cost, written = meter.cost(tasks), (table.wal_bytes() - written) // tasks
    what = f"{ms} ms: processes {count}"
    stage.figure("growth", what, "drained/s").add(per_s)
    stage.figure("growth", f"{what}: WAL a task", "bytes").add(written)
    for whose, ms in (("worker", cost.worker_ms), ("database", cost.database_ms)):
        if not math.isnan(ms):
            stage.figure("growth", f"{what}: CPU a task, {whose}", "ms").add(ms)
    stage.say(
        f"growth: {what}: {per_s:,.0f}/s, CPU a task: {cost}, WAL a task: {written:,} bytes, load "
        f"{load():.1f}"
    )
