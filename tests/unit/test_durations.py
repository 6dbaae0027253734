from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaytasks.cli.output import parse_instant, show_from_now, show_instant
from delaytasks.core.errors import InvalidDelayError, InvalidScheduleError, NaiveDatetimeError
from delaytasks.core.inputs import (
    check_delay,
    check_shift,
    parse_duration,
    show_duration,
    show_measured,
    show_timing,
)

NOON = datetime(2030, 1, 31, 12, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("0", 0),
        ("0.5", 0.5),
        ("1h30m", 5400),
        ("1h 30m", 5400),
        (" 2d ", 172_800),
        ("1w", 604_800),
        ("500ms", 0.5),
        ("1.5h", 5400),
        ("1H30M", 5400),
        ("1m500ms", 60.5),
        ("1w2d3h4m5s6ms", 788_645.006),
    ],
)
def test_a_duration_is_read_as_people_write_it(text: str, seconds: float) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "x",
        "1x",
        "h",
        "30m1h",
        "1h1h",
        "1e9",
        "nan",
        "inf",
        "1,5",
        "1h30",
        "٣",
        "1m s",
        "0x10",
        "1 2",
    ],
)
def test_an_invalid_duration_is_refused_with_the_valid_forms(text: str) -> None:
    with pytest.raises(InvalidDelayError, match="1h30m"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["-5", "-1h", " -0.1"])
def test_a_negative_duration_is_refused_as_negative(text: str) -> None:
    with pytest.raises(InvalidDelayError, match="not negative"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["9" * 30, "9" * 400, "9" * 30 + "w"])
def test_a_duration_beyond_all_bounds_is_refused_and_does_not_overflow(text: str) -> None:
    with pytest.raises(InvalidDelayError, match="longer"):
        parse_duration(text)


@pytest.mark.parametrize(
    "text", ["2030-01-31T12:00:00Z", "2030-01-31 12:00z", "2030-01-31T13:00:00+01:00"]
)
def test_an_instant_is_read_with_its_zone(text: str) -> None:
    assert parse_instant(text) == NOON


def test_an_instant_without_a_zone_is_refused() -> None:
    with pytest.raises(NaiveDatetimeError, match="Z for UTC"):
        parse_instant("2030-01-31T12:00:00")


@pytest.mark.parametrize("text", ["", "tomorrow", "2030-02-31T00:00:00Z", "Z"])
def test_an_invalid_instant_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidScheduleError, match="2030-01-31T18:00:00Z"):
        parse_instant(text)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0s"),
        (0.0123, "12ms"),
        (5.2, "5s"),
        (59.9, "1m"),
        (5400, "1h30m"),
        (3605, "1h"),
        (172_800, "2d"),
        (-90, "1m30s"),
    ],
)
def test_a_duration_is_shown_by_its_two_largest_units(seconds: float, shown: str) -> None:
    assert show_duration(seconds) == shown


@given(st.integers(0, 10**9))
def test_a_shown_duration_can_be_typed_again(seconds: int) -> None:
    again = parse_duration(show_duration(seconds)).total_seconds()
    # The omitted rest is less than one of the second unit. For example, 1w omits less than a day.
    assert again <= seconds <= again * 8 / 7


def test_an_instant_is_shown_so_that_it_can_be_typed_again() -> None:
    assert show_instant(NOON) == "2030-01-31T12:00:00Z"
    assert parse_instant(show_instant(NOON)) == NOON


def test_the_past_and_the_future_are_distinguished() -> None:
    assert show_from_now(NOON + timedelta(minutes=90), NOON) == "in 1h30m"
    assert show_from_now(NOON - timedelta(seconds=5), NOON) == "5s ago"


@pytest.mark.parametrize(
    ("delay", "seconds"), [("30m", 1800), ("1h 30m", 5400), (" 500ms ", 0.5), ("0s", 0), (90, 90)]
)
def test_a_delay_is_seconds_or_text_with_units(delay: str | float, seconds: float) -> None:
    assert check_delay(delay, 1e6) == timedelta(seconds=seconds)


@pytest.mark.parametrize("delay", ["5", " 5.0 ", "1e3", "", "-5", "-5m", "soon", "10m1h"])
def test_a_delay_without_a_unit_or_of_another_form_is_refused(delay: str) -> None:
    with pytest.raises(InvalidDelayError):
        check_delay(delay, 1e6)


@pytest.mark.parametrize(
    ("shift", "seconds"), [("1h", 3600), ("-1h30m", -5400), (" - 5s", -5), (-60, -60)]
)
def test_a_shift_has_a_sign(shift: str | float, seconds: float) -> None:
    assert check_shift(shift, 1e6) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "–"), (0, "0"), (0.0123, "12ms"), (1.5, "1.5s"), (90, "1m30s")]
)
def test_a_measured_duration_is_shown_to_the_millisecond(seconds: float | None, text: str) -> None:
    assert show_measured(seconds) == text


@pytest.mark.parametrize(
    ("timing", "text"),
    [
        ("every 10", "every 10s"),
        ("every 300", "every 5m"),
        ("every forged", "every forged"),
        ("0 9 * * *", "0 9 * * *"),
    ],
)
def test_an_interval_of_a_schedule_is_shown_with_its_unit(timing: str, text: str) -> None:
    assert show_timing(timing) == text
