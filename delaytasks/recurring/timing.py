"""When a recurring schedule is due: intervals, cron expressions, and Celery's schedules.

A timing is stored as text: a cron expression of five fields, or of six with seconds first, such as
`0 9 * * mon-fri`, or an interval such as `every 300`, in seconds. `parse_timing` reads both.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any
from zoneinfo import ZoneInfo

from celery.schedules import crontab, schedule
from cronsim import CronSim, CronSimError

from delaytasks.model.clock import UTC
from delaytasks.model.errors import InvalidInputError
from delaytasks.model.inputs import MAX_DELAY_S, check_wait, invalid, show_duration
from delaytasks.model.text import shown

ONE_SECOND = timedelta(seconds=1)
#: A start for the check of a timing.
ANY_START = datetime(2000, 1, 1, tzinfo=UTC)
EVERY = "every"


@dataclass(frozen=True)
class Every:
    """Occurrences at `start` and then after each `interval`, whatever wall clocks show."""

    interval: timedelta
    start: datetime

    def after(self, instant: datetime) -> datetime:
        """Return the first occurrence after `instant`, in UTC."""
        if instant < self.start:
            return self.start
        count = (instant - self.start) // self.interval + 1
        return self.start + count * self.interval


class Cron:
    """Occurrences of a cron expression on the wall clock of a time zone, as `cronsim` finds them.

    In an hour that the clocks skip or repeat, the rules of Debian's cron apply:

    - An expression of five fields with fixed times, whose minute and hour fields do not begin with
      `*`, is due once for each matching wall time. A time that the clocks skip is due when the
      skipped period ends. A time that they show twice is due the first time.
    - Any other expression is due whenever a clock on the wall shows a matching time. It is not due
      at times that the clocks skip, and twice at times that they show twice.

    Parameters
    ----------
    expression
        The fields of the expression.
    zone
        The time zone.
    start
        No occurrence is earlier. None means that there is no such bound.
    """

    def __init__(self, expression: str, zone: ZoneInfo, start: datetime | None) -> None:
        self._zone = zone
        self._start = start
        self._parsed = CronSim(expression, ANY_START.astimezone(zone))

    def after(self, instant: datetime) -> datetime | None:
        """Return the first occurrence after `instant`, in UTC; None after the last one."""
        if self._start is not None:
            instant = max(instant, self._start - ONE_SECOND)
        return self._after(instant.replace(microsecond=0))

    # Schedules with the same timing, such as those of many tenants, share this cache.
    @lru_cache(maxsize=4096)  # noqa: B019 - `parse_timing` keeps as many timings
    def _after(self, instant: datetime) -> datetime | None:
        matches = copy(self._parsed)  # to read the expression again would take longer
        shown = instant.astimezone(self._zone)
        # For fixed times, cronsim counts on naive wall times.
        matches.dt = shown.replace(tzinfo=None) if matches.fixup_tz else shown
        for found in matches:
            at = found.astimezone(UTC)
            if at > instant:  # otherwise the clocks show the time for the second time
                return at
        return None


Timing = Every | Cron


@lru_cache(maxsize=4096)
def parse_timing(text: str, tz: str, start: datetime | None = None) -> Timing:
    """Return the timing of a stored text.

    Parameters
    ----------
    text
        A cron expression, or an interval.
    tz
        The name of the time zone of a cron expression.
    start
        The first occurrence of an interval; for a cron expression, the earliest one.

    Raises
    ------
    InvalidInputError
        If the text is no timing, or there is no such time zone.
    """
    zone = zone_of(tz)
    kind, _, rest = text.partition(" ")
    if kind == EVERY:
        if start is None:
            raise InvalidInputError(f"{shown(text)} has no start", "start")
        return Every(timedelta(seconds=_whole_seconds(rest)), start)
    try:
        made = Cron(text, zone, start)
    except (CronSimError, ValueError) as error:
        raise InvalidInputError(
            f"{shown(text)} is no cron expression ({error}); write minute, hour, day of the month, "
            "month and weekday, as in '0 9 * * mon-fri'",
            "cron",
        ) from None
    if made.after(start or ANY_START) is None:
        raise InvalidInputError(f"{shown(text)} never matches a day", "cron")
    return made


def zone_of(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ValueError, OSError, LookupError):
        raise InvalidInputError(
            f"there is no time zone {shown(name)}; write it as Europe/Berlin or UTC", "tz"
        ) from None


def interval_text(every: object) -> str:
    """Return the timing of an interval: seconds, a timedelta, or a text such as "5m"."""
    seconds = _whole_seconds(every)
    text = show_duration(seconds)  # without the smaller units
    return f"{EVERY} {text if _whole_seconds(text) == seconds else f'{seconds}s'}"


def _whole_seconds(every: object) -> int:
    seconds = check_wait(every, "every", MAX_DELAY_S)
    if seconds < 1 or seconds != int(seconds):
        raise invalid("every", f"is a whole number of seconds, not {shown(every)}")
    return int(seconds)


# -- The timing of Celery's schedules: `crontab` and `schedule` -----------------------------------


def timing_of(found: Any) -> tuple[str, str | None]:
    """Return the timing of a schedule of Celery, and the time zone that it has itself.

    Raises
    ------
    InvalidInputError
        If this is no schedule, or one of another class that computes its own times.
    """
    if isinstance(found, crontab):
        # django-celery-beat's subclass has a time zone of its own.
        tz = vars(found).get("tz")
        return _celery_crontab(found), None if tz is None else str(tz)
    if type(found) is schedule:  # a subclass computes its own times
        return interval_text(found.run_every), None
    raise InvalidInputError(
        f"{shown(found)} is no crontab or schedule of Celery: only beat knows its times", "cron"
    )


def _celery_crontab(found: crontab) -> str:
    day = _cron_field(found.day_of_month, 1, 32)
    weekday = _cron_field(found.day_of_week, 0, 7)
    if "*" not in (day, weekday):
        raise InvalidInputError(
            f"{shown(found)} is due if the day of the month and the weekday match, and a cron "
            "expression if one of them does; write it as text, for example '0 9 * * mon#1' for the "
            "first Monday of each month",
            "cron",
        )
    minute, hour = _cron_field(found.minute, 0, 60), _cron_field(found.hour, 0, 24)
    return f"{minute} {hour} {day} {_cron_field(found.month_of_year, 1, 13)} {weekday}"


def _cron_field(numbers: set[int], first: int, end: int) -> str:
    """Return the field of a cron expression that names these numbers of all in [first, end)."""
    steps = (step for step in range(1, end) if numbers == set(range(first, end, step)))
    step = next(steps, None)
    if step is None or len(numbers) == 1:
        return ",".join(map(str, sorted(numbers)))
    return "*" if step == 1 else f"*/{step}"
