"""Workers that are killed or restarted: how late the others start."""

from __future__ import annotations

import threading
import time

from benchmarks import ours
from benchmarks.cases.depth import in_background
from benchmarks.cases.loads import check
from benchmarks.figures import late
from benchmarks.run import Stage
from benchmarks.side import Figures, Side
from benchmarks.waiting import BenchError, instant, sleep_until, wall
from delaytasks import Status

#: Armed tasks, seconds from the begin of scheduling to the first due time, and from there to the
#: last one.
TASKS, AHEAD_S, SPREAD_S = 1000, 15.0, 10.0


def kill(stage: Stage, side: Side) -> Figures:
    """Kill one of two workers that hold armed tasks, a second before the first one is due."""
    with side.serving(2):
        first = wall() + AHEAD_S
        side.schedule(TASKS, first, first + SPREAD_S, AHEAD_S)
        if wall() > first - 1:
            raise BenchError("scheduling took too long")
        sleep_until(first - 1)
        side.kill(0)
        sleep_until(first + SPREAD_S)
        side.wait_for(TASKS, 120)
        check(side, TASKS)
        late_ms = side.rows.lateness_ms()
    late_ones = sum(one > 1000 for one in late_ms)
    return {
        f"kill -9 of one of two workers, {TASKS:,} armed, latest, s": max(late_ms) / 1000,
        "later than 1 s, tasks": late_ones,
    }


RATE, BATCH_ROWS, RESTARTS, BETWEEN_S = 200, 20, 6, 2.0


def deploy(stage: Stage, side: Side) -> Figures:
    """Restart each of two workers by TERM three times, at a steady load."""
    over = threading.Event()

    def restart(_: threading.Event) -> None:
        try:
            for number in range(RESTARTS):
                time.sleep(BETWEEN_S)
                side.restart(number % 2)
                stage.say(f"deploy: restart {number + 1}")
            time.sleep(BETWEEN_S)
        finally:
            over.set()

    with side.serving(2):
        began, count = wall(), 0
        with in_background(restart):
            while not over.is_set():
                sleep_until(began + count / RATE)
                dues = [wall() + 2 + number / RATE for number in range(BATCH_ROWS)]
                side.delays.schedule_many((ours.TAG, {"due": due}, instant(due)) for due in dues)
                count += BATCH_ROWS
        sleep_until(wall() + 2)
        side.wait_for(count, 60)
        late_ms, done = side.rows.lateness_ms(), side.rows.count(Status.DONE)
        if min(late_ms) < 0:
            raise BenchError("a task began early")
        return {
            f"{RESTARTS} restarts of two workers at {RATE}/s: most lateness, ms": max(late_ms),
            **late(late_ms),
            "lost, tasks": float(count - done),
            "run twice, tasks": float(len(side.ran()) - count),
        }
