"""Lateness without a broker, compared with a worker and bare Celery, and the load of an idle
drainer.
"""

from __future__ import annotations

import time

from benchmarks import brokers, processes, table
from benchmarks.cases import steady
from benchmarks.figures import Target, percentile
from benchmarks.machine import load
from benchmarks.stage import CaseContext
from benchmarks.waiting import BenchError, sleep_until, wall

#: The number of tasks that are due immediately, and the seconds between them.
SINGLE, APART_S = 200, 0.02
#: Seconds until a new drainer is idle.
SETTLE_S = 10.0


def run(stage: CaseContext) -> None:
    _run_steady(stage)
    _run_at_once(stage)
    _run_idle(stage)


def _run_steady(stage: CaseContext) -> None:
    name = f"{steady.RATE}/s due in 1 to 5 s, without a broker"
    p50 = stage.figure("direct", f"{name}, lateness p50", "ms", Target("value", most=5))
    p99 = stage.figure("direct", f"{name}, lateness p99", "ms")
    by_worker = stage.figure("direct", "the same by an ordinary worker, p50", "ms")
    found = []
    for side in (stage.ours_direct, stage.ours, stage.bare):
        with side.serving():
            lateness = steady.work(stage, side)
        if min(lateness) < 0:
            raise BenchError(f"direct: {side.name} began one {-min(lateness):.1f} ms early")
        found.append(lateness)
        brokers.clear()
        stage.say(
            f"direct: {side.name} p50 {percentile(lateness, 0.5):.2f} ms, p99 "
            f"{percentile(lateness, 0.99):.2f} ms, "
            f"worst {max(lateness):.1f} ms, load {load():.1f}"
        )
    direct, ours, bare = found
    p50.add(percentile(direct, 0.5), percentile(bare, 0.5))
    p99.add(percentile(direct, 0.99), percentile(bare, 0.99))
    by_worker.add(percentile(ours, 0.5), percentile(bare, 0.5))


def _run_at_once(stage: CaseContext) -> None:
    """Only a database notification can start these tasks before the next poll."""
    found = []
    for side in (stage.ours_direct, stage.bare):
        with side.serving():
            began = wall()
            for number in range(SINGLE):
                sleep_until(began + number * APART_S)
                side.schedule(wall())
            side.wait_for(SINGLE, 60)
            found.append(percentile(side.lateness_ms(), 0.5))
        brokers.clear()
    stage.figure("direct", "due immediately, lateness p50", "ms").add(*found)


def _run_idle(stage: CaseContext) -> None:
    if not table.can_fill():
        stage.say("direct: the idle drainer is skipped, since it needs PostgreSQL")
        return
    side = stage.ours_direct
    with table.private() as database:
        made = processes.drainer(
            side.app_path,
            "idle_direct",
            side.folder,
            side.notes.path,
            BENCH_DATABASE_URL=database.url,
        )
        try:
            time.sleep(SETTLE_S)
            before, began = database.transactions(), time.monotonic()
            usage = made.usage()
            time.sleep(stage.size(60, 20))
            after, took_s = database.transactions(), time.monotonic() - began
            later = made.usage()
            if not made.is_alive:
                raise BenchError(f"direct: {made.name} ended by itself:\n{made.last_words()}")
        finally:
            made.stop()
    figure = stage.figure("direct", "idle drainer: transactions in the database", "/s")
    figure.add((after - before) / took_s)
    if usage is not None and later is not None:
        cpu = stage.figure("direct", "idle drainer: CPU a minute", "s")
        cpu.add((later.cpu_s - usage.cpu_s) / took_s * 60)
