"""A tenant with very many tasks and one with a few, all due together: the lateness of the small
tenant.
"""

from __future__ import annotations

from benchmarks import brokers, ours, table
from benchmarks.cases.limits import limited
from benchmarks.figures import Target, percentile
from benchmarks.machine import load
from benchmarks.stage import CaseContext
from benchmarks.waiting import instant, sleep_until, wait_until, wall
from delaytasks.model.task import NewTask

FEW = 50
#: Two processes run a thousand such tasks per second.
ROW_S = 0.002
#: The capacity of two processes.
CAPACITY = 4
DEADLINE_S = 120.0


def run(stage: CaseContext) -> None:
    many, lead = stage.size(50_000, 5_000), stage.size(30, 10)
    what = f"{FEW} tasks of one tenant, scheduled behind {many:,} of another: p99 of their lateness"
    fair = stage.figure(
        "fairness", what, "ms", Target("value", most=2000), against="without a policy:"
    )
    with limited(ours.SLOW, concurrency=CAPACITY):
        ours_ms = _lateness_ms(stage, many, lead)
    without_ms = _lateness_ms(stage, many, lead)
    fair.add(percentile(ours_ms, 0.99), percentile(without_ms, 0.99))
    stage.say(
        f"fairness: p99 {percentile(ours_ms, 0.99):,.0f} ms, without a policy "
        f"{percentile(without_ms, 0.99):,.0f} ms"
    )


def _lateness_ms(stage: CaseContext, many: int, lead: float) -> list[float]:
    with stage.ours.serving():
        due = wall() + lead
        for key, count in (("large", many), ("small", FEW)):
            body = {"seconds": ROW_S}
            ours.delays.schedule_many(
                NewTask(ours.SLOW, body, at=instant(due), limit_key=key) for _ in range(count)
            )
        sleep_until(due)
        wait_until(
            lambda: len(table.lateness_of("small")) == FEW,
            DEADLINE_S,
            "the small tenant's tasks",
            0.2,
        )
        found = table.lateness_of("small")
        stage.say(
            f"fairness: of the large tenant {len(table.lateness_of('large')):,} began, load "
            f"{load():.1f}"
        )
    brokers.clear()
    return found
