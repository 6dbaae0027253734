"""`delays.statistics`: reads what workers have run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from delaytasks.core.errors import InvalidQueryError
from delaytasks.core.inputs import Delay, check_page_limit, check_tag
from delaytasks.core.run_counts import FailureGroup, RunCounts
from delaytasks.statistics.reading import (
    Since,
    StepRange,
    checked_tags,
    counts_by_tag,
    failure_groups,
    gauge_means,
    run_counts,
)
from delaytasks.statistics.results import GaugePoint, OnTime, RunTotals, SeriesPoint
from delaytasks.twins import twin

if TYPE_CHECKING:
    from delaytasks.core.clock import Clock
    from delaytasks.processors.registry import Registry
    from delaytasks.runtime import Runtime
    from delaytasks.storage.store import Store


class Statistics:
    """The statistics of a `DelayTasks`, as `delays.statistics`.

    Workers write what they have run once a minute, so the last minute or two are incomplete. Each
    method reads the tables, and has an asynchronous twin for coroutines, such as `aseries` for
    `series`.

    Most methods read a range, which has the same parameters everywhere:

    - `since`: the beginning, an instant, or a duration before now such as `"1h"`. It is rounded
      down to a minute. Counts that are older than two days have the resolution of an hour, and
      counts that are older than a year are deleted.
    - `until`: the end, an instant; None means now.
    - `step`: the length of a step, a number of whole minutes. Steps begin at multiples of their
      length since 1970 in UTC.
    - `tags`: only these tags; None means all.

    The methods raise `InvalidQueryError` if the range is empty or has too many steps, and
    `StoreUnavailableError` if a database cannot be reached.

    Examples
    --------
    >>> for point in delays.statistics.series(since="1h", step="5m"):
    ...     print(point.start, point.total.done, point.total.lateness_quantile(0.99))
    """

    def __init__(
        self,
        get_runtime: Callable[[], Runtime],
        registry: Registry,
        run_async: Callable[..., Awaitable[Any]],
    ) -> None:
        self._get_runtime = get_runtime
        self._registry = registry
        self._run_async = run_async

    def series(
        self,
        *,
        since: Since = "1h",
        until: datetime | None = None,
        step: Delay = "1m",
        tags: Sequence[str] | None = None,
    ) -> list[SeriesPoint]:
        """Return what ended in each step of a range, the steps without runs included.

        Parameters
        ----------
        since, until, step, tags
            See the class.

        Returns
        -------
        list of SeriesPoint
            In the order of time.

        Examples
        --------
        >>> points = delays.statistics.series(since="1d", step="1h", tags=["mail.send"])
        """
        steps = StepRange.of(self._clock.now(), since, until, step)
        found = run_counts(self._store, steps, checked_tags(tags))
        return [_point(start, found.get(start, {})) for start in steps.starts()]

    aseries = twin(series)

    def totals(
        self,
        *,
        since: Since = "1h",
        until: datetime | None = None,
        tags: Sequence[str] | None = None,
    ) -> dict[str, RunTotals]:
        """Return what ended in a range, by tag.

        Parameters
        ----------
        since, until, tags
            See the class.

        Returns
        -------
        dict
            The totals of each tag that has any.

        Examples
        --------
        >>> delays.statistics.totals(since="1d")["mail.send"].done
        """
        return {tag: RunTotals.of(counts) for tag, counts in self._counts(since, until, tags)}

    atotals = twin(totals)

    def on_time(
        self,
        *,
        since: Since = "1d",
        until: datetime | None = None,
        tags: Sequence[str] | None = None,
        target: float = 0.99,
    ) -> list[OnTime]:
        """Return how many tasks began in the time that their processors promise with `on_time`.

        Parameters
        ----------
        since, until, tags
            See the class.
        target
            The share of tasks that should be on time, below 1. It determines the error budget.

        Returns
        -------
        list of OnTime
            By tag, for the tags that have such counts.

        Raises
        ------
        InvalidQueryError
            If the target is no share, or if the range is wrong.

        Examples
        --------
        >>> [one.budget_left for one in delays.statistics.on_time(since="7d", target=0.999)]
        """
        if not 0 < target < 1:
            raise InvalidQueryError(f"target={target!r}: it is a share between 0 and 1, as 0.99")
        found = []
        for tag, counts in self._counts(since, until, tags):
            if counts.on_time or counts.late:
                processor = self._registry.get(tag)
                promised_s = None if processor is None else processor.on_time_s
                found.append(OnTime(tag, promised_s, counts.on_time, counts.late, target))
        return found

    aon_time = twin(on_time)

    def failures(
        self, *, tag: str | None = None, since: datetime | None = None, limit: int = 100
    ) -> list[FailureGroup]:
        """Return groups of failures with the same error, beginning with the one that failed last.

        Parameters
        ----------
        tag
            Only the groups of this tag.
        since
            Only the groups that failed at this instant or later.
        limit
            The most groups.

        Returns
        -------
        list of FailureGroup
            `filters` of a group selects its tasks in `find` and in the bulk functions.

        Examples
        --------
        >>> group = delays.statistics.failures()[0]
        >>> delays.rerun_many(**group.filters)
        """
        check_page_limit(limit)
        return failure_groups(self._store, None if tag is None else check_tag(tag), since, limit)

    afailures = twin(failures)

    def gauges(
        self, *, since: Since = "1h", until: datetime | None = None, step: Delay = "1m"
    ) -> list[GaugePoint]:
        """Return how many tasks waited, ran and so on, as sweeps have counted once a minute.

        Parameters
        ----------
        since, until, step
            See the class.

        Returns
        -------
        list of GaugePoint
            In the order of time, for the steps in which a sweep has counted.

        Examples
        --------
        >>> [point.gauges.overdue for point in delays.statistics.gauges(since="1d", step="1h")]
        """
        steps = StepRange.of(self._clock.now(), since, until, step)
        return [GaugePoint(*each) for each in gauge_means(self._store, steps).items()]

    agauges = twin(gauges)

    # -- private ----------------------------------------------------------------------------------

    @property
    def _store(self) -> Store:
        return self._get_runtime().store

    @property
    def _clock(self) -> Clock:
        return self._get_runtime().clock

    def _counts(
        self, since: Since, until: datetime | None, tags: Sequence[str] | None
    ) -> list[tuple[str, RunCounts]]:
        minutes = StepRange.of(self._clock.now(), since, until, "1m", is_series=False)
        return counts_by_tag(self._store, minutes, checked_tags(tags))


def _point(start: datetime, by_tag: dict[str, RunCounts]) -> SeriesPoint:
    total = RunCounts()
    for counts in by_tag.values():
        total.add(counts)
    tags = {tag: RunTotals.of(counts) for tag, counts in sorted(by_tag.items())}
    return SeriesPoint(start, RunTotals.of(total), tags)
