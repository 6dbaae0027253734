"""Celery tasks with an eta whose messages wait as rows, compared with bare Celery."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks import brokers
from benchmarks.cases import steady
from benchmarks.figures import Target, percentile
from benchmarks.machine import load
from benchmarks.sides import DurableEta, Side
from benchmarks.stage import CaseContext
from benchmarks.waiting import TooSlowError, sleep_until, wall

#: Seconds between the begin of scheduling and the due time.
LEAD_S = {False: 90, True: 30}
DEADLINE_S = 240.0


class Burst(NamedTuple):
    #: With rows: messages that the broker has confirmed. With bare Celery: tasks that have ended.
    dispatched_per_s: float
    ended_per_s: float


def run(stage: CaseContext) -> None:
    count = stage.size(20_000, 4_000)
    what = f"{count:,} due together"
    dispatched = stage.figure(
        "durable_eta", f"{what}, published by rows, run by bare Celery", "tasks/s",
        Target("ratio", least=3),
    )  # fmt: skip
    ended = stage.figure("durable_eta", f"{what}, run", "tasks/s")
    p50 = stage.figure(
        "durable_eta", f"{steady.RATE}/s, lateness p50", "ms", Target("ratio", most=2)
    )
    p99 = stage.figure("durable_eta", "lateness p99", "ms", Target("ratio", most=2))

    sides: tuple[Side, Side] = (stage.durable_eta, stage.bare)
    bursts = stage.each(lambda side: _burst(stage, side, count), *sides)
    dispatched.add(*(burst.dispatched_per_s for burst in bursts))
    ended.add(*(burst.ended_per_s for burst in bursts))
    found = stage.each(lambda side: _steady(stage, side), *sides)
    p50.add(*(percentile(lateness, 0.5) for lateness in found))
    p99.add(*(percentile(lateness, 0.99) for lateness in found))


def _burst(stage: CaseContext, side: Side, count: int) -> Burst:
    with side.serving():
        due = wall() + LEAD_S[stage.is_quick]
        side.schedule_many([due] * count)
        if wall() > due:
            raise TooSlowError(f"{side.name} could not schedule {count:,} tasks in time")
        sleep_until(due)
        side.wait_for(count, DEADLINE_S)
        ended_per_s = count / (side.ended_at() - due)
        dispatched_per_s = ended_per_s
        if isinstance(side, DurableEta):
            dispatched_per_s = count / (side.dispatched_at() - due)
    brokers.clear()
    stage.say(
        f"durable_eta: {side.name} dispatched {dispatched_per_s:,.0f}/s, ran {ended_per_s:,.0f}/s, "
        f"load {load():.1f}"
    )
    return Burst(dispatched_per_s, ended_per_s)


def _steady(stage: CaseContext, side: Side) -> list[float]:
    with side.serving():
        lateness = steady.work(stage, side)
    brokers.clear()
    stage.say(
        f"durable_eta: {side.name} lateness p50 {percentile(lateness, 0.5):.2f} ms, p99 "
        f"{percentile(lateness, 0.99):.2f} ms, load {load():.1f}"
    )
    return lateness
