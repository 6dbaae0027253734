"""The asynchronous twins of the methods of `Statistics`.

`python -m tests.async_twins` writes this module from `delaytasks/statistics/api.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from delaytasks.core.durations import Delay
    from delaytasks.core.failure_group import FailureGroup
    from delaytasks.statistics.reading import Since
    from delaytasks.statistics.results import GaugePoint, OnTime, RunTotals, SeriesPoint


class AsyncStatisticsTwins:
    """For coroutines: each method has the parameters, the result and the errors of its twin."""

    if TYPE_CHECKING:

        async def _call_async(self, name: str, /, *arguments: Any, **options: Any) -> Any: ...

    async def aseries(
        self,
        *,
        since: Since = "1h",
        until: datetime | None = None,
        step: Delay = "1m",
        tags: Sequence[str] | None = None,
    ) -> list[SeriesPoint]:
        """Return what ended in each step of a range, the steps without runs included.

        This is the asynchronous twin of `series`.
        """
        result: list[SeriesPoint] = await self._call_async(
            "series", since=since, until=until, step=step, tags=tags
        )
        return result

    async def atotals(
        self,
        *,
        since: Since = "1h",
        until: datetime | None = None,
        tags: Sequence[str] | None = None,
    ) -> dict[str, RunTotals]:
        """Return what ended in a range, by tag.

        This is the asynchronous twin of `totals`.
        """
        result: dict[str, RunTotals] = await self._call_async(
            "totals", since=since, until=until, tags=tags
        )
        return result

    async def aon_time(
        self,
        *,
        since: Since = "1d",
        until: datetime | None = None,
        tags: Sequence[str] | None = None,
        target: float = 0.99,
    ) -> list[OnTime]:
        """Return how many tasks began in the time that their processors promise with `on_time`.

        This is the asynchronous twin of `on_time`.
        """
        result: list[OnTime] = await self._call_async(
            "on_time", since=since, until=until, tags=tags, target=target
        )
        return result

    async def afailures(
        self, *, tag: str | None = None, since: datetime | None = None, limit: int = 100
    ) -> list[FailureGroup]:
        """Return groups of failures with the same error, beginning with the one that failed last.

        This is the asynchronous twin of `failures`.
        """
        result: list[FailureGroup] = await self._call_async(
            "failures", tag=tag, since=since, limit=limit
        )
        return result

    async def agauges(
        self, *, since: Since = "1h", until: datetime | None = None, step: Delay = "1m"
    ) -> list[GaugePoint]:
        """Return how many tasks waited, ran and so on, as sweeps have counted once a minute.

        This is the asynchronous twin of `gauges`.
        """
        result: list[GaugePoint] = await self._call_async(
            "gauges", since=since, until=until, step=step
        )
        return result
