"""Chunk sizes for single calls that are due together, and for isolated tasks.

Processors take no time, a short time and a long time. The adaptive sizes of chunks and of the pool
queue have to fit each of them.
"""

from __future__ import annotations

from benchmarks import brokers, ours, table
from benchmarks.cases.burst import DEADLINE_S
from benchmarks.figures import Target, percentile
from benchmarks.machine import load
from benchmarks.stage import CaseContext
from benchmarks.waiting import BenchError, instant, sleep_until, wall
from delaytasks.model.moves import Status

PROCESSES = 2
#: The processor's duration in milliseconds, the maximum of tasks due together, and the isolated
#: tasks per second.
KINDS = ((0, 20_000, 50), (1, 8_000, 50), (50, 200, 20))
#: The last task is scheduled this long before its due time; a later one would run alone.
LEAD_S = 1.0


def run(stage: CaseContext) -> None:
    for ms, count, rate in KINDS:
        with stage.ours.serving():
            _together(stage, ms, stage.size(count, count // 5))
            stage.ours.clear()
            _alone(stage, ms, rate)
        brokers.clear()


def _together(stage: CaseContext, ms: float, most: int) -> None:
    due, count = wall() + stage.size(29, 10), 0
    while count < most and wall() < due - LEAD_S:
        _schedule(due, ms)
        count += 1
    if wall() > due:
        raise BenchError(f"gathering: the last of {count:,} calls took longer than {LEAD_S:g} s")
    sleep_until(due)
    stage.ours.wait_for(count, DEADLINE_S)
    took_s = table.last_settled_at() - due
    if table.count(Status.DONE) != count:
        raise BenchError(f"gathering: of {count:,} tasks {table.count(Status.DONE):,} are DONE")
    drained = stage.figure("gathering", f"{ms} ms, up to {most:,} due together: drained", "per s")
    drained.add(count / took_s)
    if count < most:
        drained.remark = f"{count:,} in a round, since the machine was busy"
    if ms:
        share = stage.figure(
            "gathering", f"{ms} ms: share of the ideal", "", Target("value", least=0.7)
        )
        share.add(count * ms / 1000 / PROCESSES / took_s)
    if table.can_fill():
        stage.figure("gathering", f"{ms} ms: rows in a chunk", "").add(count / table.settlements())
    stage.say(f"gathering: {ms} ms: {count:,} in {took_s:.2f} s, load {load():.1f}")


def _alone(stage: CaseContext, ms: float, rate: int) -> None:
    seconds = stage.size(10, 3)
    began = wall()
    for number in range(rate * seconds):
        sleep_until(began + number / rate)
        _schedule(wall() + 1, ms)
    stage.ours.wait_for(rate * seconds, DEADLINE_S)
    late = stage.ours.lateness_ms()
    p50 = stage.figure(
        "gathering",
        f"{ms} ms: isolated tasks, {rate} a second, lateness p50",
        "ms",
        Target("value", most=3),
    )
    p50.add(percentile(late, 0.5))
    stage.say(
        f"gathering: {ms} ms: isolated tasks p50 {percentile(late, 0.5):.2f} ms, p99 "
        f"{percentile(late, 0.99):.2f} ms"
    )


def _schedule(due: float, ms: float) -> None:
    ours.delays.schedule_delay(ours.WORK, {"due": due, "seconds": ms / 1000}, at=instant(due))
