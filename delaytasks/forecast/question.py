"""Checks the arguments of `DelayTasks.forecast`."""

from __future__ import annotations

from typing import NamedTuple

from delaytasks.core.durations import Delay
from delaytasks.core.errors import InvalidQueryError
from delaytasks.core.inputs import check_period, check_tag, check_wait
from delaytasks.core.number_checks import is_integer
from delaytasks.core.text import shown
from delaytasks.forecast.steps import MAX_WORKERS_TRIED

DAY_S = 86_400.0
MAX_DAYS, MAX_STEPS, MAX_RATE = 366, 20_000, 1_000_000.0


class Question(NamedTuple):
    """The checked arguments of a call."""

    days: float
    tag: str | None
    workers: int | None
    processes: int | None
    rate: float | None
    target_s: float
    step_s: float


def checked(
    days: float,
    tag: str | None,
    workers: int | None,
    processes: int | None,
    rate: float | None,
    target: Delay,
    step: Delay,
) -> Question:
    """Check the arguments of a call."""
    is_number = isinstance(days, (int, float)) and not isinstance(days, bool)
    if not (is_number and 0 < days <= MAX_DAYS):
        raise InvalidQueryError(f"days is a number above 0, at most {MAX_DAYS}, not {shown(days)}")
    for name, number in (("workers", workers), ("processes", processes)):
        if number is not None and not is_integer(number, 1, MAX_WORKERS_TRIED):
            raise InvalidQueryError(
                f"{name} is an integer from 1 to {MAX_WORKERS_TRIED:,}, not {shown(number)}"
            )
    is_number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
    if rate is not None and not (is_number and 0 < rate <= MAX_RATE):
        raise InvalidQueryError(
            f"rate is the number of tasks that a process runs in a second, not {shown(rate)}"
        )
    step_s = check_period(step, MAX_DAYS * DAY_S, "step").total_seconds()
    if days * DAY_S / step_s > MAX_STEPS:
        raise InvalidQueryError(f"a forecast has at most {MAX_STEPS:,} steps: make step longer")
    return Question(
        days,
        None if tag is None else check_tag(tag),
        workers,
        processes,
        rate,
        check_wait(target, MAX_DAYS * DAY_S, "target"),
        step_s,
    )
