"""Histograms of seconds with fixed bounds, so that the counts of all workers can be added."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

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


def quantile(counts: Sequence[int], bounds: Sequence[float], share: float) -> float | None:
    """Estimate the time that `share` of the values do not exceed.

    The values of a bucket are taken to be evenly distributed in it. Times above the last bound
    count as the last bound.

    Parameters
    ----------
    counts
        The number of values in each bucket.
    bounds
        The upper bounds of the buckets.
    share
        For example 0.99 for the 99th percentile.

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
            if number >= len(bounds):
                break
            lower = bounds[number - 1] if number else 0.0
            inside = (wanted - (reached - counts[number])) / counts[number]
            return lower + (bounds[number] - lower) * max(inside, 0.0)
    return bounds[-1]
