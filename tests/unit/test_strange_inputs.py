"""Arbitrary names, durations, headers, URLs and instants are kept unchanged or refused.

A refusal raises an error of delaytasks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from delaytasks.core.body import encode_body
from delaytasks.core.errors import InvalidDelayError, InvalidInputError, InvalidRetryScheduleError
from delaytasks.core.inputs import (
    check_delay,
    check_key,
    check_queue,
    check_tag,
    check_wait,
    parse_duration,
)
from delaytasks.core.retry_schedule import RetrySchedule
from delaytasks.core.states import MOST_VERSIONS, following
from delaytasks.core.task import DelayTask
from delaytasks.core.text import mask_url, one_line, storable
from tests.fuzzing import fuzz, json_like

anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.lists(st.text()),
    st.builds(object),
)
durations = (
    st.text()
    | st.text("0123456789.smhdw +-", max_size=12)
    | st.from_regex(r"\d{1,400}(\.\d+)?[smhd]")
)


def attempt(work: Callable[[], str]) -> tuple[str, InvalidInputError | None]:
    try:
        return work(), None
    except InvalidInputError as error:
        return "", error


@fuzz(300)
@given(durations)
@example("9" * 400 + "d")
@example("-0s")
@example("1e400s")
@example("٣s")
def test_any_text_is_parsed_as_a_duration_or_refused(text: str) -> None:
    try:
        duration = parse_duration(text)
    except InvalidDelayError:
        return
    assert timedelta(0) <= duration <= timedelta.max


@fuzz(200)
@given(anything | durations)
def test_any_wait_is_converted_to_seconds_or_refused(wait: Any) -> None:
    try:
        seconds = check_wait(wait, 1000)
    except InvalidDelayError:
        return
    assert 0 <= seconds <= 1000
    assert math.isfinite(seconds)


@fuzz(300)
@given(anything | st.text("ab\x00\x1b\r\n \u202e\ud800é😀", max_size=200))
def test_any_name_is_unchanged_or_refused(name: Any) -> None:
    for check, most in ((check_tag, 128), (check_key, 191), (check_queue, 100)):
        kept, refusal = attempt(lambda check=check: check(name))  # type: ignore[misc]
        if refusal is not None:
            assert str(refusal).isprintable()
            continue
        assert (kept, type(kept)) == (name, str)
        assert kept.isprintable()
        assert len(kept) <= most
        kept.encode()


@fuzz(300)
@given(st.builds(json.dumps, json_like) | st.text(max_size=30), st.integers(-(2**31), 2**31 - 1))
@example('{"expires_s": ' + "9" * 400 + "}", 1)
@example('{"retry": {"retry_delays_s": [5], "jitter": 0}}', -5)
@example('{"retry": {"retry_delays_s": 5, "jitter": 0}, "expires_s": NaN}', 1)
def test_any_headers_of_a_row_are_read(headers: str, attempts: int) -> None:
    now = datetime.now(timezone.utc)
    task = DelayTask(
        1,
        "mail",
        headers,
        now,
        attempts=attempts,
        headers_json=headers,
        ip=attempts,
        result_json=headers,
    )
    for seconds in (task.expires_s, task.max_wait_s):
        assert seconds is None or 0 <= seconds < 1e15
    assert task.retry_schedule is None or isinstance(task.retry_schedule, RetrySchedule)
    if task.retry_schedule is not None:
        wait_s = task.retry_schedule.wait_s(attempts)
        assert wait_s is None or wait_s >= 0
    json.dumps(task.as_json())


@fuzz(200)
@given(st.lists(anything | durations, max_size=4) | anything, st.floats() | json_like)
def test_any_retry_schedule_is_valid_or_refused(retry_delays: Any, jitter: Any) -> None:
    try:
        retry_schedule = RetrySchedule(retry_delays, jitter=jitter)
    except (
        InvalidRetryScheduleError,
        InvalidDelayError,
        TypeError,  # a value that is not iterable is not a list of retry delays
    ):
        return
    assert all(retry_delay >= 0 for retry_delay in retry_schedule.retry_delays_s)


@fuzz(200)
@given(st.text("abc:/@?&=#%ü ", max_size=30).filter(lambda text: " " not in text))
@example("p@ss")
@example("p:a/ss@")
def test_no_password_in_a_url_is_shown(password: str) -> None:
    for scheme in ("redis", "postgresql+psycopg2", "amqp"):
        shown = mask_url(f"{scheme}://user:<{password}>@host/0")
        assert shown == f"{scheme}://user:***@host/0"


@fuzz(300)
@given(st.text(max_size=300))
def test_any_text_is_shown_on_one_line_and_stored(text: str) -> None:
    assert one_line(text).isprintable()
    kept = storable(text, 1000)
    assert "\x00" not in kept
    assert len(kept.encode()) <= 1000 or len(text.encode(errors="replace")) <= 1000


def test_a_version_at_the_end_of_its_range_is_counted_from_0_again() -> None:
    assert [following(version) for version in (0, MOST_VERSIONS - 1)] == [1, MOST_VERSIONS]
    assert {following(version) for version in (MOST_VERSIONS, 2**63 - 1)} == {0}


class Base(DeclarativeBase):
    """The tables of an application."""


class MappedOrder(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (
            lambda: encode_body({"o": MappedOrder()}, 99),
            r"\$\.o: MappedOrder cannot .*: pass its primary key, and",
        ),
        (lambda: check_key(MappedOrder()), "not MappedOrder; .*maps: pass its primary key"),
        (lambda: check_key(7), r"a key is a string, not int: write str\(7\)$"),
        (lambda: check_delay(datetime.now(timezone.utc), 9), "pass an instant to schedule_at, or"),
    ],
)
def test_a_value_of_a_usual_wrong_type_is_refused_with_what_to_write(
    call: Callable[[], Any], remedy: str
) -> None:
    with pytest.raises(InvalidInputError, match=remedy):
        call()
