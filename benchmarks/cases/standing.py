"""Due tasks that never end: a producer adds as many as have run, so that as many always wait."""

from __future__ import annotations

from benchmarks import brokers, table
from benchmarks.cases import burst
from benchmarks.figures import Target
from benchmarks.sides import Ours
from benchmarks.stage import CaseContext
from benchmarks.waiting import sleep_until, wall
from delaytasks.model.moves import Status

DEPTHS = (1_000, 5_000, 20_000)
#: The first seconds are not measured, since the worker learns the size of its chunks.
WARM_S, MEASURED_S = 4.0, 10.0
LOOK_S = 0.05


def run(stage: CaseContext) -> None:
    count, side = stage.size(50_000, 10_000), stage.ours
    normal = burst.drain(stage, "standing", side, count, burst.due_together(count, 30)).per_s
    for depth in DEPTHS:
        per_s = _standing(stage, side, depth)
        what = f"{depth:,} due tasks wait all the time"
        stage.figure("standing", what, "run/s", Target("ratio", least=0.9), "a burst:").add(
            per_s, normal
        )


def _standing(stage: CaseContext, side: Ours, depth: int) -> float:
    """Return the rate at which tasks run while `depth` others wait."""
    runs = []
    with side.serving():
        began, scheduled = wall(), 0
        while (now := wall()) < began + WARM_S + MEASURED_S:
            done = len(side.notes)
            runs.append((now, done))
            missing = depth - (scheduled - done)
            if missing > 0:
                side.schedule_many([now] * missing)
                scheduled += missing
            sleep_until(now + LOOK_S)
        side.wait_for(scheduled, burst.DEADLINE_S)
    brokers.clear()
    warm = [(at, done) for at, done in runs if at >= began + WARM_S]
    (first, before), (last, after) = warm[0], warm[-1]
    per_s = (after - before) / (last - first)
    stage.say(
        f"standing: {depth:,} wait: {per_s:,.0f}/s, {scheduled:,} scheduled, "
        f"{table.count(Status.DONE):,} DONE"
    )
    return per_s
