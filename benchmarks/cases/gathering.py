"""Tasks scheduled one call at a time that fall due together, and lone ones, for processors that take no time, a little
and much: whether chunks and what is in flight find their own values."""

from __future__ import annotations

from benchmarks import brokers, ours, table
from benchmarks.cases.burst import DEADLINE_S
from benchmarks.figures import Target, percentile
from benchmarks.machine import load
from benchmarks.stage import Stage
from benchmarks.waiting import BenchError, instant, sleep_until, wall
from delaytasks.core.states import Status

PROCESSES = 2
#: What a processor takes in milliseconds, how many are due together at most, and how many lone ones come in a second.
KINDS = ((0, 20_000, 50), (1, 8_000, 50), (50, 200, 20))
#: The last one that is due with others is scheduled so long before: what came too late would run alone.
LEAD_S = 1.0


def run(stage: Stage) -> None:
    for ms, count, rate in KINDS:
        with stage.ours.serving():
            _together(stage, ms, stage.size(count, count // 5))
            stage.ours.clear()
            _alone(stage, ms, rate)
        brokers.clear()


def _together(stage: Stage, ms: float, most: int) -> None:
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


def _alone(stage: Stage, ms: float, rate: int) -> None:
    seconds = stage.size(10, 3)
    began = wall()
    for number in range(rate * seconds):
        sleep_until(began + number / rate)
        _schedule(wall() + 1, ms)
    stage.ours.wait_for(rate * seconds, DEADLINE_S)
    late = stage.ours.lateness_ms()
    p50 = stage.figure(
        "gathering",
        f"{ms} ms: lone tasks, {rate} a second, lateness p50",
        "ms",
        Target("value", most=3),
    )
    p50.add(percentile(late, 0.5))
    stage.say(
        f"gathering: {ms} ms: lone ones p50 {percentile(late, 0.5):.2f} ms, p99 {percentile(late, 0.99):.2f} ms"
    )


def _schedule(due: float, ms: float) -> None:
    ours.delays.schedule_at(ours.WORK, {"due": due, "seconds": ms / 1000}, instant(due))
