"""Fifty tasks per second, due in one to five seconds: how late they begin."""

from __future__ import annotations

import random

from benchmarks import brokers
from benchmarks.figures import Target, percentile
from benchmarks.machine import load
from benchmarks.sides import Side
from benchmarks.stage import CaseContext
from benchmarks.waiting import sleep_until, wall

RATE = 50
SOONEST_S, LATEST_S = 1.0, 5.0
DEADLINE_S = 60.0


def run(stage: CaseContext) -> None:
    p50 = stage.figure(
        "steady", f"{RATE}/s due in 1 to 5 s, lateness p50", "ms", Target("ratio", most=2)
    )
    p99 = stage.figure("steady", "lateness p99", "ms", Target("ratio", most=2))
    early = stage.figure("steady", "begun early", "tasks", Target("value", most=0))

    def measured(side: Side) -> list[float]:
        with side.serving():
            lateness = work(stage, side)
        brokers.clear()
        stage.say(
            f"steady: {side.name} p50 {percentile(lateness, 0.5):.2f} ms, p99 "
            f"{percentile(lateness, 0.99):.2f} ms, "
            f"worst {max(lateness):.1f} ms, load {load():.1f}"
        )
        return lateness

    found = stage.each(measured, stage.ours, stage.bare)
    p50.add(*(percentile(lateness, 0.5) for lateness in found))
    p99.add(*(percentile(lateness, 0.99) for lateness in found))
    early.add(*(float(sum(late < 0 for late in lateness)) for lateness in found))


def work(
    stage: CaseContext, side: Side, rate: int = RATE, batch: int = 1, seconds: int | None = None
) -> list[float]:
    """Return the lateness of each task in milliseconds.

    Tasks are scheduled singly or in batches.
    """
    count = rate * (seconds or stage.size(20, 8))
    chance = random.Random(1)  # the same delays on all sides and in every round
    began = wall()
    for number in range(0, count, batch):
        sleep_until(began + number / rate)
        dues = [wall() + chance.uniform(SOONEST_S, LATEST_S) for _ in range(batch)]
        if batch == 1:
            side.schedule(dues[0])
        else:
            side.schedule_many(dues)
    took_s = wall() - began
    if took_s > count / rate * 1.1:
        stage.say(f"{side.name} got {count / took_s:,.0f} tasks a second only, not {rate:,}")
    side.wait_for(count, DEADLINE_S)
    return side.lateness_ms()
