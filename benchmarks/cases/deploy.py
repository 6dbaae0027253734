"""A rolling restart under load: each of two workers is ended by TERM and restarted three times."""

from __future__ import annotations

import threading
import time
from itertools import cycle

from benchmarks import brokers, table
from benchmarks.figures import Target, percentile
from benchmarks.sides import Side
from benchmarks.stage import CaseContext
from benchmarks.waiting import BenchError, sleep_until, wall
from delaytasks.model.moves import Status

RATE = 200
#: The size of a batch, and the seconds until it is due.
BATCH_ROWS, AHEAD_S = 20, 2.0
RESTARTS = 6
#: Seconds that a restarted worker works before the next restart.
BETWEEN_S = 2.0
MOST_S = 240.0


def run(stage: CaseContext) -> None:
    side = stage.ours
    with side.serving(2):
        over, errors = threading.Event(), list[Exception]()
        restarts = threading.Thread(target=_restart, args=(stage, side, over, errors), daemon=True)
        began, count = wall(), 0
        restarts.start()
        while not over.is_set():
            sleep_until(began + count / RATE)
            now = wall()
            if now - began > MOST_S:
                raise BenchError(f"deploy: {RESTARTS} restarts took longer than {MOST_S:g} s")
            side.schedule_many([now + AHEAD_S + number / RATE for number in range(BATCH_ROWS)])
            count += BATCH_ROWS
        if errors:
            raise errors[0]
        sleep_until(wall() + AHEAD_S)
        side.wait_for(count, 60)
        lateness, done, ran = side.lateness_ms(), table.count(Status.DONE), len(side.notes)
    brokers.clear()
    if min(lateness) < 0:
        raise BenchError(f"deploy: one began {-min(lateness):.1f} ms early")
    what = f"{RESTARTS} restarts of two workers at {RATE}/s"
    stage.figure("deploy", f"{what}: most lateness", "ms", Target("value", most=1000)).add(
        max(lateness)
    )
    stage.figure("deploy", "lateness p99", "ms").add(percentile(lateness, 0.99))
    stage.figure("deploy", "lost", "tasks", Target("value", most=0)).add(float(count - done))
    stage.figure("deploy", "run twice", "tasks", Target("value", most=0)).add(float(ran - count))
    stage.say(f"deploy: {count:,} tasks, p50 {percentile(lateness, 0.5):.1f} ms")


def _restart(
    stage: CaseContext, side: Side, over: threading.Event, errors: list[Exception]
) -> None:
    try:
        time.sleep(BETWEEN_S)
        for number, place in zip(range(RESTARTS), cycle(range(2))):
            started = time.monotonic()
            side.restart(side.workers[place])
            stage.say(f"deploy: restart {number + 1} took {time.monotonic() - started:.1f} s")
            time.sleep(BETWEEN_S)
    except Exception as error:
        errors.append(error)
    finally:
        over.set()
