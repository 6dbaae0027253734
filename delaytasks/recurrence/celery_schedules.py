"""The timing of Celery's schedules: `crontab` and `schedule`."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any, NamedTuple

from celery.schedules import crontab, schedule
from cronsim import CronSim, CronSimError

from delaytasks.core.errors import InvalidTimingError
from delaytasks.core.inputs import check_wait
from delaytasks.core.text import shown
from delaytasks.recurrence.timing import CRONTAB, EVERY, MAX_INTERVAL_S

ALL_DAYS, ALL_WEEKDAYS = 31, 7


class FoundTiming(NamedTuple):
    """The text of a timing, and the time zone that the schedule itself has."""

    text: str
    tz: str | None = None


def timing_of(found: Any) -> FoundTiming:
    """Return the timing of a schedule of Celery.

    Raises
    ------
    InvalidTimingError
        If this is no schedule, or one of another class that computes its own times.
    """
    if isinstance(found, crontab):
        # django-celery-beat's subclass has a time zone of its own.
        tz = vars(found).get("tz")
        return FoundTiming(_crontab(found), None if tz is None else str(tz))
    if type(found) is schedule:  # a subclass computes its own times
        return FoundTiming(interval_text(found.run_every))
    raise InvalidTimingError(
        f"{shown(found)} is no crontab or schedule of Celery, so only Celery's beat knows its times"
    )


def interval_text(every: object) -> str:
    """Return the timing of an interval: seconds, a timedelta, or a text such as "5m"."""
    seconds = check_wait(every, MAX_INTERVAL_S, "an interval")
    if seconds < 1 or seconds != int(seconds):
        raise InvalidTimingError(f"an interval is a whole number of seconds, not {shown(every)}")
    return f"{EVERY} {int(seconds)}"


def _crontab(found: crontab) -> str:
    # The arguments with which pickle would make it again.
    minute, hour, weekday, day, month = found.__reduce__()[1][:5]
    written = " ".join(str(f).replace(" ", "") for f in (minute, hour, day, month, weekday))
    days, weekdays = _listed(found.day_of_month), _listed(found.day_of_week)
    has_days = len(found.day_of_month) < ALL_DAYS
    if has_days and len(found.day_of_week) < ALL_WEEKDAYS:
        # In a cron expression one of them is enough. In Celery both must match.
        return f"{CRONTAB} {_times(found)} {days} {_months(found)} {weekdays}"
    if _is_same(written, found):
        return written
    return (
        f"{_times(found)} {days if has_days else '*'} {_months(found)} "
        f"{weekdays if len(found.day_of_week) < ALL_WEEKDAYS else '*'}"
    )


def _is_same(written: str, found: crontab) -> bool:
    """Return whether a cron expression means the same as Celery's fields."""
    try:
        parsed = CronSim(written, datetime(2000, 1, 1))  # noqa: DTZ001
    except (CronSimError, ValueError, TypeError):
        return False
    weekdays = {day % 7 if isinstance(day, int) else day for day in parsed.weekdays}
    return (parsed.minutes, parsed.hours, parsed.days, parsed.months, weekdays) == (
        found.minute,
        found.hour,
        found.day_of_month,
        found.month_of_year,
        found.day_of_week,
    )


def _times(found: crontab) -> str:
    return " ".join(
        "*" if len(field) == most else _listed(field)
        for field, most in ((found.minute, 60), (found.hour, 24))
    )


def _months(found: crontab) -> str:
    return "*" if len(found.month_of_year) == 12 else _listed(found.month_of_year)


def _listed(numbers: Collection[int]) -> str:
    return ",".join(map(str, sorted(numbers)))
