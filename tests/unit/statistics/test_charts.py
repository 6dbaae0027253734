"""The charts of the console, as text."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from delaytasks.core.clock import UTC, from_us
from delaytasks.core.inputs import parse_duration
from delaytasks.statistics.charts import (
    LEFT,
    RIGHT,
    WIDTH,
    Series,
    lines,
    stacked_bars,
)

STEP = timedelta(hours=1)
#: Pixels of a letter in the labels of the axes.
LETTER = 6.5
NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)


def chart(values: list[float | None], start: datetime = NOON, step: timedelta = STEP) -> str:
    starts = [start + n * step for n in range(len(values))]
    return lines(starts, step, [Series("late", "p99", values)])


def test_a_step_without_value_is_a_gap() -> None:
    text = chart([0.0, 0.0, None, 5.0, 6.0])
    assert text.count("<polyline") == 2


def test_the_time_axis_names_its_zone() -> None:
    assert chart([0.0] * 5).count(">UTC</text>") == 1
    text = chart([0.0] * 5, NOON.astimezone(ZoneInfo("Europe/Berlin")))
    assert text.count(">CET</text>") == 1
    assert ">14:00</text>" in text


# -- the time axis --------------------------------------------------------------------------------


def times(start: datetime, step: timedelta, number: int) -> list[tuple[str, float]]:
    """Return the labels of the time axis, and their positions."""
    begin = start.astimezone(UTC)
    starts = [(begin + n * step).astimezone(start.tzinfo) for n in range(number)]
    text = lines(starts, step, [Series("p99", "p99", [1.0] * number)])
    found = re.findall(r'text-anchor="middle" x="([\d.]+)"[^>]*>([^<]+)<', text)
    return [(label, float(x)) for x, label in found]


def words(labels: list[tuple[str, float]]) -> list[str]:
    return [label for label, _ in labels]


def test_the_labels_of_a_week_are_at_the_midnights() -> None:
    start = datetime(2026, 11, 26, 13, tzinfo=UTC)
    labels = times(start, STEP, 169)
    assert words(labels) == "Fri Nov 27|Sat 28|Sun 29|Mon 30|Tue Dec 01|Wed 02|Thu 03".split("|")
    midnight = datetime(2026, 11, 30, tzinfo=UTC)
    share = (midnight - start) / (169 * STEP)
    assert dict(labels)["Mon 30"] == pytest.approx(LEFT + share * (WIDTH - LEFT - RIGHT), abs=0.1)


def test_the_labels_of_a_day_are_hours_except_at_midnight() -> None:
    labels = times(datetime(2026, 11, 26, 13, 20, tzinfo=UTC), timedelta(minutes=10), 145)
    assert words(labels) == ["16:00", "20:00", "Fri Nov 27", "04:00", "08:00", "12:00"]


def test_the_midnights_are_those_of_the_viewer() -> None:
    start = datetime(2026, 11, 26, 13, 30, tzinfo=ZoneInfo("Asia/Kolkata"))
    labels = times(start, STEP, 168)
    hours = (dict(labels)["Fri Nov 27"] - LEFT) / (WIDTH - LEFT - RIGHT) * 168
    assert hours == pytest.approx(10.5, abs=0.1)


def test_an_hour_that_is_left_out_in_spring_has_no_label() -> None:
    labels = times(datetime(2026, 3, 28, 22, tzinfo=ZoneInfo("Europe/Berlin")), STEP, 10)
    assert "Sun Mar 29" in words(labels)
    assert "02:00" not in words(labels)


@pytest.mark.parametrize("step_s", [60, 600, 3600, 7200, 86_400])
@pytest.mark.parametrize("number", [1, 5, 30, 60, 120, 169, 400])
def test_labels_do_not_overlap(step_s: int, number: int) -> None:
    begin = datetime(2026, 11, 29, 23, 40, tzinfo=UTC)
    labels = times(begin, timedelta(seconds=step_s), number)
    assert len(labels) < 10
    ends = [LEFT - 6.0]
    for label, x in labels:
        half = len(label) * LETTER / 2
        assert ends[-1] < x - half
        ends.append(x + half)
    assert ends[-1] < WIDTH


def test_a_step_of_days_has_the_day_of_its_end() -> None:
    text = chart([1.0, 2.0], NOON, timedelta(days=7))
    assert "2030-01-31 12:00 to 2030-02-07 12:00 UTC: late 1.0s" in text
    assert "12:00 to 13:00 UTC" in chart([1.0])


def test_bars_are_stacked_to_the_height_of_their_sum() -> None:
    starts, step = [from_us(0), from_us(60_000_000)], parse_duration("1m")
    parts = [Series("done", "done", [60, 0]), Series("failed", "failed", [40, None])]
    chart = stacked_bars(starts, step, parts)
    bars = re.findall(
        r'<rect class="(done|failed)" [^>]* y="([\d.]+)" [^>]*height="([\d.]+)"', chart
    )
    assert [name for name, _, _ in bars] == ["done", "failed"]
    (_, y, height), (_, upper_y, upper_height) = bars
    assert float(upper_y) + float(upper_height) == pytest.approx(float(y), abs=0.2)
    assert float(height) / float(upper_height) == pytest.approx(1.5, abs=0.02)
    assert "1970-01-01 00:00 to 00:01 UTC: done 60, failed 40" in chart


def test_the_labels_of_the_counts_and_durations_are_short() -> None:
    starts, step = [from_us(0), from_us(60_000_000)], parse_duration("1m")

    def texts(chart: str) -> list[str]:
        *found, zone = re.findall(r'text-anchor="end"[^>]*>([^<]+)<', chart)
        assert zone == "UTC"
        return found

    assert texts(stacked_bars(starts, step, [Series("due", "due", [240_000, 0])])) == [
        "0", "100k", "200k", "300k",
    ]  # fmt: skip
    for seconds, expected in (
        ([109.0, 217.0], ["1m", "10m"]),
        ([0.004, 7200.0], ["1ms", "10ms", "100ms", "1.0s", "10s", "1m", "10m", "1h", "10h"]),
        ([1e9, None], ["3d", "4w"]),
        ([1e-9, None], ["1ms", "10ms"]),
    ):
        assert texts(lines(starts, step, [Series("late", "p99", seconds)])) == expected


def test_a_step_without_runs_is_a_gap_in_a_line() -> None:
    starts = [from_us(n * 60_000_000) for n in range(5)]
    chart = lines(starts, parse_duration("1m"), [Series("p99", "p99", [0.1, 0.2, None, 0.1, 10])])
    points = re.findall(r'<polyline class="line p99" points="([^"]*)"', chart)
    assert [len(each.split()) for each in points] == [2, 2]
    assert "p99 –" in chart
