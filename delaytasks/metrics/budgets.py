"""The error budgets of tags with `on_time`, as a metric."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from delaytasks.metrics.families import Family, Sample
from delaytasks.statistics.reading import StepRange, counts_by_tag
from delaytasks.statistics.results import OnTime

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime

#: The budget is that of the alert `DelayTasksOnTimeBudgetBurns`.
BUDGET_PERIOD, TARGET = "30d", 0.99
#: The tags are those with such counts in this period, so that few tags are read for a month.
TAGS_PERIOD = "1d"


def read_budgets(wiring: Runtime) -> list[OnTime]:
    """Return the counts of the budget's period for each tag that had some lately."""
    lately = _on_time(wiring, TAGS_PERIOD, None)
    return _on_time(wiring, BUDGET_PERIOD, [one.tag for one in lately]) if lately else []


def _on_time(wiring: Runtime, period: str, tags: Sequence[str] | None) -> list[OnTime]:
    steps = StepRange.of(wiring.clock.now(), period, None, "1m", is_series=False)
    return [
        OnTime(tag, None, counts.on_time, counts.late, TARGET)
        for tag, counts in counts_by_tag(wiring.store, steps, tags)
        if counts.on_time or counts.late
    ]


def budget_family(recent: tuple[Sequence[OnTime], float] | None) -> Family:
    """Return the metric. It has no values if the budgets could not be read lately."""
    return Family(
        "delaytasks_on_time_budget_left",
        "Share of the error budget of 30 days that is left, if 1 % of the runs may begin too late.",
        "gauge",
        ("tag",),
        [Sample((one.tag,), one.budget_left) for one in recent[0]] if recent else [],
    )
