"""The charts of the console and of the report, as text."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from delaytasks.core.clock import UTC
from delaytasks.statistics.charts import BOTTOM, HEIGHT, LEFT, ON_TIME, Series, lines

STEP = timedelta(hours=1)
#: Pixels of a letter in the labels of the axes.
LETTER = 6.5
NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)


def chart(values: list[float | None], start: datetime = NOON, step: timedelta = STEP) -> str:
    starts = [start + n * step for n in range(len(values))]
    return lines(starts, step, [Series("these workers", "p99", values)], on_time_s=1.0)


def heights(text: str) -> list[float]:
    [points] = re.findall(r'<polyline class="line p99" points="([^"]*)"', text)
    return [float(point.split(",")[1]) for point in points.split()]


def labels(text: str) -> dict[str, float]:
    """Return the labels of the lines of the grid, and their heights."""
    found = re.findall(r'y1="([\d.]+)" [^>]*/><text class="axis"[^>]*>([^<]*)</text>', text)
    return {label: float(y) for y, label in found}


def test_a_step_on_time_is_at_a_line_with_this_label_and_not_at_a_duration() -> None:
    text = chart([0.0, 0.9, 3600.0, 1800.0])
    known, [first, second, peak, lower] = labels(text), heights(text)
    assert list(known) == ["on time", "10m", "1h"]
    assert first == second == known["on time"] == HEIGHT - BOTTOM
    assert peak == known["1h"]
    assert known["10m"] > lower > known["1h"]
    assert "13:00 to 14:00 UTC: these workers on time" in text
    assert "14:00 to 15:00 UTC: these workers 1h" in text


def test_the_margin_has_space_for_the_label_on_time() -> None:
    [right] = re.findall(rf'x="(\d+)" [^>]*>{ON_TIME}<', chart([0.0]))
    assert int(right) < LEFT
    assert int(right) > LETTER * len(ON_TIME)


def test_a_week_on_time_has_no_line_above_the_label() -> None:
    text = chart([0.0] * 5)
    assert set(heights(text)) == {labels(text)["on time"]}


def test_a_step_whose_tasks_never_start_is_a_gap() -> None:
    text = chart([0.0, 0.0, None, 5.0, 6.0])
    assert text.count("<polyline") == 2


def test_the_time_axis_names_its_zone() -> None:
    assert chart([0.0] * 5).count(">UTC</text>") == 1
    text = chart([0.0] * 5, NOON.astimezone(ZoneInfo("Europe/Berlin")))
    assert text.count(">CET</text>") == 1
    assert ">13:00</text>" in text


def test_a_step_of_days_has_the_day_of_its_end() -> None:
    text = chart([1.0, 2.0], NOON, timedelta(days=7))
    assert "2030-01-31 12:00 to 2030-02-07 12:00 UTC: these workers 1.0s" in text
    assert ">Jan 31</text>" in text
    assert "12:00 to 13:00 UTC" in chart([1.0])
