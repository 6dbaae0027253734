"""Which occurrences of a schedule need a task now. Nothing is read or written here."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from delaytasks.recurrence.schedule import RecurringSchedule
from delaytasks.recurrence.timing import ONE_SECOND

#: An occurrence that passed longer ago was missed. A sweep that is a little late misses none.
MISSED_AFTER = timedelta(seconds=60)
#: The most tasks that one visit of the sweep makes for a schedule.
MOST_PER_VISIT = 1000
#: The last occurrences that have passed are searched in a window that begins with this length and
#: grows by this factor.
FIRST_WINDOW, WINDOW_GROWTH = timedelta(hours=1), 8


class Plan(NamedTuple):
    """The result of planning one visit of a schedule."""

    #: The occurrences that get a task.
    times: Sequence[datetime]
    #: The first occurrence that the next visit looks at; None after the last one.
    next_at: datetime | None
    #: Whether occurrences were missed and get no task.
    has_missed: bool = False
    #: Whether an occurrence gets no task because the task before it has not ended.
    has_overlapped: bool = False


def plan(schedule: RecurringSchedule, now: datetime, until: datetime, is_last_live: bool) -> Plan:
    """Plan a visit of a schedule that has `next_at`, for occurrences up to `until`.

    Parameters
    ----------
    schedule
        The schedule.
    now, until
        The time, and the end of the time for which tasks are made ahead.
    is_last_live
        Whether the schedule's last task waits or runs.
    """
    next_at = schedule.next_at
    assert next_at is not None, "the sweep reads schedules with a next occurrence only"
    passed: list[datetime] = []
    has_missed = False
    if next_at <= now:
        passed, has_missed = _passed(schedule, next_at, now)
        next_at = schedule.parsed().after(now)
    if schedule.overlap == "skip":
        return _alone(schedule, passed, next_at, until, is_last_live, has_missed)
    times = [*passed]
    while next_at is not None and next_at <= until and len(times) < MOST_PER_VISIT:
        times.append(next_at)
        next_at = schedule.parsed().after(next_at)
    return Plan(times, next_at, has_missed)


def due_of(schedule: RecurringSchedule, at: datetime) -> datetime:
    """Return the due time of an occurrence, which every process computes alike."""
    if not schedule.jitter_s:
        return at
    share = random.Random(schedule.key_of(at)).random()
    return at + timedelta(seconds=share * schedule.jitter_s)


def _passed(
    schedule: RecurringSchedule, since: datetime, now: datetime
) -> tuple[list[datetime], bool]:
    """Return the passed occurrences that get a task, and whether others get none."""
    most = schedule.most_missed if schedule.missed == "all" else 1
    last = _last_between(schedule, since, now, most + 1)
    chosen = last[-most:]
    if schedule.missed == "skip":
        chosen = [at for at in chosen if now - at <= MISSED_AFTER]
    return chosen, len(chosen) < len(last)


def _last_between(
    schedule: RecurringSchedule, since: datetime, now: datetime, most: int
) -> list[datetime]:
    """Return the last occurrences in [since, now], at most `most`.

    A schedule may have millions there after a long outage, so the search begins at their end.
    """
    window = FIRST_WINDOW
    while True:
        begin = max(since - ONE_SECOND, now - window)
        found = deque(schedule.between(begin, now), maxlen=most)
        if len(found) == most or begin < since:
            return [at for at in found if at >= since]
        window *= WINDOW_GROWTH


def _alone(
    schedule: RecurringSchedule,
    passed: Sequence[datetime],
    next_at: datetime | None,
    until: datetime,
    is_last_live: bool,
    has_missed: bool,
) -> Plan:
    """Plan for a schedule whose tasks must not overlap: at most one of them waits or runs.

    The next occurrence gets its task as soon as the task before it has ended. If that has not
    happened when the occurrence has passed, the occurrence is skipped.
    """
    if is_last_live:
        return Plan([], next_at, has_missed, has_overlapped=bool(passed))
    if passed:
        return Plan(passed[-1:], next_at, has_missed or len(passed) > 1)
    if next_at is None or next_at > until:
        return Plan([], next_at, has_missed)
    return Plan([next_at], schedule.parsed().after(next_at), has_missed)
