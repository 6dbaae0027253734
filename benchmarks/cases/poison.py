"""A task that kills its process in each run, among other tasks: its effect on the others."""

from __future__ import annotations

from benchmarks import brokers, ours
from benchmarks.cases import steady
from benchmarks.figures import Target, percentile
from benchmarks.machine import load
from benchmarks.stage import CaseContext
from benchmarks.waiting import BenchError
from delaytasks import Status


def run(stage: CaseContext) -> None:
    side, seconds = stage.ours, stage.size(60, 40)
    with side.serving():
        before = steady.work(stage, side, seconds=seconds)
        side.clear()
        poison = side.delays.schedule_delay(ours.ABORT, {}, steady.SOONEST_S)
        lateness = steady.work(stage, side, seconds=seconds)
        found = side.delays.get(poison)
    brokers.clear()
    if found.status is not Status.FAILED or len(lateness) != len(before):
        raise BenchError(
            f"poison: it is {found.status.name}, and {len(lateness):,} of {len(before):,} "
            "neighbours ran"
        )
    lapses = stage.figure(
        "poison", "lost leases until it was FAILED", "", Target("value", most=5, least=5)
    )
    lapses.add(found.lapses)
    what = f"lateness p99 of its neighbours, {steady.RATE}/s for {seconds} s"
    late = stage.figure("poison", what, "ms", Target("ratio", most=2), against="without it:")
    late.add(percentile(lateness, 0.99), percentile(before, 0.99))
    stage.say(
        f"poison: {found.lapses} lost leases; neighbours p50 {percentile(lateness, 0.5):.2f} ms, "
        "p99 "
        f"{percentile(lateness, 0.99):.2f} ms, worst {max(lateness):.0f} ms; without it "
        f"{percentile(before, 0.5):.2f}, "
        f"{percentile(before, 0.99):.2f} and {max(before):.0f} ms; load {load():.1f}"
    )
