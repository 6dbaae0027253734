"""Bar charts as SVG, readable on light and dark screens: each chart has its own background."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.report import short

WIDTH, NAMES, VALUES = 760, 210, 150
BAR, GAP, TOP = 18, 8, 52
#: The least visible value of a logarithmic scale; smaller values have the shortest bar.
LEAST = 0.1
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600; font-size: 15px }
.axis, .none { fill: #57606a; font-size: 12px }
.ground { fill: #ffffff; stroke: #d0d7de }
.others { fill: #8fa1b3 }
.others2 { fill: #c8d1da }
.ours { fill: #1a7f5a }
.ours2 { fill: #7cc4a8 }
.spread { stroke: #24292f; stroke-width: 1.5 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.axis, .none { fill: #9da7b1 }
.ground { fill: #161b22; stroke: #30363d }
.others { fill: #6e7f91 }
.others2 { fill: #46525e }
.ours { fill: #3fb98a }
.ours2 { fill: #226b50 }
.spread { stroke: #e6edf3 }
}
"""


@dataclass(frozen=True)
class Bar:
    """A bar. `parts` are drawn one behind the other; without any, `instead` is the reason.

    `low` and `high` are the limits of the sum of the parts.
    """

    name: str
    parts: Sequence[float]
    low: float = 0.0
    high: float = 0.0
    is_ours: bool = False
    instead: str = ""


def bars(
    title: str, unit: str, shown: Sequence[Bar], by_tens: bool = False, parts: Sequence[str] = ()
) -> str:
    """Draw bars. `parts` names the parts of each bar; `by_tens` selects a logarithmic axis."""
    most = max([sum(bar.parts) for bar in shown] + [bar.high for bar in shown] + [LEAST * 10])
    room = WIDTH - NAMES - VALUES

    def reach(value: float) -> float:
        if not by_tens:
            return room * max(value, 0) / most
        return room * max(math.log10(max(value, LEAST) / LEAST), 0.01) / math.log10(most / LEAST)

    height = TOP + len(shown) * (BAR + GAP) + 12
    axis = f"{unit}{', each step ten times as much' if by_tens else ''}"
    axis += f": {' + '.join(parts)}" if parts else ""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(f'{title}, {unit}')}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6"/>',
        f'<text class="title" x="14" y="24">{escape(title)}</text>',
        f'<text class="axis" x="14" y="42">{escape(axis)}</text>',
    ]
    for number, bar in enumerate(shown):
        lines += _bar(bar, TOP + number * (BAR + GAP), reach)
    return "\n".join([*lines, "</svg>", ""])


def _bar(bar: Bar, y: float, reach: Callable[[float], float]) -> list[str]:
    base, x = y + 14, float(NAMES)
    lines = [f'<text x="{NAMES - 8}" y="{base}" text-anchor="end">{escape(bar.name)}</text>']
    if not bar.parts:
        reason = escape(bar.instead or "not measured")
        return [*lines, f'<text class="none" x="{NAMES + 4}" y="{base}">{reason}</text>']
    total = 0.0
    for number, part in enumerate(bar.parts):
        total += part
        end = NAMES + reach(total)
        kind = f"{'ours' if bar.is_ours else 'others'}{'2' if number else ''}"
        width = max(end - x, 1)
        lines.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}"/>'
        )
        x = end
    if bar.high > bar.low:
        low, high, middle = NAMES + reach(bar.low), NAMES + reach(bar.high), y + BAR / 2
        lines.append(
            f'<line class="spread" x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}"/>'
        )
        x = max(x, high)
    return [*lines, f'<text x="{x + 6:.1f}" y="{base}">{escape(short(total))}</text>']
