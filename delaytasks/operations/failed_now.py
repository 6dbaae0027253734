"""Groups of failures that have the same tag and the same kind of error.

A group has the FAILED tasks that were read, and the failed runs that workers have counted, which
include those of tasks that wait for a retry. Workers write their counts once a minute.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from delaytasks.core.clock import AN_HOUR, hour_of
from delaytasks.core.run_counts import CountedFailures, recent_hours
from delaytasks.core.states import Status
from delaytasks.core.text import error_pattern
from delaytasks.storage.failed_rows import FailedRow

#: Bars of a sparkline, one for each hour.
SPARK_HOURS = 24
#: The statuses of a task that has failed and is repeated.
RETRIED = (Status.NOT_COMPLETE, Status.HELD, Status.RUNNING)


class RecentRuns(NamedTuple):
    """The failed runs of a group in the present hour and the hour before."""

    runs: int
    since: datetime
    #: Their share in the runs of the tag.
    share: float


@dataclass(frozen=True)
class FailedNow:
    """Failures of one tag whose errors differ in numbers and quoted texts only."""

    name: str
    tag: str
    pattern: str
    #: The FAILED task that failed last, or without one, the last task of the counted runs.
    sample: FailedRow
    #: The FAILED tasks that were read, whether there may be more, and when the first one failed.
    tasks: int
    has_more: bool
    since: datetime | None
    #: All failed runs that are known, those of retried tasks included.
    runs: int
    first_at: datetime | None
    last_at: datetime | None
    #: Failed runs in each of the last hours, the oldest first.
    hours: Sequence[int]
    #: None if no run was counted lately.
    recent: RecentRuns | None
    #: Whether the last task of the counted runs waits for its retry.
    is_retried: bool

    @property
    def summary(self) -> str:
        """The type and the message of the exception, with `…` for what differs."""
        text = self.pattern.rpartition("\n")[2].strip("*").strip()
        # The whole message differs, such as the key of a KeyError.
        text += " *" if text.endswith(":") else ""
        return text.replace("*", "…") or "(no error text)"

    @property
    def filters(self) -> dict[str, Any]:
        """The filters of `find` for the tasks of the group."""
        error = {"error": self.pattern} if self.pattern.strip("*") else {}
        statuses = ["FAILED"] if self.tasks else ["FAILED", "NOT_COMPLETE", "HELD"]
        return {"tag": self.tag, "status": statuses, **error}

    @property
    def where(self) -> str:
        """The function that raised the exception; empty if the error is no traceback."""
        return self.pattern.partition("\n")[0].removeprefix("* in ") if "\n" in self.pattern else ""


def group_name(tag: str, pattern: str) -> str:
    """Return a short name of a group for addresses."""
    return hashlib.sha256(f"{tag}\n{pattern}".encode()).hexdigest()[:12]


def groups_of(
    rows: Iterable[FailedRow],
    now: datetime,
    counted: Iterable[CountedFailures] = (),
    last_rows: Iterable[FailedRow] = (),
    has_more: bool = False,
) -> list[FailedNow]:
    """Return the groups of the rows, those that failed last first.

    Parameters
    ----------
    rows
        FAILED tasks.
    counted, last_rows
        What workers have counted, and the tasks of the last counted runs. Groups without a FAILED
        task are returned too if the last task is FAILED, or waits for its retry.
    has_more
        Whether there are FAILED tasks that were not read.
    """
    members: dict[tuple[str, str], list[FailedRow]] = {}
    for row in rows:
        members.setdefault(_key(row), []).append(row)
    counts = {(each.group.tag, each.group.pattern): each for each in counted}
    lasts = {
        _key(row): row for row in last_rows if row.status == Status.FAILED or row.status in RETRIED
    }
    groups = [
        _group(key, members.get(key, ()), counts.get(key), lasts.get(key), now, has_more)
        for key in {**members, **counts}
        if key in members or key in lasts
    ]
    return sorted(groups, key=lambda group: group.last_at or group.sample.due)[::-1]


def _group(
    key: tuple[str, str],
    members: Sequence[FailedRow],
    counted: CountedFailures | None,
    last: FailedRow | None,
    now: datetime,
    has_more: bool,
) -> FailedNow:
    times = sorted(row.failed_at for row in members if row.failed_at is not None)
    since = times[0] if times else None
    newest = max(members, key=lambda row: (row.failed_at or row.due, row.id), default=last)
    assert newest is not None
    hours, runs = Counter(map(hour_of, times)), len(members)
    if counted is not None:
        # Failures of the last minute, or of a killed worker, may be in the rows only.
        hours |= Counter(counted.group.hours)
        runs = max(runs, counted.group.runs)
        if has_more and members:
            day = hour_of(now) - (SPARK_HOURS - 1) * AN_HOUR
            since = min(filter(None, (since, counted.group.first_since(day))), default=None)
        times = sorted([*times, counted.group.first_at, counted.group.last_at])
    return FailedNow(
        name=group_name(*key),
        tag=key[0],
        pattern=key[1],
        sample=newest,
        tasks=len(members),
        has_more=has_more,
        since=since,
        runs=runs,
        first_at=times[0] if times else None,
        last_at=times[-1] if times else None,
        hours=[hours[hour_of(now) - ago * AN_HOUR] for ago in reversed(range(SPARK_HOURS))],
        recent=None if counted is None else _recent(counted, now),
        is_retried=last is not None and last.status in RETRIED,
    )


def _recent(counted: CountedFailures, now: datetime) -> RecentRuns | None:
    begin = recent_hours(now)
    runs = sum(number for hour, number in counted.group.hours.items() if hour >= begin)
    since = counted.group.first_since(begin)
    return None if since is None else RecentRuns(runs, since, runs / max(runs, counted.runs_of_tag))


def _key(row: FailedRow) -> tuple[str, str]:
    return row.tag, error_pattern(row.error or "")
