"""Patterns of error texts: equal for errors of one kind, and different for others."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Callable
from datetime import datetime, timezone

import pytest

from delaytasks.core.text import MAX_PATTERN, error_pattern, traceback_text
from delaytasks.operations.state import groups_of
from delaytasks.storage.state_queries import FailedRow


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
    try:
        fail(order)
    except Exception as error:
        return traceback_text(error, 10_000)
    raise AssertionError("it must fail")


def test_numbers_ids_and_quoted_text_do_not_matter() -> None:
    patterns = {
        error_pattern(text_of(charge, order))
        for order in (7, "8f14e45fceea167a5a36dedd4bea2543", "a-17", "2c1f4e4a-1b3c-4d5e-8f90-aa1")
    }
    assert patterns == {"* in charge\n*ValueError: order * of * was not found*"}


def test_another_function_and_another_type_are_other_kinds() -> None:
    assert error_pattern(text_of(charge, 1)) != error_pattern(text_of(refund, 1))
    assert error_pattern("KeyError: 1") != error_pattern("TypeError: 1")


def test_the_pattern_has_the_function_of_the_users_code() -> None:
    assert error_pattern(text_of(through_a_library, 1)).startswith("* in through_a_library\n*")


@pytest.mark.parametrize(
    ("reason", "pattern"),
    [
        ("card 4711 refused", "card * refused*"),
        ("first line\nsecond line", "first line*"),
        ("", "*"),
        ("50% * off", "* * off*"),
    ],
)
def test_the_reason_of_an_outcome_is_its_first_line(reason: str, pattern: str) -> None:
    assert error_pattern(reason) == pattern


@pytest.mark.parametrize(
    ("fail", "summary"),
    [(charge, "ValueError: order … of … was not found"), (look_up, "KeyError: …"),
     (refuse, "KeyError")],
)  # fmt: skip
def test_the_summary_of_a_group_does_not_end_with_a_colon(
    fail: Callable[[object], None], summary: str
) -> None:
    now = datetime(2030, 1, 31, 18, tzinfo=timezone.utc)
    [group] = groups_of([FailedRow(7, "order.close", "default", now, now, text_of(fail, 7))], now)
    assert group.summary == summary


@pytest.mark.parametrize(
    "text", ["x" * 100_000, "'" * 100_000, "a b " * 30_000, '  File "' * 10_000, "\n" * 100_000]
)
def test_long_texts_cost_little_and_give_short_patterns(text: str) -> None:
    began = time.process_time()
    assert len(error_pattern(text)) <= MAX_PATTERN
    assert time.process_time() - began < 5, "not a measure of speed: quadratic ones take minutes"
