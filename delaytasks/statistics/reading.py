"""Reads statistics, and adds them up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from delaytasks.core.clock import EPOCH, from_us
from delaytasks.core.errors import InvalidQueryError
from delaytasks.core.inputs import Delay, check_instant, check_tag, check_wait
from delaytasks.core.run_counts import FailureGroup, RunCounts
from delaytasks.statistics.failure_groups import hour_counts_of
from delaytasks.statistics.gauges import Gauges
from delaytasks.statistics.periods import (
    GAUGES,
    PART_OF,
    PARTS_OF_ROW,
    counts_in,
    gauges_in,
    total_in,
)
from delaytasks.statistics.queries import StatisticsTable

if TYPE_CHECKING:
    from delaytasks.storage.store import Store

#: The most steps of one series.
MAX_SERIES_STEPS = 10_000
#: The longest range, since older hours are purged.
MAX_RANGE_S = 400 * 86_400.0

Since = datetime | Delay


class StepRange(NamedTuple):
    """The steps of a series, which are aligned to 1970 in UTC; or a range that is one step."""

    since: datetime
    until: datetime
    length: timedelta
    is_series: bool = True

    @classmethod
    def of(
        cls,
        now: datetime,
        since: Since,
        until: datetime | None,
        step: Delay,
        is_series: bool = True,
    ) -> StepRange:
        """Check a range and a step. `since` may be a duration before now.

        If it is no series, `since` is rounded down to a multiple of the step all the same.
        """
        step_s = check_wait(step, MAX_RANGE_S, "step")
        if step_s < 60 or step_s % 60:
            raise InvalidQueryError(f"a step is a number of whole minutes, not {step_s:g} s")
        length = timedelta(seconds=step_s)
        if isinstance(since, datetime):
            start = check_instant(since)
        else:
            start = now - timedelta(seconds=check_wait(since, MAX_RANGE_S, "since"))
        end = now if until is None else check_instant(until)
        steps = cls(_floor(start, length), end, length, is_series)
        if start >= end:
            raise InvalidQueryError("the range is empty: `since` is before `until`")
        if is_series and (end - steps.since) / length > MAX_SERIES_STEPS:
            raise InvalidQueryError(f"more than {MAX_SERIES_STEPS} steps: choose a longer step")
        return steps

    def starts(self) -> Iterator[datetime]:
        start = self.since
        while start < self.until:
            yield start
            start += self.length

    def step_of(self, start: datetime, period: str, part: int) -> datetime | None:
        """Return the step of a part of a stored period; None if the part is not in the range."""
        instant = start + part * PART_OF[period]
        if instant + PART_OF[period] <= self.since or instant >= self.until:
            return None
        if not self.is_series:
            return self.since
        return max(_floor(instant, self.length), self.since)

    def only_step_of(self, start: datetime, period: str) -> datetime | None:
        """Return the step that contains all parts of a stored period; None if there is none."""
        first = self.step_of(start, period, 0)
        return first if first == self.step_of(start, period, PARTS_OF_ROW[period] - 1) else None


def run_counts(
    store: Store, steps: StepRange, tags: Sequence[str] | None
) -> dict[datetime, dict[str, RunCounts]]:
    """Return the counts by step and tag, for the steps that have any."""
    found: dict[datetime, dict[str, RunCounts]] = {}
    for row in _table(store).read(*steps[:2], tags):
        if (step := steps.only_step_of(row.start, row.period)) is not None:
            # Adding numbers first is much faster than adding the counts of each part.
            if (total := total_in(row)) is not None:
                found.setdefault(step, {}).setdefault(row.tag, RunCounts()).add(total)
            continue
        for number, one in counts_in(row).items():
            if (step := steps.step_of(row.start, row.period, number)) is not None:
                found.setdefault(step, {}).setdefault(row.tag, RunCounts()).add(one)
    return found


def count_rows(store: Store, since: datetime, until: datetime, most: int) -> int:
    """Count the rows that `run_counts` reads for all tags of a range, up to `most`."""
    return _table(store).count(since, until, most)


def counts_by_tag(
    store: Store, steps: StepRange, tags: Sequence[str] | None
) -> list[tuple[str, RunCounts]]:
    """Return the counts of all steps together, in the order of the tags."""
    found: dict[str, RunCounts] = {}
    for by_tag in run_counts(store, steps, tags).values():
        for tag, counts in by_tag.items():
            found.setdefault(tag, RunCounts()).add(counts)
    return sorted(found.items())


def gauge_means(store: Store, steps: StepRange) -> dict[datetime, Gauges]:
    """Return the mean gauges of each step that has any."""
    found: dict[datetime, list[Gauges]] = {}
    for row in _table(store).read(*steps[:2], [GAUGES]):
        for number, one in gauges_in(row).items():
            if (step := steps.step_of(row.start, row.period, number)) is not None:
                found.setdefault(step, []).append(one)
    return {step: Gauges.mean(many) for step, many in sorted(found.items())}


def failure_groups(
    store: Store, tag: str | None, since: datetime | None, limit: int
) -> list[FailureGroup]:
    """Return the groups that failed last, the latest first."""
    return [
        FailureGroup(
            row.tag,
            row.pattern,
            row.fingerprint,
            row.runs,
            row.first_at,
            row.last_at,
            row.task_id,
            row.sample,
            {EPOCH + timedelta(hours=h): n for h, n in hour_counts_of(row.hours).items()},
        )
        for row in _table(store).failure_groups.read(tag, since, limit)
    ]


def checked_tags(tags: Sequence[str] | None) -> Sequence[str] | None:
    if isinstance(tags, str):
        raise InvalidQueryError(f"tags is a list of tags: [{tags!r}]")
    return None if tags is None else [check_tag(tag) for tag in tags]


def _table(store: Store) -> StatisticsTable:
    return StatisticsTable(store.database, store.schema)


def _floor(instant: datetime, step: timedelta) -> datetime:
    step_us = int(step.total_seconds()) * 1_000_000
    return from_us((instant - EPOCH) // timedelta(microseconds=1) // step_us * step_us)
