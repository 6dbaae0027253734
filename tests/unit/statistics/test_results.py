"""The values that `delays.statistics` returns."""

from __future__ import annotations

from delaytasks.core.run_counts import RunCounts
from delaytasks.statistics.reading import RunTotals


def totals(*runs: tuple[float, float]) -> RunTotals:
    counts = RunCounts()
    for lateness_s, duration_s in runs:
        counts.add_run(lateness_s, duration_s, on_time_s=1.0)
        counts.add_outcome("done")
    return RunTotals.of(counts)


def test_totals_add_counts_sums_and_histograms() -> None:
    parts = [totals((0.125, 2.0), (5.0, 1.0)), totals((0.125, 2.0))]
    assert RunTotals.total(parts) == totals((0.125, 2.0), (5.0, 1.0), (0.125, 2.0))


def test_totals_of_nothing_are_zero_and_have_no_quantiles() -> None:
    nothing = RunTotals.total([])
    assert nothing == totals()
    assert nothing.lateness_quantile(0.5) is None
