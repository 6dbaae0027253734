"""The drain rate of a worker compared with one bare connection that works in batches."""

from __future__ import annotations

from benchmarks import table
from benchmarks.cases import burst
from benchmarks.figures import Target
from benchmarks.stage import CaseContext
from benchmarks.waiting import wall

BATCH = 100
#: A writer locks the whole SQLite database, and a worker has several writers.
LEAST = {"sqlite": 0.3}
DAY_S = 86_400.0


def run(stage: CaseContext) -> None:
    count = stage.size(20_000, 4_000)
    table.clear()
    stage.ours.schedule_many([wall() + DAY_S] * count)
    bare = count / table.work_off_bare(BATCH)
    stage.say(
        f"ceiling: one bare connection claims and settles {bare:,.0f} rows/s in batches of {BATCH}"
    )
    table.clear()
    ours = burst.drain(
        stage, "ceiling", stage.ours, count, burst.due_together(count, stage.size(20, 10))
    )
    what, target = f"{count:,} due together", Target("ratio", least=LEAST.get(table.backend(), 0.6))
    stage.figure("ceiling", what, "drained/s", target, against="one bare connection:").add(
        ours.per_s, bare
    )
