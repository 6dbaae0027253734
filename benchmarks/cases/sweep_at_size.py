"""What the sweep and the slow path read, in a large table and in a small one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from datetime import timedelta

from benchmarks import ours, table
from benchmarks.figures import Target
from benchmarks.stage import Stage
from benchmarks.waiting import BenchError
from delaytasks.core.states import Status
from delaytasks.engine.sweeper import STEP

SMALL = 10_000
#: As many in both tables, since a read costs more the more it finds.
NEAR, OVERDUE, RUNNING = 2000, 5000, 200
CLAIMED = 200
WARM_UP, REPEATS = 3, 15
MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86400.0


def run(stage: Stage) -> None:
    if not table.can_fill():
        stage.say("sweep_at_size: left out, since only PostgreSQL makes so many rows in minutes")
        return
    pending = stage.size(10_000_000, 200_000)
    small, large = _measure(stage, SMALL), _measure(stage, pending)
    table.clear()
    for what in small:
        target = Target("ratio", most=3)
        figure = stage.figure("sweep_at_size", f"{what}; {pending:,} pending", "ms", target, against=f"{SMALL:,}:")
        figure.add(large[what], small[what])


def _measure(stage: Stage, pending: int) -> dict[str, float]:
    """Milliseconds of each read, in the median."""
    _fill(stage, pending)
    sweeps, settings = ours.delays.store.sweeps, ours.delays.settings
    claims = ours.delays.store.claims("bench", None)
    now = ours.delays.clock.certain_now()
    until = now + timedelta(seconds=HOUR_S)
    reads: list[tuple[str, Callable[[], object], object]] = [
        ("begin_sweep", lambda: sweeps.begin_sweep(0, 1, 0.0) is not None, True),
        ("stale_houses", lambda: sweeps.stale_houses(1, settings.self_sweep_s), []),
        (f"near, {NEAR:,} rows", lambda: sum(map(len, sweeps.near(now, until, 0, 1))), NEAR),
        ("levels, one late", lambda: len(sweeps.levels(settings.grace_s)), 1),
        ("levels, none late", lambda: sweeps.levels(DAY_S), []),
        ("lapse, none", lambda: sweeps.lapse(settings.max_lapses, STEP).total, 0),
        ("purge, nothing old", lambda: sweeps.purge(30 * DAY_S, STEP), 0),
        (f"claim_due of {CLAIMED}", lambda: len(claims.claim_due(settings.default_queue, [0], CLAIMED)), CLAIMED),
        ("claim_suspect, none", lambda: claims.claim_suspect(settings.default_queue, [0]), None),
    ]
    found = {what: _median_ms(what, read, answer) for what, read, answer in reads}
    said = ", ".join(f"{what} {ms:.2f} ms" for what, ms in found.items())
    stage.say(f"sweep_at_size: {pending:,} pending: {said}")
    return found


def _fill(stage: Stage, pending: int) -> None:
    table.clear()
    table.forget_sweeps()
    before = time.monotonic()
    table.fill(pending // 2, Status.DONE, -7 * DAY_S, -HOUR_S)
    table.fill(pending - NEAR - OVERDUE, Status.NOT_COMPLETE, 2 * HOUR_S, 7 * DAY_S)
    table.fill(OVERDUE, Status.NOT_COMPLETE, -HOUR_S, -MINUTE_S)
    table.fill(RUNNING, Status.RUNNING, -MINUTE_S, 0)
    inserted = time.monotonic()
    table.settle_down()
    # Last, so that they are near when they are read.
    table.fill(NEAR, Status.NOT_COMPLETE, 10 * MINUTE_S, 11 * MINUTE_S)
    stage.say(
        f"sweep_at_size: {pending:,} pending and {pending // 2:,} finished rows, {table.size_mb():,.0f} MB, inserted "
        f"in {inserted - before:.0f} s; vacuum, analyse and checkpoint took {time.monotonic() - inserted:.0f} s"
    )


def _median_ms(what: str, read: Callable[[], object], answer: object) -> float:
    times = []
    for _ in range(WARM_UP + REPEATS):
        before = time.perf_counter()
        found = read()
        times.append((time.perf_counter() - before) * 1000)
        if found != answer:
            raise BenchError(f"sweep_at_size: {what} found {found!r}, not {answer!r}")
    return statistics.median(times[WARM_UP:])
