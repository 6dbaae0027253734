"""Histograms and counts, which can be added and written in compact form."""

from __future__ import annotations

import json
import random

import pytest

from delaytasks.core.run_counts import (
    DURATION_BOUNDS_S,
    LATENESS_BOUNDS_S,
    OUTCOME_NAMES,
    RunCounts,
    bucket_of,
    quantile,
)
from delaytasks.statistics.reading import RunTotals


@pytest.mark.parametrize("bounds", [LATENESS_BOUNDS_S, DURATION_BOUNDS_S])
def test_bounds_increase(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))


def test_a_value_that_equals_a_bound_belongs_to_its_bucket() -> None:
    assert bucket_of(0.0, LATENESS_BOUNDS_S) == 0
    assert bucket_of(0.005, LATENESS_BOUNDS_S) == 0
    assert bucket_of(0.0051, LATENESS_BOUNDS_S) == 1
    assert bucket_of(1e9, LATENESS_BOUNDS_S) == len(LATENESS_BOUNDS_S)


def test_a_quantile_is_between_the_bounds_of_its_bucket() -> None:
    counts = [0, 90, 0, 10]
    assert quantile(counts, (1, 2, 4), 0.5) == pytest.approx(1 + 50 / 90)
    assert quantile(counts, (1, 2, 4), 0.9) == 2
    assert quantile(counts, (1, 2, 4), 0.99) == 4, "the last bucket has no upper bound"
    assert quantile([0, 0, 0, 0], (1, 2, 4), 0.5) is None


def test_no_quantile_exceeds_the_largest_value() -> None:
    assert quantile([0, 0, 1, 0], (1, 60, 300), 0.99, highest=101) == pytest.approx(100.59)
    assert quantile([0, 0, 0, 4], (1, 60, 300), 1.0, highest=400) == 400, "above the last bound"
    counts = RunCounts()
    counts.add_run(101.0, 0.02, None)
    totals = RunTotals.of(counts)
    assert 60 < (totals.lateness_quantile(0.5) or 0) < (totals.lateness_quantile(1.0) or 0) == 101
    assert totals.duration_quantile(1.0) == 0.02


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_a_quantile_is_in_the_bucket_of_the_true_one(share: float) -> None:
    randoms = random.Random(1)
    values = sorted(randoms.expovariate(1) for _ in range(1000))
    counts = [0] * (len(LATENESS_BOUNDS_S) + 1)
    for value in values:
        counts[bucket_of(value, LATENESS_BOUNDS_S)] += 1
    true = values[round(share * len(values)) - 1]
    found = quantile(counts, LATENESS_BOUNDS_S, share)
    assert found is not None
    assert bucket_of(found, LATENESS_BOUNDS_S) == bucket_of(true, LATENESS_BOUNDS_S)


def some_counts(seed: int) -> RunCounts:
    randoms, counts = random.Random(seed), RunCounts()
    for name in OUTCOME_NAMES:
        counts.add_outcome(name, randoms.randrange(3))
    for _ in range(20):
        counts.add_run(randoms.expovariate(1), randoms.expovariate(10), on_time_s=1.0)
    return counts


def test_counts_survive_being_stored() -> None:
    counts = some_counts(1)
    stored = json.loads(json.dumps(counts.as_list()))
    assert RunCounts.of(stored).as_list() == counts.as_list()
    assert (counts.on_time, counts.late) != (0, 0)
    assert counts.on_time + counts.late == counts.started == 20


def test_adding_counts_equals_counting_together() -> None:
    first, second = some_counts(1), some_counts(2)
    added = RunCounts()
    added.add(first)
    added.add_stored(second.as_list())
    assert added.started == 40
    assert added.by_outcome() == {
        name: first.outcome(name) + second.outcome(name) for name in OUTCOME_NAMES
    }
    assert added.lateness_s == pytest.approx(first.lateness_s + second.lateness_s, abs=0.001)
    assert added.late == first.late + second.late


def test_a_start_before_the_due_time_counts_as_on_time() -> None:
    counts = RunCounts()
    counts.add_run(-0.04, 0.1, on_time_s=0.0)
    assert (counts.on_time, counts.lateness[0], counts.lateness_s) == (1, 1, 0.0)


def test_buckets_of_a_newer_version_count_in_the_last_one() -> None:
    counts = RunCounts.of([[0, 1], [], 0, 0, [99, 3], [1, 3]])
    assert counts.lateness[-1] == 3
