"""Histograms of seconds with fixed bounds, so that the counts of all workers can be added."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from math import inf

#: The upper bounds of the buckets of the lateness of tasks: the start minus the due time. A value
#: that equals a bound belongs to its bucket. One more bucket has all longer times. The bounds are
#: part of the stored statistics, so a bound may be appended but neither changed nor removed.
LATENESS_BOUNDS_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    *(300.0, 900.0, 3600.0, 14_400.0, 86_400.0),
)
#: The same for the durations of runs.
DURATION_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    *(300.0, 900.0, 3600.0, 14_400.0),
)


def bucket_of(seconds: float, bounds: Sequence[float]) -> int:
    """Return the number of the bucket of a time."""
    return bisect_left(bounds, seconds)


def highest_value(counted: Sequence[int], bounds: Sequence[float], stored: float | None) -> float:
    """Return the largest value, or the upper bound of its bucket if the value is not known.

    Parameters
    ----------
    counted
        The numbers of the buckets that are not empty.
    stored
        The largest value that was stored. Values of a process that stores none may exceed it.
    """
    last = min(max(counted, default=0), len(bounds) - 1)
    if stored is not None and bucket_of(stored, bounds) >= last:
        return stored
    return bounds[last] if counted else 0.0


def quantile(
    counts: Sequence[int], bounds: Sequence[float], share: float, highest: float = inf
) -> float | None:
    """Estimate the time that `share` of the values do not exceed.

    The values of a bucket are taken to be evenly distributed in it, up to `highest`. Without it,
    times above the last bound count as the last bound.

    Parameters
    ----------
    counts
        The number of values in each bucket.
    bounds
        The upper bounds of the buckets.
    share
        For example 0.99 for the 99th percentile.
    highest
        The largest value.

    Returns
    -------
    float or None
        None if there are no values.
    """
    total = sum(counts)
    if not total:
        return None
    wanted = share * total
    for number, reached in enumerate(accumulate(counts)):
        if counts[number] and reached >= wanted:
            lower = bounds[number - 1] if number else 0.0
            upper = bounds[number] if number < len(bounds) else highest
            lower, upper = min(lower, highest), min(upper, highest)
            if upper == inf:
                return lower
            inside = (wanted - (reached - counts[number])) / counts[number]
            return lower + (upper - lower) * max(inside, 0.0)
    return min(bounds[-1], highest)
