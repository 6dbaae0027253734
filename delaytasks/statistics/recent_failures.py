"""Reads what workers have counted of the groups of failures, for the verdict and the console."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import TYPE_CHECKING

from delaytasks.core.clock import AN_HOUR
from delaytasks.core.run_counts import CountedFailures, recent_hours
from delaytasks.statistics.reading import StepRange, failure_groups, run_counts

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime

#: The most groups, those that failed last.
MOST_READ_GROUPS = 100


def recent_failures(runtime: Runtime, now: datetime) -> list[CountedFailures]:
    """Return the groups that failed last, with the number of recent runs of their tags."""
    groups = failure_groups(runtime.store, None, None, MOST_READ_GROUPS)
    since = recent_hours(now)
    tags = sorted({group.tag for group in groups if group.last_at >= since})
    started = Counter[str]()
    if tags:
        steps = StepRange(since, now, AN_HOUR, is_series=False)
        for by_tag in run_counts(runtime.store, steps, tags).values():
            started.update({tag: counts.started for tag, counts in by_tag.items()})
    return [CountedFailures(group, started[group.tag]) for group in groups]
