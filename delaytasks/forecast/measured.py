"""The durations of tasks, as the workers have measured them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from delaytasks.core.run_counts import RunCounts
from delaytasks.statistics.reading import StepRange, run_counts

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime as Shard

#: The time before now whose runs count, and the runs that a mean needs.
MEASURED, LEAST_MEASURED_RUNS = "7d", 10


def measured_durations(shards: Sequence[Shard], now: datetime) -> dict[str, float]:
    """Return the mean duration of a processor's call in seconds, for each tag with enough runs."""
    totals: dict[str, RunCounts] = {}
    steps = StepRange.of(now, MEASURED, None, "1d", is_series=False)
    for by_tag in run_counts(shards, steps, None).values():
        for tag, counts in by_tag.items():
            totals.setdefault(tag, RunCounts()).add(counts)
    return {
        tag: counts.duration_s / counts.started
        for tag, counts in totals.items()
        if counts.started >= LEAST_MEASURED_RUNS
    }
