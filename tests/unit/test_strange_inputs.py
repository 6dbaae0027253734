"""Arbitrary durations, headers, versions and values are kept or refused."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from delaytasks import DelayedTask, InvalidInputError, RetrySchedule
from tests.fuzzing import fuzz, json_like
from tests.refusals import invalid
from tests.world import World

anything = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary()),
    *(st.lists(st.text()), st.builds(object)),
)
durations = st.text() | st.text("0123456789.smhdw +-", max_size=12)
durations |= st.from_regex(r"\d{1,400}(\.\d+)?[smhd]")


@fuzz(300)
@given(st.lists(anything | durations, max_size=4) | anything, st.floats() | json_like)
def test_any_retry_schedule_is_valid_or_refused(retry_delays: Any, variation: Any) -> None:
    try:
        retry_schedule = RetrySchedule(retry_delays, variation=variation)
    except (InvalidInputError, TypeError):  # a value that is not iterable is no list of delays
        return
    assert all(0 <= delay_s <= 1e9 for delay_s in retry_schedule.retry_delays_s)


DURATIONS: dict[str, float] = {"90": 90, "0": 0, "0.5": 0.5, "1h30m": 5400, "1h 30m": 5400}
DURATIONS |= {" 2d ": 172_800, "1w": 604_800, "500ms": 0.5, "1.5h": 5400, "1H30M": 5400}
DURATIONS |= {"1m500ms": 60.5, "1w2d3h4m5s6ms": 788_645.006}


def test_a_duration_is_read_as_people_write_it() -> None:
    assert {text: RetrySchedule([text]).retry_delays_s[0] for text in DURATIONS} == DURATIONS


INVALID = ["", " ", "x", "1x", "h", "30m1h", "1h1h", "1e9", "nan", "inf", "1,5", "1h30", "٣"]
REFUSED = [
    *((text, "1h30m") for text in (*INVALID, "1m s", "0x10", "1 2")),
    *((text, "not negative") for text in ("-5", "-1h", " -0.1")),
    *((text, "longer") for text in ("9" * 30, "9" * 400, "9" * 30 + "w")),
]


@pytest.mark.parametrize(("text", "said"), REFUSED)
def test_an_invalid_negative_or_endless_duration_is_refused(text: str, said: str) -> None:
    with invalid("retry_delays", match=said):
        RetrySchedule([text])


@fuzz(300)
@given(st.builds(json.dumps, json_like) | st.text(max_size=30), st.integers(-(2**31), 2**31 - 1))
@example('{"max_late_s": ' + "9" * 400 + "}", 1)
@example('{"retry": {"retry_delays_s": [5], "variation": 0}}', -5)
@example('{"retry": {"retry_delays_s": 5, "variation": 0}, "max_late_s": NaN}', 1)
def test_any_headers_of_a_row_are_read(headers: str, attempts: int) -> None:
    now = datetime.now(timezone.utc)
    texts = {"headers_json": headers, "result_json": headers}
    task = DelayedTask(1, "mail", headers, now, runs=attempts, ip=attempts, **texts)
    assert task.max_late_s is None or 0 <= task.max_late_s < 1e15
    assert task.retry_schedule is None or isinstance(task.retry_schedule, RetrySchedule)
    if task.retry_schedule is not None:
        wait_s = task.retry_schedule.wait_s(attempts)
        assert wait_s is None or wait_s >= 0
    json.dumps(task.as_json(), allow_nan=False)


@pytest.mark.parametrize(("version", "next_ones"), [(2**62 - 1, [2**62, 0]), (2**63 - 1, [0, 1])])
def test_a_version_begins_at_0_after_its_range(world: World, version: int, next_ones: Any) -> None:
    task = world.schedule()
    world.change(task, version=version)
    assert [world.delays.reschedule(task.id, 0).version for _ in next_ones] == next_ones
    assert world.read(task).version == next_ones[-1]


CALLS: list[tuple[dict[str, Any], str]] = [
    ({"body": {"o": object()}}, r"\$\.o: object cannot be expressed in JSON; convert it first"),
    ({"key": 7}, r"key is a string, such as str\(order.id\), not int$"),
]


@pytest.mark.parametrize(("call", "remedy"), CALLS)
def test_a_usual_wrong_type_is_refused_with_a_remedy(world: World, call: Any, remedy: str) -> None:
    with pytest.raises(InvalidInputError, match=remedy):
        world.schedule(**call)
