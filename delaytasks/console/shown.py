"""Times and numbers as the pages show them, and charts of them.

The charts are inline SVG, without scripts. Their colours are those of the page's style, by the
classes of `Series.style`. Times of day are in the time zone of the instants.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta, tzinfo
from typing import NamedTuple

from flask import Flask, session
from markupsafe import Markup, escape

from delaytasks.model.clock import UTC
from delaytasks.model.errors import InvalidInputError
from delaytasks.model.inputs import show_duration
from delaytasks.model.text import some_values
from delaytasks.operate.task_calls import pretty_body, pretty_result
from delaytasks.operate.texts import last_line, show_from_now, show_measured, show_offset
from delaytasks.recurring.definition import zone_of

#: An instant in a sentence or in a log entry, but not in the key of an occurrence, after "@".
_INSTANT = re.compile(
    r"(?<![\w@])[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]+)?(?:Z|\+00:00)"
)


def viewer_zone() -> tzinfo:
    """Return the time zone that the viewer has chosen; UTC by default."""
    try:
        return zone_of(session["zone"]) if "zone" in session else UTC
    except InvalidInputError:  # another process of the console may know more zones
        return UTC


def local_text(value: datetime) -> str:
    """Return an instant in the viewer's time zone, with the name of the zone."""
    try:
        local = value.astimezone(viewer_zone())
    except (OverflowError, ValueError):  # in the first or the last year
        local = value
    return f"{local:%Y-%m-%d %H:%M:%S} {local.strftime('%Z') or local.strftime('%z')}"


def instant(value: datetime | None, now: datetime | None = None) -> Markup:
    """Return an instant, with the distance from `now` if it is given."""
    if value is None:
        return Markup('<span class="none">–</span>')
    iso, text = value.isoformat(), local_text(value)
    if now is None:
        return Markup('<time datetime="{}">{}</time>').format(iso, text)
    return Markup('<time datetime="{}" title="{}">{}</time> <span class="muted">{}</span>').format(
        iso, text, text, show_from_now(value, now)
    )


def distance(value: datetime | None, now: datetime) -> Markup:
    """Return only the distance from `now`; the instant is its title."""
    if value is None:
        return instant(None)
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        value.isoformat(), local_text(value), show_from_now(value, now)
    )


def local_times(value: object) -> str:
    """Return a text whose instants in UTC are written in the viewer's time zone, with its name.

    A list is shortened to its first values.
    """
    text = some_values(value) if isinstance(value, (list, tuple)) else str(value)

    def local(found: re.Match[str]) -> str:
        try:
            return local_text(datetime.fromisoformat(f"{found[0][:19]}+00:00"))
        except ValueError:
            return found[0]

    return _INSTANT.sub(local, text)


def install_filters(app: Flask) -> None:
    shown = (instant, distance, local_times)
    app.jinja_env.filters.update({filter.__name__: filter for filter in shown})
    app.jinja_env.globals["zip"] = zip
    app.jinja_env.filters.update(
        error_line=lambda error: last_line(error, 160) if error else "",
        pretty_body=pretty_body,
        pretty_result=pretty_result,
        duration=show_duration,
        offset=show_offset,
        measured=show_measured,
        number=lambda value: f"{value:,}",
        # What people call the statuses. The words are also the names of CSS classes.
        status_word=lambda name: "waiting" if name == "NOT_COMPLETE" else name.lower(),
    )


# -- charts ---------------------------------------------------------------------------------------


WIDTH, HEIGHT = 520, 190
LEFT, RIGHT, TOP, BOTTOM = 54, 6, 10, 24
#: The most labels on the time axis, and lines on the other one.
TIME_LABELS, LINES = 8, 4
#: The space that a label of the time axis needs to both sides.
LABEL_SPACE = 18
#: The minutes between two labels of the time axis.
ROUND_MINUTES = (1, 2, 5, 10, 15, 30, 60, 120, 180, 240, 360, 720, 1440)
#: The durations on an axis: from a millisecond to four weeks.
ROUND_S = (0.001, 0.01, 0.1, 1.0, 10.0, 60.0, 600.0, 3600.0, 36_000.0, 259_200.0, 2_419_200.0)


class Series(NamedTuple):
    """The values of one name, one for each step. The style of the page has its colour."""

    name: str
    style: str
    values: Sequence[float | None]


class Scale(NamedTuple):
    """Maps values to shares of the height."""

    share: Callable[[float], float]
    lines: Sequence[tuple[float, str]]

    def y(self, value: float) -> float:
        share = min(max(self.share(value), 0.0), 1.0)
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - share)


def stacked_bars(starts: Sequence[datetime], step: timedelta, parts: Sequence[Series]) -> Markup:
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
    return _chart("Counts", starts, step, parts, scale, shapes, lambda value: f"{value or 0:,.0f}")


def lines(starts: Sequence[datetime], step: timedelta, parts: Sequence[Series]) -> Markup:
    """Return a chart of durations, on a logarithmic scale. A step without value is a gap."""
    scale = _durations([value for part in parts for value in part.values if value is not None])
    shapes = [shape for part in parts for shape in _line(part, len(starts), scale)]
    return _chart("Durations", starts, step, parts, scale, shapes, show_measured)


