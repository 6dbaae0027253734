"""Draws the picture of docs/forecast.md: the backlog of a peak with 2 and with 4 workers.

`python -m benchmarks.forecast_plot` writes it. The numbers are computed by the simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.plots import STYLE, WIDTH
from delaytasks.forecast.due_counts import DueCount
from delaytasks.forecast.pools import WorkerPool
from delaytasks.forecast.rates import TagRate
from delaytasks.forecast.result import ForecastPool, ForecastStep
from delaytasks.forecast.simulation import Service
from delaytasks.forecast.steps import TimeSteps

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "forecast-peak.svg"
#: The peak, the tasks that are due in each second anyway, and the tasks that a process runs in a
#: second.
PEAK, STEADY, PER_PROCESS = 240_000, 50, 20
PROCESSES_EACH, WORKERS = 8, (2, 4)
MINUTES, PEAK_MINUTE, STEP_S = 30, 5, 15
HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 320, 76, 20, 58, 44
COLOURS = {2: "#c4622d", 4: "#1a7f5a"}


def simulated(workers: int) -> tuple[ForecastPool, Sequence[ForecastStep]]:
    """Return the forecast of a peak at 09:00 of a day that begins at second 0."""
    tag = "newsletter.send"
    counts = [
        DueCount("default", tag, second, STEADY * STEP_S, STEP_S)
        for second in range(0, MINUTES * 60, STEP_S)
    ]
    counts.append(DueCount("default", tag, PEAK_MINUTE * 60, PEAK))
    rates = {tag: TagRate(Service(1 / PER_PROCESS), "given")}
    steps = TimeSteps(0, MINUTES * 60, STEP_S, rates)
    pool = steps.add_pool(WorkerPool(frozenset({"default"}), workers, PROCESSES_EACH), counts, 60)
    return pool, steps.steps()


def draw() -> str:
    """Return the picture as SVG, readable on light and dark screens."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>The backlog of {PEAK:,} tasks due at 09:00, with 2 and 4 workers</title>",
        f"<style>{STYLE} polyline {{ fill: none; stroke-width: 2.5 }}</style>",
        f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="6"/>',
        f'<text class="title" x="14" y="24">{PEAK:,} tasks are due at 09:00</text>',
        '<text class="axis" x="14" y="42">due tasks that have not started</text>',
        *_axes(),
    ]
    for number, workers in enumerate(WORKERS):
        pool, steps = simulated(workers)
        lines += _curve(number, workers, pool, steps)
    return "\n".join([*lines, "</svg>", ""])


def _x(minute: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * minute / MINUTES


def _y(tasks: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * tasks / PEAK


def _axes() -> list[str]:
    lines: list[str] = []
    for minute in range(0, MINUTES + 1, 5):
        clock = (8 * 60 + 60 - PEAK_MINUTE + minute) % 1440
        lines.append(
            f'<text class="axis" x="{_x(minute):.0f}" y="{HEIGHT - 16}" text-anchor="middle">'
            f"{clock // 60:02}:{clock % 60:02}</text>"
        )
    for tasks in range(0, PEAK + 1, PEAK // 4):
        y = _y(tasks)
        lines += [
            f'<text class="axis" x="{LEFT - 8}" y="{y + 4:.0f}" text-anchor="end">{tasks:,}</text>',
            f'<line class="spread" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" '
            'opacity="0.15"/>',
        ]
    return lines


def _curve(
    number: int, workers: int, pool: ForecastPool, steps: Sequence[ForecastStep]
) -> list[str]:
    backlog = {step.start.timestamp() / 60 + STEP_S / 60: step.backlog for step in steps}
    peak = float(PEAK_MINUTE)
    points = [(minute, tasks) for minute, tasks in backlog.items() if minute <= peak]
    points += [(peak, PEAK)]
    points += [(minute, tasks) for minute, tasks in backlog.items() if minute > peak]
    text = " ".join(f"{_x(minute):.1f},{_y(tasks):.1f}" for minute, tasks in points)
    colour, late_s = COLOURS[workers], round(pool.late_s or 0)
    return [
        f'<polyline points="{text}" stroke="{colour}"/>',
        f'<text x="{WIDTH - RIGHT - 8}" y="{TOP + 16 + 20 * number}" text-anchor="end" '
        f'style="fill: {colour}">{workers} workers: at most {late_s // 60} min '
        f"{late_s % 60} s late</text>",
    ]


if __name__ == "__main__":
    PICTURE.write_text(draw())
