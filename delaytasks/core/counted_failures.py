"""Failed runs with the same error, as workers have counted them by the hour."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from delaytasks.core.clock import AN_HOUR, hour_of


class CountedFailures(NamedTuple):
    """Failed runs of a tag with the same error, as workers have counted them."""

    tag: str
    pattern: str
    runs: int
    first_at: datetime
    last_at: datetime
    #: The task of the last run.
    task_id: int
    #: The number of runs by the hour in which they failed.
    hours: Mapping[datetime, int]
    #: All runs of the tag since `recent_hours(now)`, or 0 if they were not counted.
    runs_of_tag: int

    def first_since(self, begin: datetime) -> datetime | None:
        """Return when the first run failed since the beginning of an hour; None without runs."""
        hours = [hour for hour, runs in self.hours.items() if runs and hour >= begin]
        return max(min(hours), self.first_at) if hours else None


def recent_hours(now: datetime) -> datetime:
    """Return the beginning of the hour before the present one."""
    return hour_of(now) - AN_HOUR
