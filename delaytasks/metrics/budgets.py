"""The error budgets of tags with `on_time`, as a metric."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from delaytasks.core.clock import monotonic
from delaytasks.core.errors import StoreError
from delaytasks.metrics.families import Family, Sample
from delaytasks.statistics.reading import StepRange, counts_by_tag
from delaytasks.statistics.results import OnTime

if TYPE_CHECKING:
    from delaytasks.wiring import Wiring

#: The budget is that of the alert `DelayTasksOnTimeBudgetBurns`.
BUDGET_PERIOD, TARGET = "30d", 0.99
#: The statistics of this period are read again after this time, and after the reading's duration
#: times `RENEW_SHARE`, so that they cost at most half a percent of a core.
RENEWED_AFTER_S, RENEW_SHARE = 60.0, 200


class OnTimeBudgets:
    """Reads how much of each tag's error budget is left. Not safe for several threads."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._samples: Sequence[Sample] = ()
        self._is_read_again_at = float("-inf")

    def family(self) -> Family:
        began = monotonic()
        if began >= self._is_read_again_at:
            try:
                self._samples = self._read()
            except StoreError:
                pass  # the value 0 of `delaytasks_database_up` reports it
            else:
                now = monotonic()
                self._is_read_again_at = now + max(RENEWED_AFTER_S, RENEW_SHARE * (now - began))
        return budget_family(self._samples)

    def _read(self) -> list[Sample]:
        now = self._wiring.clock.now()
        period = StepRange.of(now, BUDGET_PERIOD, None, "1m", is_series=False)
        return [
            Sample((tag,), OnTime(tag, None, counts.on_time, counts.late, TARGET).budget_left)
            for tag, counts in counts_by_tag(self._wiring.shards, period, None)
            if counts.on_time or counts.late
        ]


def budget_family(samples: Sequence[Sample]) -> Family:
    return Family(
        "delaytasks_on_time_budget_left",
        "Share of the error budget of 30 days that is left, if 1 % of the runs may begin too late.",
        "gauge",
        ("tag",),
        samples,
    )
