"""Many tasks due at one instant: the rate at which they are drained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from benchmarks import brokers, table
from benchmarks.figures import Target, percentile
from benchmarks.machine import load
from benchmarks.meters import Cost, Meter
from benchmarks.producers import schedule_singly
from benchmarks.sides import Ours, Side
from benchmarks.stage import CaseContext
from benchmarks.waiting import BenchError, TooSlowError, sleep_until, wall
from delaytasks.model.moves import Status

#: Schedules the tasks, and returns their due time.
Schedule = Callable[[Side], float]
#: Seconds between scheduling and due time, by whether it is a quick run. Later values are tried if
#: the machine is too busy.
BULK_S = {False: (60, 120), True: (15, 30)}
#: The same for single calls. Within the horizon each call sends a message; beyond it, the sweep
#: sends hundreds of tasks in one.
NEAR_S = {False: (20, 25, 29), True: (10, 20, 29)}
FAR_S = {False: (60, 90), True: (40, 60)}
#: Bare Celery is slow.
DEADLINE_S = 240.0


def run_bulk(stage: CaseContext) -> None:
    """Schedule by `schedule_many`, and by a loop of `apply_async`."""
    count = stage.size(50_000, 5_000)
    schedules = {lead: due_together(count, lead) for lead in BULK_S[stage.is_quick]}
    _run(stage, "burst_bulk", count, "schedule_many", schedules, 10)


def due_together(count: int, lead: float) -> Schedule:
    """Return a schedule of `count` tasks by `schedule_many`, all due at one instant."""

    def schedule(side: Side) -> float:
        due = wall() + lead
        side.schedule_many([due] * count)
        return due

    return schedule


def run_single(stage: CaseContext) -> None:
    """Schedule one call at a time, in several concurrent producers."""
    _run_single(stage, "burst_single", NEAR_S[stage.is_quick])


def run_far(stage: CaseContext) -> None:
    """The same beyond the horizon."""
    _run_single(stage, "burst_far", FAR_S[stage.is_quick])


def _run_single(stage: CaseContext, case: str, leads: Sequence[int]) -> None:
    count = stage.size(20_000, 4_000)
    schedules = {lead: partial(schedule_singly, stage, count=count, lead=lead) for lead in leads}
    _run(stage, case, count, "one call each", schedules, 8)


def _run(
    stage: CaseContext,
    case: str,
    count: int,
    how: str,
    schedules: Mapping[int, Schedule],
    least: float,
) -> None:
    """Run the case. `schedules` maps seconds ahead to schedules, in the order of the attempts."""
    first, *_, last = schedules
    what = f"{count:,} due together, {how} {first} s ahead"
    for lead, schedule in schedules.items():
        try:
            _compare(stage, case, what, count, schedule, least)
        except TooSlowError as error:
            if lead == last:
                raise
            stage.say(f"{case}: {error}; next attempt with more time")
            brokers.clear()
        else:
            if lead != first:
                stage.figure(case, what, "").remark = f"up to {lead} s, since the machine was busy"
            return


def _compare(
    stage: CaseContext, case: str, what: str, count: int, schedule: Schedule, least: float
) -> None:
    drained = stage.figure(case, what, "drained/s", Target("ratio", least=least))
    late = stage.figure(case, "lateness p99", "ms")
    cpu = stage.figure(case, "worker CPU per task", "ms")
    ours, bare = stage.each(
        lambda side: drain(stage, case, side, count, schedule), stage.ours, stage.bare
    )
    drained.add(ours.per_s, bare.per_s)
    late.add(ours.p99_ms, bare.p99_ms)
    cpu.add(ours.cost.worker_ms, bare.cost.worker_ms)


class Drained(NamedTuple):
    per_s: float
    p99_ms: float
    cost: Cost


def drain(stage: CaseContext, case: str, side: Side, count: int, schedule: Schedule) -> Drained:
    with side.serving():
        meter = Meter(side)
        due = schedule(side)
        if wall() > due:
            raise TooSlowError(f"{case}: {side.name} could not schedule {count:,} tasks in time")
        stage.say(f"{case}: {side.name} has scheduled, {due - wall():.0f} s ahead")
        sleep_until(due)
        side.wait_for(count, DEADLINE_S)
        took = side.ended_at() - due
        lateness = side.lateness_ms()
        cost = meter.cost(count)
        if isinstance(side, Ours):
            _check(case, count, lateness)
    brokers.clear()
    p50, p99 = percentile(lateness, 0.5), percentile(lateness, 0.99)
    stage.say(
        f"{case}: {side.name} drained {count:,} in {took:.2f} s, {count / took:,.0f}/s, lateness "
        f"p50 {p50:.0f} ms, "
        f"p99 {p99:.0f} ms, CPU a task: {cost}, load {load():.1f}"
    )
    return Drained(count / took, p99, cost)


def _check(case: str, count: int, lateness: list[float]) -> None:
    done, all_rows = table.count(Status.DONE), table.count()
    if not done == all_rows == count:
        raise BenchError(
            f"{case}: of {count:,} tasks {done:,} are DONE, and there are {all_rows:,} rows"
        )
    if min(lateness) < 0:
        raise BenchError(f"{case}: a task began {-min(lateness):.3f} ms early")
