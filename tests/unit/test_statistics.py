"""Counts, histograms, error patterns and charts of the statistics."""

from __future__ import annotations

import fnmatch
import re
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from delaytasks.console.charts import LEFT, RIGHT, WIDTH, Series, lines, stacked_bars
from delaytasks.model.clock import UTC
from delaytasks.model.moves import Status
from delaytasks.model.task import DelayedTask
from delaytasks.model.text import traceback_text
from delaytasks.operate import statistics as writer
from delaytasks.operate.state import groups_of
from delaytasks.operate.statistics import RunTotals, StatisticsWriter, quantile
from delaytasks.run import observers
from delaytasks.run.observers import RunCounts, error_pattern
from tests.world import MainProcess, MakeWorld, MonkeyPatch, World

NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)

# -- histograms and counts, which can be added and written in compact form ------------------------


def test_bounds_increase_and_a_value_that_equals_one_belongs_to_its_bucket() -> None:
    for bounds in (observers.LATENESS_BOUNDS_S, observers.DURATION_BOUNDS_S):
        assert list(bounds) == sorted(set(bounds))
    counts = RunCounts()
    for lateness_s in (0.0, 0.005, 0.0051, 1e9):
        counts.add_run(lateness_s, 0.0)
    assert (counts.lateness[:2], counts.lateness[-1]) == ([2, 1], 1)


def test_a_quantile_is_between_the_bounds_of_its_bucket() -> None:
    counts = [0, 90, 0, 10]
    assert quantile(counts, (1, 2, 4), 0.5, 4) == pytest.approx(1 + 50 / 90)
    assert quantile(counts, (1, 2, 4), 0.9, 4) == 2
    assert quantile(counts, (1, 2, 4), 0.99, 4) == 4, "the last bucket ends at the largest value"
    assert quantile([0, 0, 0, 0], (1, 2, 4), 0.5, 0) is None
    bounds = (1, 60, 300)  # no quantile exceeds the largest value
    assert quantile([0, 0, 1, 0], bounds, 0.99, highest=101) == pytest.approx(100.59)
    assert quantile([0, 0, 0, 4], bounds, 1.0, highest=400) == 400, "above the last"
    run = RunCounts()
    run.add_run(101.0, 0.02)
    totals = RunTotals(run)
    assert 60 < (totals.lateness_quantile(0.5) or 0) < (totals.lateness_quantile(1.0) or 0) == 101
    assert totals.duration_quantile(1.0) == 0.02


def test_an_early_start_has_no_lateness() -> None:
    counts = RunCounts()
    counts.add_run(-0.04, 0.1)
    assert (counts.lateness[0], counts["lateness_s"]) == (1, 0.0)


# -- the counts of a worker's main process --------------------------------------------------------


def test_tags_beyond_the_limit_are_counted_together(make_world: MakeWorld) -> None:
    counts, run = StatisticsWriter(make_world(_statistics_tags=2).runtime), RunCounts()
    run.add_run(0.1, 0.2)
    for tags in ("abcd", "ad"):
        counts.add({(tag, ""): run for tag in tags})
        counts.write()
    started = {tag: found.started for tag, found in counts.totals().items()}
    assert started == {"a": 2, "b": 1, observers.OTHER_TAGS: 3}


# -- A process that ends writes its counts, and waits briefly -------------------------------------


def test_a_silent_database_delays_no_process_end(world: World, monkeypatch: MonkeyPatch) -> None:
    answer, ended = threading.Event(), list[bool]()
    monkeypatch.setattr(StatisticsWriter, "write", lambda self: ended.append(answer.wait(20)))
    monkeypatch.setattr(writer, "LAST_WRITE_S", 0.05)
    runtime = MainProcess(world).runtime
    try:
        runtime.write_statistics()
        assert ended == []
    finally:
        answer.set()


# -- patterns of error texts: equal for errors of one kind, and different for others --------------


def charge(order: object) -> None:
    raise ValueError(f"order {order} of 'customer {order}' was not found")


def refund(order: object) -> None:
    raise ValueError(f"order {order} of 'customer {order}' was not found")


def through_a_library(order: object) -> None:
    fnmatch.fnmatch("name", order)  # type: ignore[type-var]


def look_up(order: object) -> None:
    dict[object, str]()[order]


def refuse(order: object) -> None:
    raise KeyError


def text_of(fail: Callable[[object], None], order: object) -> str:
    with pytest.raises((LookupError, TypeError, ValueError)) as caught:
        fail(order)
    return traceback_text(caught.value, 10_000)


def test_numbers_ids_and_quoted_text_do_not_matter_and_the_users_function_does() -> None:
    orders = (7, "8f14e45fceea167a5a36dedd4bea2543", "a-17", "2c1f4e4a-1b3c-4d5e-8f90-aa1")
    for fail in (charge, refund):
        patterns = {error_pattern(text_of(fail, order)) for order in orders}
        assert patterns == {f"* in {fail.__name__}\n*ValueError: order * of * was not found*"}
    assert error_pattern(text_of(through_a_library, 1)).startswith("* in through_a_library\n*")


PATTERNS = {"card 4711 refused": "card * refused*", "first line\nsecond line": "first line*"}
PATTERNS |= {"": "*", "50% * off": "* * off*", "KeyError: 1": "KeyError: *"}


@pytest.mark.parametrize(("reason", "pattern"), PATTERNS.items())
def test_the_reason_of_an_outcome_is_its_first_line(reason: str, pattern: str) -> None:
    assert error_pattern(reason) == pattern


