"""Forecasts: whether a peak takes as long as forecast, and the time of a forecast of many tasks."""

from __future__ import annotations

import statistics
import time

from benchmarks import brokers, ours, table
from benchmarks.machine import load
from benchmarks.notes import Note
from benchmarks.processes import POOL
from benchmarks.sides import Ours, Side
from benchmarks.stage import CaseContext
from benchmarks.waiting import BenchError, instant, sleep_until, wall
from delaytasks.core.states import Status

DAY_S, HOUR_S = 86_400.0, 3600.0
PROCESSES = int(POOL[-1])
#: The duration of a task, and the numbers of tasks of the burst that measures the speed and of the
#: peak.
TAKES_S = 0.02
MEASURED, PEAK = 600, 2400
WORKERS = (1, 2)
LEAD_S, DEADLINE_S = 12.0, 240.0
WAITING, QUICK_WAITING = 10_000_000, 200_000
REPEATS = 5


class Working(Ours):
    """delaytasks with tasks that take a while. Tasks are counted by their notes."""

    def schedule_all(self, count: int, due: float) -> None:
        body = {"due": due, "seconds": TAKES_S}
        ours.delays.schedule_many([(ours.WORK, body, instant(due))] * count)

    is_done, ended_at = Side.is_done, Side.ended_at

    def last_start_s(self, due: float) -> float:
        """Return how late the last task of a burst began."""

        def ended(note: Note) -> float:
            return note.ended

        return max(map(ended, self.notes.read())) - TAKES_S - due


def run(stage: CaseContext) -> None:
    """Forecast a peak with the speed that a smaller burst had, and let it happen."""
    side = Working(stage.ours.folder, stage.ours.notes)
    for workers in WORKERS:
        with side.serving(workers):
            late_s = _burst(side, stage.size(MEASURED, MEASURED // 3))[0]
            rate = stage.size(MEASURED, MEASURED // 3) / late_s / workers / PROCESSES
            side.clear()
            late_s, forecast_s = _burst(side, stage.size(PEAK, PEAK // 3), rate)
            stage.say(
                f"forecast: {workers} workers, {rate:.1f} tasks a process and second: forecast "
                f"{forecast_s:.1f} s, measured {late_s:.1f} s, load {load():.1f}"
            )
            what = f"a peak of tasks of 20 ms, workers {workers}"
            stage.figure("forecast", f"{what}: lateness forecast", "s").add(forecast_s)
            stage.figure("forecast", f"{what}: lateness measured", "s").add(late_s)
        brokers.clear()


def _burst(side: Working, tasks: int, rate: float | None = None) -> tuple[float, float]:
    """Return how late the last task began, and what the forecast said before."""
    due = wall() + LEAD_S
    side.schedule_all(tasks, due)
    forecast = ours.delays.forecast(1 / 24, rate=rate)
    if forecast.late_s is None or forecast.due != tasks:
        raise BenchError(f"the forecast was {forecast}")
    sleep_until(due)
    side.wait_for(tasks, DEADLINE_S)
    return side.last_start_s(due), forecast.late_s


def run_at_size(stage: CaseContext) -> None:
    """Measure a forecast of a week with very many waiting tasks, and the same from the cache."""
    if not table.can_fill():
        stage.say("forecast_at_size: skipped, since only PostgreSQL creates these rows in minutes")
        return
    rows = stage.size(WAITING, QUICK_WAITING)
    table.clear()
    with table.indexed_at_the_end():
        table.fill(rows * 9 // 10, Status.NOT_COMPLETE, HOUR_S, 7 * DAY_S - HOUR_S)
        table.fill(rows // 10, Status.NOT_COMPLETE, 2 * DAY_S, 2 * DAY_S)
    table.settle_down()
    for what, max_age in (("computed", 0), ("kept", 3600)):
        took: list[float] = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            forecast = ours.delays.forecast(workers=4, processes=8, max_age=max_age)
            took.append((time.perf_counter() - began) * 1000)
        name = f"a week with {rows:,} waiting tasks, {what}"
        stage.figure("forecast_at_size", name, "ms").add(statistics.median(took))
        stage.say(
            f"forecast_at_size: {name}: {statistics.median(took):,.1f} ms, {forecast.due:,} due, "
            f"load {load():.1f}"
        )
    table.clear()
