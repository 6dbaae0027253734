"""Numbers of tasks that recurring schedules are going to make."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

from delaytasks.core.errors import DelayTaskError
from delaytasks.forecast.due_counts import MINUTE_S, DueCount, DueCounts, spread_over
from delaytasks.recurrence.queries import RecurringTable
from delaytasks.recurrence.schedule import RecurringSchedule

#: Schedules in one statement, and the most schedules that are read.
SCHEDULES_PAGE, MAX_SCHEDULES = 1000, 20_000
#: The most occurrences that are computed, for all schedules together.
MAX_OCCURRENCES = 50_000
#: At least this number of occurrences is computed for schedules of the same timing.
LEAST_OCCURRENCES = 5


class _Pattern(NamedTuple):
    """What schedules have in common that make the same numbers of tasks at the same times."""

    queue: str
    tag: str
    timing: str
    tz: str
    start_at: datetime | None
    next_at: datetime
    jitter_s: float


def recurring_counts(table: RecurringTable, now: datetime, until: datetime) -> DueCounts:
    """Return the tasks of occurrences up to `until` that have no rows yet.

    The first occurrences of a schedule with very many are computed, and the others are estimated
    from their mean interval.
    """
    patterns: Counter[_Pattern] = Counter()
    examples: dict[_Pattern, RecurringSchedule] = {}
    for schedule in _schedules(table):
        if schedule.next_at is not None and schedule.next_at <= until:
            pattern = _Pattern(
                schedule.queue,
                schedule.tag,
                schedule.timing,
                schedule.tz,
                schedule.start_at,
                max(schedule.next_at, now),
                schedule.jitter_s,
            )
            patterns[pattern] += 1
            examples[pattern] = schedule
    most = max(MAX_OCCURRENCES // max(len(patterns), 1), LEAST_OCCURRENCES)
    found, is_estimate = list[DueCount](), False
    for pattern, schedules in patterns.items():
        try:
            times, has_more = _occurrences(examples[pattern], pattern.next_at, until, most)
        except DelayTaskError:  # another program wrote the timing; the sweep reports it
            continue
        found += _tasks(pattern, times, schedules)
        if has_more:
            is_estimate = True
            found += _estimated(pattern, times, schedules, until)
    return DueCounts(found, is_estimate)


def _schedules(table: RecurringTable) -> Iterator[RecurringSchedule]:
    last: str | None = None
    for _ in range(0, MAX_SCHEDULES, SCHEDULES_PAGE):
        page = table.page(None, None, last, SCHEDULES_PAGE)
        yield from page
        if len(page) < SCHEDULES_PAGE:
            return
        last = page[-1].name


def _occurrences(
    schedule: RecurringSchedule, first: datetime, until: datetime, most: int
) -> tuple[list[datetime], bool]:
    """Return at most `most` occurrences from `first` on, and whether there are more."""
    times = [first]
    for at in schedule.between(first, until):
        if len(times) == most:
            return times, True
        times.append(at)
    return times, False


def _tasks(pattern: _Pattern, times: Sequence[datetime], schedules: int) -> Iterable[DueCount]:
    for at in times:
        second = int(at.timestamp())
        if pattern.jitter_s:
            length_s = math.ceil(pattern.jitter_s)
            yield from spread_over(pattern.queue, pattern.tag, second, length_s, schedules)
        else:
            yield DueCount(pattern.queue, pattern.tag, second, schedules)


def _estimated(
    pattern: _Pattern, times: Sequence[datetime], schedules: int, until: datetime
) -> Iterable[DueCount]:
    """Yield the tasks after `times`, at their mean rate, in each minute."""
    begin, end = int(times[-1].timestamp()), int(until.timestamp())
    per_s = (len(times) - 1) * schedules / max((times[-1] - times[0]).total_seconds(), 1.0)
    for second in range(begin, end, MINUTE_S):
        length_s = min(MINUTE_S, end - second)
        yield from spread_over(pattern.queue, pattern.tag, second, length_s, per_s * length_s)
