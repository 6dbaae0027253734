"""Very many overdue rows when a worker starts, and new tasks that are scheduled meanwhile."""

from __future__ import annotations

import random
import statistics
import threading

from benchmarks import brokers, table
from benchmarks.cases import burst
from benchmarks.figures import Figure, Target, percentile
from benchmarks.machine import load
from benchmarks.meters import Meter
from benchmarks.samples import Samples, sampling
from benchmarks.sides import Ours
from benchmarks.stage import CaseContext
from benchmarks.waiting import BenchError, sleep_until, wait_until, wall
from delaytasks.model.moves import Status

HOUR_S, MINUTE_S = 3600.0, 60.0
#: New tasks per second, and when they are due.
RATE, SOONEST_S, LATEST_S = 50, 0.5, 3.0
DEADLINE_S = 900.0
#: The limit for messages in the broker: tokens, and tasks armed since the worker's last fetch.
IN_FLIGHT = 100
#: Memory that a process allocates when it begins to work.
GROWN_MB = 30.0


def run(stage: CaseContext) -> None:
    if not table.can_fill():
        stage.say("overload: skipped, since only PostgreSQL creates these rows within seconds")
        return
    for side, in_order in ((stage.ours, True), (stage.ours_in_redis, True), (stage.ours, False)):
        _run(stage, side, in_order)
        brokers.clear()
    table.clear()
    table.forget_sweeps()


def _run(stage: CaseContext, side: Ours, in_order: bool) -> None:
    """Use rows in the order of their due times, or rows in random order."""
    rows, normal = stage.size(1_000_000, 50_000), [_normal(stage, side)]
    side.clear()
    table.forget_sweeps()
    table.fill(rows, Status.NOT_COMPLETE, -HOUR_S, -MINUTE_S, in_order=in_order)
    table.settle_down()
    began = wall()
    with side.started(), sampling(side) as samples:
        wait_until(lambda: len(side.notes), DEADLINE_S, "the first row to run", 0.01)
        first, meter = wall(), Meter(side)
        samples.forget_memory()
        fresh = Fresh(side)
        try:
            wait_until(lambda: len(side.notes) >= rows, DEADLINE_S, f"{rows:,} tasks to run", 0.1)
        finally:
            fresh.stop()
        cost = meter.cost(rows)
        side.wait_for(rows + fresh.count, DEADLINE_S)
    backlog, late_ms = _checked(side, rows, fresh.count, began)
    per_s = rows / (max(backlog) - first)
    brokers.clear()
    normal.append(_normal(stage, side))
    who = side.timer if in_order else f"{side.timer}, random order"
    _add(
        stage,
        who,
        rows,
        first - began,
        per_s,
        statistics.mean(normal),
        percentile(late_ms, 0.99),
        samples,
    )
    stage.say(
        f"overload: {who}: {rows:,} rows at {per_s:,.0f}/s (bursts {normal[0]:,.0f} and "
        f"{normal[1]:,.0f}/s), the first one {first - began:.2f} s after the worker was started; "
        f"{fresh.count:,} fresh tasks: p50 {percentile(late_ms, 0.5):.1f} ms, "
        f"p99 {percentile(late_ms, 0.99):.1f} ms, worst {max(late_ms):.0f} ms; "
        f"CPU a task: {cost}; {max(samples.queued)} messages at most; "
        f"worker MB {samples.worker}; broker MB {samples.broker}; load {load():.1f}"
    )


def _checked(side: Ours, rows: int, fresh: int, began: float) -> tuple[list[float], list[float]]:
    """Return when the backlog ran, and how late each new task was in milliseconds."""
    notes = side.notes.read()
    late_ms = [(note.began - note.due) * 1000 for note in notes if note.due > began]
    backlog = [note.ended for note in notes if note.due < began]
    done = table.count(Status.DONE)
    is_complete = (done, len(backlog), len(late_ms)) == (rows + fresh, rows, fresh)
    if not is_complete or min(late_ms) < 0:
        raise BenchError(
            f"overload: {done:,} of {rows + fresh:,} are DONE, {len(backlog):,} of the backlog ran "
            f"and {len(late_ms):,} new ones, the earliest {min(late_ms):.3f} ms after its due time"
        )
    return backlog, late_ms


def _normal(stage: CaseContext, side: Ours) -> float:
    """Return the rate of a burst of some seconds.

    It is measured before and after, because the machine's speed varies.
    """
    count = stage.size(100_000, 5_000)
    return burst.drain(
        stage, "overload", side, count, burst.due_together(count, stage.size(25, 15))
    ).per_s


def _add(
    stage: CaseContext,
    who: str,
    rows: int,
    first_s: float,
    per_s: float,
    normal: float,
    p99_ms: float,
    samples: Samples,
) -> None:
    def figure(what: str, unit: str, target: Target, against: str = "") -> Figure:
        return stage.figure("overload", f"{who}: {what}", unit, target, against)

    figure(
        f"{rows:,} overdue, from the worker's start to the first run", "s", Target("value", most=5)
    ).add(first_s)
    figure(f"{rows:,} overdue, drained/s", "", Target("ratio", least=0.7), "bursts around it:").add(
        per_s, normal
    )
    figure(f"new tasks meanwhile, {RATE}/s, lateness p99", "ms", Target("value", most=2000)).add(
        p99_ms
    )
    figure("messages in the broker, maximum", "", Target("value", most=IN_FLIGHT)).add(
        max(samples.queued)
    )
    for whose, memory in (("the worker", samples.worker), ("the broker", samples.broker)):
        if memory.values:
            grown = figure(
                f"memory of {whose}, peak above its start", "MB", Target("value", most=GROWN_MB)
            )
            grown.add(memory.peak - memory.start)


class Fresh:
    """Schedules tasks at a steady rate until it is stopped."""

    def __init__(self, side: Ours) -> None:
        self._side = side
        self.count = 0
        self._error: Exception | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bench-fresh", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()
        if self._error is not None:
            raise BenchError(f"scheduling failed: {self._error}") from self._error

    def _run(self) -> None:
        chance, began = random.Random(1), wall()
        try:
            while not self._is_over.is_set():
                sleep_until(began + self.count / RATE)
                self._side.schedule(wall() + chance.uniform(SOONEST_S, LATEST_S))
                self.count += 1
        except Exception as error:
            self._error = error
