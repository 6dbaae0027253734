"""Charts as inline SVG, without scripts, for the console.

Their colours are those of the page's style, by the classes of `Series.style`. Times of day are in
the time zone of the instants.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, tzinfo
from html import escape
from typing import NamedTuple

from delaytasks.model.clock import UTC
from delaytasks.model.inputs import show_measured
from delaytasks.statistics.reading import SeriesPoint

WIDTH, HEIGHT = 520, 190
LEFT, RIGHT, TOP, BOTTOM = 54, 6, 10, 24
#: The most labels on the time axis, and lines on the other one.
TIME_LABELS, LINES = 8, 4
#: The width of a letter of a label, and the space between two labels.
LETTER, LABEL_GAP = 6.5, 2.0
#: The times between two labels of the time axis.
ROUND_TIMES = [
    *(timedelta(minutes=minutes) for minutes in (1, 2, 5, 10, 15, 30, 60, 120, 180, 240, 360, 720)),
    *(timedelta(days=days) for days in (1, 2, 7, 14, 28, 84)),
]
#: The durations on an axis: from a millisecond to four weeks.
ROUND_S = (0.001, 0.01, 0.1, 1.0, 10.0, 60.0, 600.0, 3600.0, 36_000.0, 259_200.0, 2_419_200.0)


class Series(NamedTuple):
    """The values of one name, one for each step. The style of the page has its colour."""

    name: str
    style: str
    values: Sequence[float | None]


class Scale(NamedTuple):
    """Maps values to heights."""

    position: Callable[[float], float]
    lines: Sequence[tuple[float, str]]

    def y(self, value: float) -> float:
        share = min(max(self.position(value), 0.0), 1.0)
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - share)


def throughput_chart(points: Sequence[SeriesPoint], step: timedelta, zone: tzinfo = UTC) -> str:
    """Return a chart of the runs of each step by outcome, with its legend."""
    totals = [point.total for point in points]
    parts = [
        Series("done", "done", [one.done for one in totals]),
        Series("retried", "retried", [one.retried for one in totals]),
        Series("failed", "failed", [one.failed for one in totals]),
        Series("cancelled or expired", "other", [one.cancelled + one.expired for one in totals]),
    ]
    return legend(parts) + stacked_bars(_starts(points, zone), step, parts)


def lateness_chart(points: Sequence[SeriesPoint], step: timedelta, zone: tzinfo = UTC) -> str:
    """Return a chart of the lateness of each step, with its legend."""
    parts = [
        Series(name, f"p{share}", [p.total.lateness_quantile(share / 100) for p in points])
        for name, share in (("p50: half began earlier", 50), ("p99: 99 of 100 began earlier", 99))
    ]
    return legend(parts) + lines(_starts(points, zone), step, parts)


def duration_chart(points: Sequence[SeriesPoint], step: timedelta, zone: tzinfo = UTC) -> str:
    """Return a chart of the durations of the runs of each step, with its legend."""
    parts = [
        Series(name, f"p{share}", [p.total.duration_quantile(share / 100) for p in points])
        for name, share in (("p50: half were shorter", 50), ("p99: 99 of 100 were shorter", 99))
    ]
    return legend(parts) + lines(_starts(points, zone), step, parts)


def _starts(points: Sequence[SeriesPoint], zone: tzinfo) -> list[datetime]:
    return [point.start.astimezone(zone) for point in points]


def stacked_bars(starts: Sequence[datetime], step: timedelta, parts: Sequence[Series]) -> str:
    """Return a chart of counts that are stacked in each step."""
    sums = [sum(part.values[n] or 0 for part in parts) for n in range(len(starts))]
    scale = _counts(max(sums, default=0))
    shapes = []
    for n, x, width in _columns(len(starts)):
        below = 0.0
        for part in parts:
            value = part.values[n] or 0
            if value:
                top, bottom = scale.y(below + value), scale.y(below)
                shapes.append(_rect(x, top, width, bottom - top, part.style))
            below += value
    titles = [
        _title(start, step, {part.name: f"{part.values[n] or 0:,.0f}" for part in parts})
        for n, start in enumerate(starts)
    ]
    label = "Counts by time: " + ", ".join(part.name for part in parts)
    return _chart(label, starts, step, scale, shapes, titles)


def lines(starts: Sequence[datetime], step: timedelta, parts: Sequence[Series]) -> str:
    """Return a chart of durations, on a logarithmic scale. A step without value is a gap."""
    known = [value for part in parts for value in part.values if value is not None]
    scale = _durations(known)
    shapes = [shape for part in parts for shape in _line(part, len(starts), scale)]
    titles = [
        _title(start, step, {part.name: show_measured(part.values[n]) for part in parts})
        for n, start in enumerate(starts)
    ]
    label = "Durations by time: " + ", ".join(part.name for part in parts)
    return _chart(label, starts, step, scale, shapes, titles)


def legend(parts: Sequence[Series]) -> str:
    items = (f'<span><i class="key {part.style}"></i>{escape(part.name)}</span>' for part in parts)
    return f'<p class="legend">{"".join(items)}</p>'


def sparkline(values: Sequence[float], label: str) -> str:
    """Return a small bar chart for a cell of a table."""
    most, width = max(values, default=0) or 1, 120 / max(len(values), 1)
    bars = "".join(
        f'<rect x="{n * width:.1f}" y="{20 - 20 * value / most:.1f}" width="{width * 0.8:.1f}" '
        f'height="{20 * value / most:.1f}"/>'
        for n, value in enumerate(values)
        if value
    )
    return (
        f'<svg class="spark" viewBox="0 0 120 20" role="img" aria-label="{escape(label)}">'
        f"<title>{escape(label)}</title>{bars}</svg>"
    )


# -- scales ---------------------------------------------------------------------------------------


def _counts(most: float) -> Scale:
    step = _round_up(max(most, 1) / LINES)
    top = step * math.ceil(max(most, 1) / step)
    values = [n * step for n in range(round(top / step) + 1)]
    # The margin has space for seven characters.
    marks = [(v, f"{v / 1000:,.0f}k" if v >= 100_000 else f"{v:,.0f}") for v in values]
    return Scale(lambda value: value / top, marks)


def _round_up(step: float) -> float:
    """Return the next number of the form 1, 2 or 5 times a power of ten, at least 1."""
    power = 10.0 ** math.floor(math.log10(step)) if step > 1 else 1.0
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step)


def _durations(values: Sequence[float]) -> Scale:
    """Return a logarithmic scale of the round durations around the values."""
    positive = [value for value in values if value > 0] or [0.01, 1.0]
    first = min(max(bisect_right(ROUND_S, min(positive)) - 1, 0), len(ROUND_S) - 2)
    last = max(bisect_left(ROUND_S, max(positive)), first + 1)
    marks = ROUND_S[first : last + 1]
    low, high = math.log10(marks[0]), math.log10(marks[-1])
    return Scale(
        lambda value: (math.log10(value) - low) / (high - low) if value > 0 else 0.0,
        [(mark, show_measured(mark)) for mark in marks],
    )


# -- shapes ---------------------------------------------------------------------------------------


def _columns(count: int) -> Sequence[tuple[int, float, float]]:
    """Return the number, the position and the width of each bar."""
    space = (WIDTH - LEFT - RIGHT) / max(count, 1)
    gap = min(2.0, space * 0.2)
    return [(n, LEFT + n * space + gap / 2, space - gap) for n in range(count)]


def _rect(x: float, y: float, width: float, height: float, style: str) -> str:
    return (
        f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
    )


def _line(part: Series, count: int, scale: Scale) -> Sequence[str]:
    columns = _columns(count)
    runs: list[list[str]] = [[]]
    for n, value in enumerate(part.values):
        if value is None:
            runs.append([])
        else:
            _, x, width = columns[n]
            runs[-1].append(f"{x + width / 2:.1f},{scale.y(value):.1f}")
    shapes = []
    for points in runs:
        if len(points) > 1:
            shapes.append(f'<polyline class="line {part.style}" points="{" ".join(points)}"/>')
        elif points:
            cx, _, cy = points[0].partition(",")
            shapes.append(f'<circle class="{part.style}" cx="{cx}" cy="{cy}" r="3"/>')
    return shapes


def _title(start: datetime, step: timedelta, values: Mapping[str, str]) -> str:
    shown = ", ".join(f"{name} {value}" for name, value in values.items())
    end = "%H:%M %Z" if step < timedelta(days=1) else "%Y-%m-%d %H:%M %Z"
    return f"{start:%Y-%m-%d %H:%M} to {start + step:{end}}: {shown}"


def _chart(
    label: str,
    starts: Sequence[datetime],
    step: timedelta,
    scale: Scale,
    shapes: Sequence[str],
    titles: Sequence[str],
) -> str:
    # Each step has an invisible column, whose title is shown where the pointer is.
    height = HEIGHT - TOP - BOTTOM
    hover = [
        f'<rect class="hover" x="{x:.1f}" y="{TOP}" width="{width:.1f}" height="{height}">'
        f"<title>{escape(title)}</title></rect>"
        for (_, x, width), title in zip(_columns(len(starts)), titles, strict=True)
    ]
    inner = "".join([*_grid(scale), *shapes, *_time_axis(starts, step), *hover])
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(label)}">{inner}</svg>'
    )


def _grid(scale: Scale) -> Sequence[str]:
    return [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="axis" text-anchor="end" x="{LEFT - 6}" y="{y + 4:.1f}">{escape(text)}</text>'
        for value, text in scale.lines
        for y in [scale.y(value)]
    ]


def _time_axis(starts: Sequence[datetime], step: timedelta) -> Sequence[str]:
    if not starts:
        return []
    # The corner below the other axis has space for the zone.
    place = f'class="axis" text-anchor="end" x="{LEFT - 6}" y="{HEIGHT - 6}"'
    shapes, month = [f"<text {place}>{starts[0]:%Z}</text>"], 0
    free = LEFT - 6 + LABEL_GAP
    begin, length = starts[0].astimezone(UTC), len(starts) * step
    for at in _ticks(starts[0], length):
        x = LEFT + (at.astimezone(UTC) - begin) / length * (WIDTH - LEFT - RIGHT)
        text = _tick_label(at, month)
        half = len(text) * LETTER / 2
        if x - half >= free and x + half < WIDTH:
            place = f'class="axis" text-anchor="middle" x="{x:.1f}" y="{HEIGHT - 6}"'
            mark = f'<path class="grid" d="M{x:.1f} {HEIGHT - BOTTOM}v4"/>'
            shapes.append(f"<text {place}>{text}</text>{mark}")
            month = at.month if _is_midnight(at) else month
            free = x + half + LABEL_GAP
    return shapes


def _tick_label(at: datetime, month: int) -> str:
    """Return the day at midnight, with its month unless the last label had it; else the time."""
    if _is_midnight(at):
        return f"{at:%a %d}" if at.month == month else f"{at:%a %b %d}"
    # When clocks go forward, a time of day that does not exist is shown as the next one that does.
    return f"{at.astimezone(UTC).astimezone(at.tzinfo):%H:%M}"


def _is_midnight(at: datetime) -> bool:
    return at.hour == at.minute == 0


def _ticks(start: datetime, length: timedelta) -> Iterator[datetime]:
    """Yield at most `TIME_LABELS` + 1 round times of day in the zone of `start`."""
    every = next((each for each in ROUND_TIMES if length <= TIME_LABELS * each), length)
    begin = start.astimezone(UTC)
    tick = start.replace(hour=0, minute=0, second=0, microsecond=0)
    # Labels that are a week or more apart are Mondays.
    tick -= timedelta(days=tick.weekday() % max(every.days, 1))
    while (at := tick.astimezone(UTC)) < begin + length:
        if at >= begin:
            yield tick
        tick += every
