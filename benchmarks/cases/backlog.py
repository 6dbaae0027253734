"""Steady work in front of a large backlog: the effect of far tasks on near ones and on the worker's
memory.
"""

from __future__ import annotations

from benchmarks import brokers, ours, table
from benchmarks.cases import steady
from benchmarks.figures import Target, percentile
from benchmarks.stage import CaseContext
from benchmarks.waiting import BenchError

DELAY_S = 86400.0


def run(stage: CaseContext) -> None:
    """One worker, so that memory can be compared: steady work, the backlog, steady work again."""
    rows = stage.size(1_000_000, 20_000)
    side = stage.ours
    with side.serving():
        steady.work(stage, side)  # allocates the memory that any work needs before the measurement
        side.clear()
        before = steady.work(stage, side)
        rss_before = side.rss_mb()
        side.clear()
        ours.delays.schedule_many((ours.TAG, {"due": 0.5}, DELAY_S) for _ in range(rows))
        if table.can_fill():
            table.settle_down()
        behind = steady.work(stage, side)
        rss_behind = side.rss_mb()
        if table.count() != rows + len(behind):
            raise BenchError(f"backlog: {table.count():,} rows instead of {rows + len(behind):,}")
    brokers.clear()
    what = f"steady p99 before {rows:,} rows due tomorrow"
    p99 = stage.figure("backlog", what, "ms", Target("ratio", most=1.5), against="without them:")
    p99.add(percentile(behind, 0.99), percentile(before, 0.99))
    if rss_before is not None and rss_behind is not None:
        grown = stage.figure("backlog", "worker memory grew by", "MB", Target("value", most=5))
        grown.add(rss_behind - rss_before)
        stage.say(
            f"backlog: worker memory {rss_before:.1f} MB, behind the backlog {rss_behind:.1f} MB"
        )
    stage.say(
        f"backlog: p99 {percentile(before, 0.99):.2f} ms, behind it "
        f"{percentile(behind, 0.99):.2f} ms"
    )