SUMMARIES = [(charge, "ValueError: order … of … was not found"), (look_up, "KeyError: …")]


@pytest.mark.parametrize(("fail", "summary"), [*SUMMARIES, (refuse, "KeyError")])
def test_the_summary_of_a_group_has_no_colon(fail: Callable[[object], None], summary: str) -> None:
    error = text_of(fail, 7)
    failed = DelayedTask(7, "order.close", "", NOON, Status.FAILED, error=error)
    assert [group.summary for group in groups_of([failed], NOON)] == [summary]


LONG = ["x" * 100_000, "'" * 100_000, "a b " * 30_000, '  File "' * 10_000, "\n" * 100_000]


@pytest.mark.parametrize("text", LONG, ids=range(5))
def test_long_texts_cost_little_and_give_short_patterns(text: str) -> None:
    began = time.process_time()
    assert len(error_pattern(text)) <= observers.MAX_PATTERN
    assert time.process_time() - began < 5, "not a measure of speed: quadratic ones take minutes"


# -- the charts of the console, as text -----------------------------------------------------------


def times(start: datetime, step: timedelta, number: int) -> list[tuple[str, float]]:
    """Return the labels of the time axis, and at which share of its width they are."""
    begin = start.astimezone(UTC)
    starts = [(begin + n * step).astimezone(start.tzinfo) for n in range(number)]
    text = lines(starts, step, [Series("p99", "p99", [1.0] * number)])
    found = re.findall(r'text-anchor="middle" x="([\d.]+)"[^>]*>([^<]+)<', text)
    return [(label, (float(x) - LEFT) / (WIDTH - LEFT - RIGHT)) for x, label in found]


#: A start and its zone, the minutes of a step, the number of steps, and the labels.
AXES = """
2026-11-26 13:00 | UTC | 30 | 96 | 18:00,Fri 27,06:00,12:00,18:00,Sat 28,06:00
2026-11-26 13:20 | UTC | 10 | 145 | 16:00,20:00,Fri 27,04:00,08:00,12:00
2026-11-26 13:30 | Asia/Kolkata | 60 | 30 | 16:00,20:00,Fri 27,04:00,08:00,12:00,16:00
2026-03-28 22:00 | Europe/Berlin | 60 | 10 | Sun 29,03:00,04:00,06:00,08:00
""".strip().splitlines()


@pytest.mark.parametrize("axis", AXES)
def test_labels_are_at_the_midnights_of_the_viewer_or_at_hours_that_exist(axis: str) -> None:
    at, zone, minutes, number, labels = axis.split(" | ")
    start = datetime.fromisoformat(at).replace(tzinfo=ZoneInfo(zone))
    found = times(start, timedelta(minutes=int(minutes)), int(number))
    assert [label for label, _ in found] == labels.split(",")
    midnight, share = next(each for each in found if " " in each[0])
    hours = 24 - start.hour - start.minute / 60
    assert share == pytest.approx(hours * 60 / int(minutes) / int(number), abs=0.001), midnight


MINUTE = timedelta(minutes=1)
MINUTES = [NOON + n * MINUTE for n in range(5)]


def test_bars_are_stacked_to_the_height_of_their_sum() -> None:
    parts = [Series("done", "done", [60, 0]), Series("failed", "failed", [40, None])]
    chart = stacked_bars(MINUTES[:2], MINUTE, parts)
    bar = r'<rect class="(done|failed)" [^>]* y="([\d.]+)" [^>]*height="([\d.]+)"'
    (lower, y, height), (upper, upper_y, upper_height) = re.findall(bar, chart)
    assert (lower, upper) == ("done", "failed")
    assert float(upper_y) + float(upper_height) == pytest.approx(float(y), abs=0.2)
    assert float(height) / float(upper_height) == pytest.approx(1.5, abs=0.02)
    assert "2030-01-31 12:00 to 12:01 UTC: done 60, failed 40" in chart
    assert re.findall(r'class="key (\w+)"></i>(\w+)<', chart) == [("done", "done"), ("failed",) * 2]


def test_the_labels_of_the_counts_and_durations_are_short() -> None:
    def texts(chart: str) -> list[str]:
        *found, zone = re.findall(r'text-anchor="end"[^>]*>([^<]+)<', chart)
        assert zone == "UTC"
        return found

    bars = stacked_bars(MINUTES[:2], MINUTE, [Series("due", "due", [240_000, 0])])
    assert texts(bars) == ["0", "100k", "200k", "300k"]
    for seconds, expected in (
        ([109.0, 217.0], ["1m", "10m"]),
        ([0.004, 7200.0], ["1ms", "10ms", "100ms", "1.0s", "10s", "1m", "10m", "1h", "10h"]),
        ([1e9, None], ["3d", "4w"]),
        ([1e-9, None], ["1ms", "10ms"]),
    ):
        assert texts(lines(MINUTES[:2], MINUTE, [Series("late", "p99", seconds)])) == expected


def test_a_step_without_runs_is_a_gap_in_a_line() -> None:
    chart = lines(MINUTES, MINUTE, [Series("p99", "p99", [0.1, 0.2, None, 0.1, 10])])
    points = re.findall(r'<polyline class="line p99" points="([^"]*)"', chart)
    assert [len(each.split()) for each in points] == [2, 2]
    assert "p99 –" in chart