def sparkline(values: Sequence[float], label: str) -> Markup:
    """Return a small bar chart for a cell of a table."""
    most, width = max(values, default=0) or 1, 120 / max(len(values), 1)
    bars = (
        f'<rect x="{n * width:.1f}" y="{20 - 20 * value / most:.1f}" width="{width * 0.8:.1f}" '
        f'height="{20 * value / most:.1f}"/>'
        for n, value in enumerate(values)
        if value
    )
    return Markup(
        '<svg class="spark" viewBox="0 0 120 20" role="img" aria-label="{0}">'
        "<title>{0}</title>{1}</svg>"
    ).format(label, Markup("".join(bars)))


# -- the scales of a chart ------------------------------------------------------------------------


def _counts(most: float) -> Scale:
    least = max(most, 1) / LINES
    power = 10.0 ** math.floor(math.log10(max(least, 1)))
    # The next number of the form 1, 2 or 5 times a power of ten, at least 1.
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
    top = step * math.ceil(max(most, 1) / step)
    values = [n * step for n in range(round(top / step) + 1)]
    # The margin has space for seven characters.
    marks = [(v, f"{v / 1000:,.0f}k" if v >= 100_000 else f"{v:,.0f}") for v in values]
    return Scale(lambda value: value / top, marks)


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


# -- the shapes of a chart ------------------------------------------------------------------------


def _columns(count: int) -> Sequence[tuple[int, float, float]]:
    """Return the number, the position and the width of each bar."""
    space = (WIDTH - LEFT - RIGHT) / max(count, 1)
    gap = min(2.0, space * 0.2)
    return [(n, LEFT + n * space + gap / 2, space - gap) for n in range(count)]


def _rect(x: float, y: float, width: float, height: float, style: str, inner: str = "") -> str:
    return (
        f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}">{inner}</rect>'
    )


def _text(anchor: str, x: float, y: float, text: str) -> str:
    return f'<text class="axis" text-anchor="{anchor}" x="{x:.1f}" y="{y:.1f}">{text}</text>'


def _line(part: Series, count: int, scale: Scale) -> Iterator[str]:
    runs: list[list[str]] = [[]]
    for value, (_, x, width) in zip(part.values, _columns(count), strict=True):
        if value is None:
            runs.append([])
        else:
            runs[-1].append(f"{x + width / 2:.1f},{scale.y(value):.1f}")
    for points in runs:
        if len(points) > 1:
            yield f'<polyline class="line {part.style}" points="{" ".join(points)}"/>'
        elif points:
            cx, _, cy = points[0].partition(",")
            yield f'<circle class="{part.style}" cx="{cx}" cy="{cy}" r="3"/>'


def _chart(
    about: str,
    starts: Sequence[datetime],
    step: timedelta,
    parts: Sequence[Series],
    scale: Scale,
    shapes: Sequence[str],
    show: Callable[[float | None], str],
) -> Markup:
    # Each step has an invisible column, whose title is shown where the pointer is.
    hover = []
    for n, x, width in _columns(len(starts)):
        values = ", ".join(f"{part.name} {show(part.values[n])}" for part in parts)
        title = escape(f"{starts[n]:%Y-%m-%d %H:%M} to {starts[n] + step:%H:%M %Z}: {values}")
        inner = f"<title>{title}</title>"
        hover.append(_rect(x, TOP, width, HEIGHT - TOP - BOTTOM, "hover", inner))
    drawn = "".join([*_grid(scale), *shapes, *_time_axis(starts), *hover])
    label = f"{about} by time: {', '.join(part.name for part in parts)}"
    chart = Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(label)}">{drawn}</svg>'
    )
    if len(parts) == 1:
        return chart
    colour = Markup('<span><i class="key {}"></i>{}</span>')
    legend = Markup("").join(colour.format(part.style, part.name) for part in parts)
    return Markup('<p class="legend">{}</p>{}').format(legend, chart)


def _grid(scale: Scale) -> Iterator[str]:
    for value, text in scale.lines:
        y = scale.y(value)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        yield _text("end", LEFT - 6, y + 4, text)


# -- the time axis of a chart ---------------------------------------------------------------------


def _time_axis(starts: Sequence[datetime]) -> Iterator[str]:
    """Yield labels at round times of day, and below the other axis the name of their zone."""
    if not starts:
        return
    yield _text("end", LEFT - 6, HEIGHT - 6, f"{starts[0]:%Z}")
    minutes, ticks = [at.hour * 60 + at.minute for at in starts], list[int]()
    for every in ROUND_MINUTES:
        ticks = [n for n, m in enumerate(minutes) if n and m // every != minutes[n - 1] // every]
        if len(ticks) <= TIME_LABELS:
            break
    for n in ticks:
        x = LEFT + n * (WIDTH - LEFT - RIGHT) / len(starts)
        is_new_day = starts[n].date() != starts[n - 1].date()
        if LEFT + LABEL_SPACE < x < WIDTH - LABEL_SPACE:
            text = f"{starts[n]:%a %d}" if is_new_day else f"{starts[n]:%H:%M}"
            yield _text("middle", x, HEIGHT - 6, text)
            yield f'<path class="grid" d="M{x:.1f} {HEIGHT - BOTTOM}v4"/>'
