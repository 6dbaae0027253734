"""The cost of 100,000 recurring schedules, of which about 1,000 are due each minute.

The sweeps of this process make the tasks of the schedules and arm them. For comparison, the process
schedules as many other tasks by `schedule_many`. No worker runs.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from benchmarks import brokers, ours, table
from benchmarks.figures import Target
from benchmarks.stage import CaseContext
from benchmarks.waiting import BenchError
from delaytasks import DelayTasks
from delaytasks.recurring.creation import create
from delaytasks.runtime import runtime_of

#: Schedules for each task that is due in a minute: most of them are due daily.
SCHEDULES_A_TASK = 100
#: The zones of the schedules, so that few of them share their occurrences.
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Asia/Tokyo", "Australia/Lord_Howe")
PACE_S = 5.0
#: The delay of the tasks that are scheduled for comparison. No sweep arms them.
FAR_S = 86_400.0


class RecurringCost(NamedTuple):
    """Seconds of all sweeps, of the creation of tasks, and of scheduling as many other tasks."""

    sweeps_s: float
    creation_s: float
    scheduling_s: float


def run(stage: CaseContext) -> None:
    if not table.can_fill():
        stage.say("recurring: skipped, since it needs PostgreSQL")
        return
    a_minute, sweeps = stage.size(1000, 200), stage.size(36, 12)
    _, delays = ours.make("bench_recurring")
    table.clear()
    table.forget_sweeps()
    _fill_schedules(delays, a_minute)
    table.settle_down()
    cost = _sweep(delays, sweeps)
    made = _made(delays)
    if made < a_minute * sweeps * PACE_S / 60:
        raise BenchError(f"recurring: only {made:,} tasks were made")
    _report(stage, cost, a_minute, sweeps, made)
    brokers.clear()
    table.clear()
    table.forget_sweeps()
    delays.close()


def _report(stage: CaseContext, cost: RecurringCost, a_minute: int, sweeps: int, made: int) -> None:
    """Report the creation as a part of a core: no process works longer than the sweep waits."""
    core = 100 * cost.creation_s / (sweeps * PACE_S)
    sweep_ms, creation_ms, scheduling_ms = (each / sweeps * 1000 for each in cost)
    what = f"{a_minute * SCHEDULES_A_TASK:,} schedules, {a_minute:,} due a minute"
    stage.say(
        f"recurring: {what}: {made:,} tasks made; creation takes {core:.2f} % of a core; means: "
        f"a sweep {sweep_ms:.1f} ms, the creation in it {creation_ms:.1f} ms, schedule_many of as "
        f"many tasks {scheduling_ms:.1f} ms"
    )
    stage.figure("recurring", f"{what}: creation", "% of a core", Target("value", most=5)).add(core)
    stage.figure(
        "recurring",
        f"{what}: a sweep and the creation in it",
        "ms",
        Target("ratio", most=1.2),
        "and schedule_many:",
    ).add(sweep_ms + creation_ms, sweep_ms + scheduling_ms)


def _fill_schedules(delays: DelayTasks, a_minute: int) -> None:
    """Store schedules that are due each hour, and for the rest daily."""
    hourly = a_minute * 60
    table.fill_recurring(
        delays, [_timing(n, n < hourly) for n in range(max(a_minute * SCHEDULES_A_TASK, hourly))]
    )


def _timing(number: int, is_hourly: bool) -> tuple[str, str]:
    """Return the cron expression and the time zone of a schedule."""
    minute, zone = number % 60, ZONES[number % len(ZONES)]
    hour = "*" if is_hourly else str(number // 60 % 24)
    return f"{minute} {hour} * * *", zone


def _sweep(delays: DelayTasks, sweeps: int) -> RecurringCost:
    """Sweep at the usual pace. The first sweep arms a whole horizon, and is not measured."""
    runtime = runtime_of(delays)
    runtime.sweeper.sweep()
    sweeps_s = creation_s = scheduling_s = 0.0
    for _ in range(sweeps):
        time.sleep(PACE_S)
        before, began = _made(delays), time.monotonic()
        if runtime.store.sweeps.has_due_schedule(delays.settings.recurring_lead_s):
            create(runtime)  # so that the sweep finds no schedule that is due
        created = time.monotonic()
        if count := _made(delays) - before:
            delays.schedule_many([(ours.TAG, {"due": 0}, FAR_S)] * count)
        scheduled = time.monotonic()
        runtime.sweeper.sweep()
        creation_s += created - began
        scheduling_s += scheduled - created
        sweeps_s += time.monotonic() - scheduled
    return RecurringCost(sweeps_s, creation_s, scheduling_s)


def _made(delays: DelayTasks) -> int:
    return runtime_of(delays).events.counts["recurring.created"]
