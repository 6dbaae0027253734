"""Charts that the server draws as SVG, so that they need no script."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

CHART_WIDTH, CHART_HEIGHT, FOOT = 720, 150, 18


def histogram(values: Sequence[int]) -> Markup:
    """Return the bars of tasks that are due in each of the next minutes."""
    most, bar = max([*values, 1]), CHART_WIDTH / len(values)
    parts = [
        Markup('<line class="grid" x1="0" x2="{}" y1="{}" y2="{}"/>').format(CHART_WIDTH, y, y)
        for y in (0.5, CHART_HEIGHT / 2, CHART_HEIGHT - 0.5)
    ]
    for minute, value in enumerate(values):
        tall = max((CHART_HEIGHT - 6) * value / most, 2) if value else 0
        parts.append(
            Markup(
                '<g><title>{}</title><rect class="hit" x="{:.1f}" y="0" width="{:.1f}" '
                'height="{}"/><rect class="bar" x="{:.1f}" y="{:.1f}" width="{:.1f}" '
                'height="{:.1f}" rx="2"/></g>'
            ).format(
                f"in {minute} to {minute + 1} min: {value:,}",
                minute * bar,
                bar,
                CHART_HEIGHT,
                minute * bar + 1.5,
                CHART_HEIGHT - tall,
                bar - 3,
                tall,
            )
        )
    step = max(len(values) // 6, 1)
    for minute in range(0, len(values), step):
        text = "now" if minute == 0 else f"+{minute} min"
        parts.append(
            Markup('<text x="{:.1f}" y="{}">{}</text>').format(
                minute * bar + 2, CHART_HEIGHT + 14, text
            )
        )
    label = f"Tasks due in the next {len(values)} minutes, at most {most:,} in one minute"
    return Markup(
        '<svg class="histogram" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
    ).format(CHART_WIDTH, CHART_HEIGHT + FOOT, label, Markup("").join(parts))
