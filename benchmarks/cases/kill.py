"""`kill -9` of one of two workers that hold armed tasks: the maximum lateness."""

from __future__ import annotations

from benchmarks import brokers, ours, table
from benchmarks.figures import Target, percentile
from benchmarks.stage import CaseContext
from benchmarks.waiting import BenchError, sleep_until, wall
from delaytasks.model.moves import Status

TASKS = 1000
#: Seconds from the begin of scheduling to the first due time, and from there to the last one.
AHEAD_S, SPREAD_S = 8.0, 10.0
#: Seconds from the kill to the first due time.
BEFORE_S = 1.0
DISPATCH_S = 2.0


def run(stage: CaseContext) -> None:
    side, settings = stage.ours, ours.delays.settings
    most_s = settings.grace_s + settings.sweep_s + DISPATCH_S
    with side.serving(2):
        first = wall() + AHEAD_S
        for number in range(TASKS):
            side.schedule(first + SPREAD_S * number / TASKS)
        held = side.held()
        if wall() > first - BEFORE_S:
            raise BenchError("kill: scheduling took too long")
        sleep_until(
            first - BEFORE_S
        )  # the kill comes before the first run, since this case measures armed tasks, not leases
        victim = side.workers[0]
        side.kill(victim)
        stage.say(f"kill: {victim.name} is dead; the workers held {held}")
        sleep_until(first + SPREAD_S)
        side.wait_for(TASKS, 120)
        lateness = side.lateness_ms()
        done, repeated = table.count(Status.DONE), table.repeated()
        if done != TASKS or min(lateness) < 0:
            raise BenchError(
                f"kill: {done:,} of {TASKS:,} are DONE, the earliest by {min(lateness):.1f} ms"
            )
    brokers.clear()
    figure = stage.figure(
        "kill",
        f"kill -9 of one of two workers, {TASKS:,} armed, latest",
        "s",
        Target("value", most_s),
    )
    figure.add(max(lateness) / 1000)
    late = sum(late > 1000 for late in lateness)
    stage.say(
        f"kill: latest {max(lateness) / 1000:.2f} s, p50 {percentile(lateness, 0.5):.1f} ms, "
        f"{late} later than 1 s, "
        f"{repeated} ran twice"
    )
