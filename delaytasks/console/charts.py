"""Charts that the server draws as SVG, so that they need no script."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

CHART_WIDTH, CHART_HEIGHT, FOOT = 720, 150, 18


def histogram(
    values: Sequence[int], titles: Sequence[str], marks: Sequence[str], label: str
) -> Markup:
    """Return a bar for each value.

    Parameters
    ----------
    values, titles, marks
        The heights of the bars, the texts under the pointer, and the texts of the axis. About six
        of `marks` are shown.
    label
        The chart in words, for readers who do not see it.
    """
    most, bar = max([*values, 1]), CHART_WIDTH / len(values)
    parts = [
        Markup('<line class="grid" x1="0" x2="{}" y1="{}" y2="{}"/>').format(CHART_WIDTH, y, y)
        for y in (0.5, CHART_HEIGHT / 2, CHART_HEIGHT - 0.5)
    ]
    gap = min(3.0, bar / 4)
    for number, (value, title) in enumerate(zip(values, titles, strict=True)):
        tall = max((CHART_HEIGHT - 6) * value / most, 2) if value else 0
        parts.append(
            Markup(
                '<g><title>{}</title><rect class="hit" x="{:.1f}" y="0" width="{:.1f}" '
                'height="{}"/><rect class="bar" x="{:.1f}" y="{:.1f}" width="{:.1f}" '
                'height="{:.1f}" rx="2"/></g>'
            ).format(
                title,
                number * bar,
                bar,
                CHART_HEIGHT,
                number * bar + gap / 2,
                CHART_HEIGHT - tall,
                bar - gap,
                tall,
            )
        )
    step = max(len(values) // 6, 1)
    for number in range(0, len(values) - step // 2, step):
        parts.append(
            Markup('<text x="{:.1f}" y="{}">{}</text>').format(
                number * bar + 2, CHART_HEIGHT + 14, marks[number]
            )
        )
    return Markup(
        '<svg class="histogram" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
    ).format(CHART_WIDTH, CHART_HEIGHT + FOOT, label, Markup("").join(parts))
