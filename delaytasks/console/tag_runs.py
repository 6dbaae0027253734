"""The runs of each tag in a period, for the page of tags."""

from __future__ import annotations

from typing import NamedTuple

from markupsafe import Markup

from delaytasks.console.requests import state
from delaytasks.console.run_charts import PeriodRuns, read_runs
from delaytasks.statistics.charts import sparkline
from delaytasks.statistics.results import RunTotals

#: Seconds for which all viewers see the same list, besides those of the runs that it is made of.
LIST_KEPT_S = 10.0
#: The most bars of a sparkline. Each has one or more steps of the period.
MOST_BARS = 32


class TagRuns(NamedTuple):
    """The runs of one tag."""

    tag: str
    total: RunTotals
    spark: Markup

    @property
    def failed(self) -> int:
        """The runs that failed, those that will be retried included."""
        return self.total.failed + self.total.retried


class TagList(NamedTuple):
    """The tags that have counts in a period, those with the most runs first."""

    tags: tuple[TagRuns, ...]
    #: The number of tags that were read, if all of them have too many rows.
    cut_to: int | None


def read_tags(period: str) -> TagList:
    """Return the tags of a period, from the same rows as the charts of the overview."""
    return state().history.get(("tags", period), LIST_KEPT_S, lambda: _tags_of(read_runs(period)))


def _tags_of(found: PeriodRuns) -> TagList:
    tags = [_runs_of(tag, steps, len(found.points)) for tag, steps in found.by_tag().items()]
    tags.sort(key=lambda each: (-each.total.started, each.tag))
    return TagList(tuple(tags), found.cut_to)


def _runs_of(tag: str, steps: dict[int, RunTotals], count: int) -> TagRuns:
    of_bar = -(-count // MOST_BARS)
    bars = [0] * -(-count // of_bar)
    for number, total in steps.items():
        bars[number // of_bar] += total.started
    label = f"runs by time, at most {max(bars):,} in one of {len(bars)} bars"
    return TagRuns(tag, RunTotals.total(steps.values()), Markup(sparkline(bars, label)))
