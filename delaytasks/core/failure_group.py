"""Failed runs with the same error, as workers have counted them by the hour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from delaytasks.core.clock import AN_HOUR, hour_of


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Failed runs of a tag with the same error.

    Attributes
    ----------
    tag
        The tag.
    pattern
        What their errors have in common; `*` stands for what differs.
    fingerprint
        A short name of the pattern.
    runs
        The number of failed runs, retried ones included.
    first_at, last_at
        When the first and the last of them failed, within a minute.
    task_id, error
        One of the last tasks that failed in this way, and the end of its error text.
    hours
        The number of failed runs by the hour, for the last 48 hours that have any.
    """

    tag: str
    pattern: str
    fingerprint: str
    runs: int
    first_at: datetime
    last_at: datetime
    task_id: int
    error: str
    hours: Mapping[datetime, int]

    @property
    def filters(self) -> dict[str, str]:
        """The filters for `find` and the bulk functions that select the tasks of this group."""
        return {"tag": self.tag, "error": self.pattern}

    def first_since(self, begin: datetime) -> datetime | None:
        """Return when the first run failed since the beginning of an hour; None without runs."""
        hours = [hour for hour, runs in self.hours.items() if runs and hour >= begin]
        return max(min(hours), self.first_at) if hours else None


class CountedFailures(NamedTuple):
    """A group of failures, and what its runs are compared with."""

    group: FailureGroup
    #: All runs of the tag since `recent_hours(now)`, or 0 if they were not counted.
    runs_of_tag: int


def recent_hours(now: datetime) -> datetime:
    """Return the beginning of the hour before the present one."""
    return hour_of(now) - AN_HOUR
