"""Reads the statistics: totals, windows and failure groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from delaytasks.loops import CallGroup, twin
from delaytasks.model.clock import AN_HOUR, EPOCH, from_us, hour_of
from delaytasks.model.errors import InvalidInputError, StoreError
from delaytasks.model.inputs import Delay, check_instant, check_page_limit, check_tag, check_wait
from delaytasks.model.moves import late_start
from delaytasks.operate.statistics_table import COUNTS_KEPT, StatisticsTable, hour_counts_of
from delaytasks.run.observers import DURATION_BOUNDS_S, LATENESS_BOUNDS_S, RunCounts
from delaytasks.run.observers import OTHER_TAGS as OTHER_TAGS

if TYPE_CHECKING:
    from delaytasks.db.store import Store
    from delaytasks.registry import Registry
    from delaytasks.runtime import Runtime


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


# -- The values that `delays.statistics` returns --------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunTotals:
    """Counts of the runs of a tag, or of several tags together.

    Attributes
    ----------
    started
        The runs that began. A run is counted when it has ended.
    done, failed, retried, snoozed, cancelled
        How they ended. A retried run has failed and is repeated.
    expired
        Tasks that were too late to run.
    given_back
        Rows that a worker claimed and did not run: their time was over, or it could not run them.
    lease_lost
        Runs whose result was refused, since another worker had taken over the task.
    worker_lost
        Tasks that failed because their workers died too often.
    on_time, late
        For tags with `on_time`: the runs that began in time, and those that did not, together with
        the expired tasks.
    lateness_s, duration_s
        The sums of all latenesses and durations.
    lateness_max_s, duration_max_s
        The largest lateness and duration. If they are not known, upper bounds from the histograms.
    lateness, duration
        The number of runs in each bucket, whose upper bounds are `LATENESS_BOUNDS_S` and
        `DURATION_BOUNDS_S` of this module.
    """

    started: int
    done: int
    failed: int
    retried: int
    snoozed: int
    cancelled: int
    expired: int
    given_back: int
    lease_lost: int
    worker_lost: int
    on_time: int
    late: int
    lateness_s: float
    duration_s: float
    lateness_max_s: float
    duration_max_s: float
    lateness: tuple[int, ...]
    duration: tuple[int, ...]

    @classmethod
    def of(cls, counts: RunCounts) -> RunTotals:
        return cls(
            started=counts.started,
            **counts.by_outcome(),
            on_time=counts["on_time"],
            late=counts["late"],
            lateness_s=round(counts["lateness_s"], 3),
            duration_s=round(counts["duration_s"], 3),
            lateness_max_s=round(counts["lateness_max_s"], 6),
            duration_max_s=round(counts["duration_max_s"], 6),
            lateness=tuple(counts.lateness),
            duration=tuple(counts.duration),
        )

    @classmethod
    def total(cls, many: Iterable[RunTotals]) -> RunTotals:
        """Return the totals of several tags or steps together."""
        totals = [cls.of(RunCounts()), *many]
        sums: dict[str, Any] = {}
        for field in fields(cls):
            values = [getattr(one, field.name) for one in totals]
            if field.name in ("lateness", "duration"):
                sums[field.name] = tuple(map(sum, zip(*values, strict=True)))
            else:
                is_highest = field.name in ("lateness_max_s", "duration_max_s")
                sums[field.name] = max(values) if is_highest else sum(values)
        return cls(**sums)

    def lateness_quantile(self, share: float) -> float | None:
        """Estimate the lateness that `share` of the runs do not exceed; None without runs."""
        return quantile(self.lateness, LATENESS_BOUNDS_S, share, self.lateness_max_s)

    def duration_quantile(self, share: float) -> float | None:
        """Estimate the duration that `share` of the runs do not exceed; None without runs."""
        return quantile(self.duration, DURATION_BOUNDS_S, share, self.duration_max_s)

    @property
    def on_time_share(self) -> float | None:
        """The share of tasks on time, from exact counts; None if none of them has `on_time`."""
        total = self.on_time + self.late
        return self.on_time / total if total else None

    def as_json(self) -> dict[str, Any]:
        """Return the counts and the usual quantiles as JSON values."""
        values = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in ("lateness", "duration")
        }
        for share in (50, 99):
            values[f"lateness_p{share}_s"] = _rounded(self.lateness_quantile(share / 100))
            values[f"duration_p{share}_s"] = _rounded(self.duration_quantile(share / 100))
        values["on_time_share"] = self.on_time_share
        return values


@dataclass(frozen=True, slots=True)
class SeriesPoint:
    """One step of a series: what ended in it."""

    start: datetime
    #: All tags together.
    total: RunTotals
    #: The tags that have runs.
    tags: Mapping[str, RunTotals]


@dataclass(frozen=True, slots=True)
class OnTime:
    """How many tasks of a tag began in the time that `@processor(tag, on_time=…)` promises.

    Attributes
    ----------
    tag
        The tag.
    promised_s
        The promise of the processor in this process; None if this process has no such processor.
    on_time, late
        Exact counts.
    target
        The share of tasks that should be on time.
    """

    tag: str
    promised_s: float | None
    on_time: int
    late: int
    target: float

    @property
    def share(self) -> float:
        """The share of tasks on time."""
        return self.on_time / (self.on_time + self.late)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "share": round(self.share, 6)}


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Failed runs of a tag with the same error.

    Attributes
    ----------
    tag
        The tag.
    pattern
        What their errors have in common; `*` stands for what differs.
    fingerprint
        A short name of the pattern.
    runs
        The number of failed runs, retried ones included.
    first_at, last_at
        When the first and the last of them failed, within a minute.
    task_id, error
        One of the last tasks that failed in this way, and the end of its error text.
    hours
        The number of failed runs by the hour, for the last 48 hours that have any.
    """

    tag: str
    pattern: str
    fingerprint: str
    runs: int
    first_at: datetime
    last_at: datetime
    task_id: int
    error: str
    hours: Mapping[datetime, int]

    @property
    def filters(self) -> dict[str, str]:
        """The filters for `find` and the methods of `bulk` that select the tasks of this group."""
        return {"tag": self.tag, "error": self.pattern}

    def first_since(self, begin: datetime) -> datetime | None:
        """Return when the first run failed since the beginning of an hour; None without runs."""
        hours = [hour for hour, runs in self.hours.items() if runs and hour >= begin]
        return max(min(hours), self.first_at) if hours else None


class CountedFailures(NamedTuple):
    """A group of failures, and what its runs are compared with."""

    group: FailureGroup
    #: All runs of the tag since `recent_hours(now)`, or 0 if they were not counted.
    runs_of_tag: int


def recent_hours(now: datetime) -> datetime:
    """Return the beginning of the hour before the present one."""
    return hour_of(now) - AN_HOUR


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


#: The most steps of one series.
MAX_SERIES_STEPS = 10_000

Since = datetime | Delay
#: The ranges that are shown.
WINDOWS = {"hour": "1h", "day": "1d"}
#: The range of the late starts that a verdict counts.
LATE_RANGE = timedelta(minutes=15)
#: The most groups, those that failed last.
MOST_READ_GROUPS = 100


class Statistics(CallGroup):
    """The statistics of a `DelayTasks`, as `delays.statistics`.

    Workers write what they have run once a minute, so the last minute or two are incomplete. Each
    method reads the tables, and has an asynchronous twin for coroutines, such as `aseries` for
    `series`.

    Most methods read a range, which has the same parameters everywhere:

    - `since`: the beginning, an instant, or a duration before now such as `"1h"`, at most two days.
      It is rounded down to a minute. Counts that are older than two days are deleted.
    - `until`: the end, an instant; None means now.
    - `step`: the length of a step, a number of whole minutes. Steps begin at multiples of their
      length since 1970 in UTC.
    - `tags`: only these tags; None means all.

    The methods raise `InvalidInputError` if the range is empty or has too many steps, and
    `StoreUnavailableError` if a database cannot be reached.

    Examples
    --------
    >>> for point in delays.statistics.series(since="1h", step="5m"):
    ...     print(point.start, point.total.done, point.total.lateness_quantile(0.99))
    """

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
        steps = StepRange.of(self._runtime.clock.now(), since, until, step)
        found = counts_by_step(self._runtime.store, steps, _checked_tags(tags))
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
            The share of tasks that should be on time, below 1.

        Returns
        -------
        list of OnTime
            By tag, for the tags that have such counts.

        Raises
        ------
        InvalidInputError
            If the target is no share, or if the range is wrong.

        Examples
        --------
        >>> [one.share for one in delays.statistics.on_time(since="2d")]
        """
        if not 0 < target < 1:
            raise InvalidInputError(
                f"target={target!r}: it is a share between 0 and 1, as 0.99", "target"
            )
        found = []
        for tag, counts in self._counts(since, until, tags):
            if counts["on_time"] or counts["late"]:
                processor = self._delays._registry.get(tag)
                promised_s = None if processor is None else processor.on_time_s
                found.append(OnTime(tag, promised_s, counts["on_time"], counts["late"], target))
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
            `filters` of a group selects its tasks in `find` and in the methods of `bulk`.

        Examples
        --------
        >>> group = delays.statistics.failures()[0]
        >>> delays.bulk.rerun(**group.filters)
        """
        check_page_limit(limit)
        return failure_groups(
            self._runtime.store, None if tag is None else check_tag(tag), since, limit
        )

    afailures = twin(failures)

    # -- private ----------------------------------------------------------------------------------

    def _counts(
        self, since: Since, until: datetime | None, tags: Sequence[str] | None
    ) -> list[tuple[str, RunCounts]]:
        start, end = checked_range(self._runtime.clock.now(), since, until)
        start = start.replace(second=0, microsecond=0)
        return counts_by_tag(self._runtime.store, start, end, _checked_tags(tags))


def _point(start: datetime, by_tag: dict[str, RunCounts]) -> SeriesPoint:
    total = RunCounts()
    for counts in by_tag.values():
        total.add(counts)
    tags = {tag: RunTotals.of(counts) for tag, counts in sorted(by_tag.items())}
    return SeriesPoint(start, RunTotals.of(total), tags)


# -- ranges and their counts ----------------------------------------------------------------------


class StepRange(NamedTuple):
    """The steps of a series, which are aligned to 1970 in UTC."""

    since: datetime
    until: datetime
    length: timedelta

    @classmethod
    def of(cls, now: datetime, since: Since, until: datetime | None, step: Delay) -> StepRange:
        """Check a range and a step, and begin at the step that contains the range's begin."""
        step_s = check_wait(step, "step")
        if step_s < 60 or step_s % 60:
            raise InvalidInputError(
                f"a step is a number of whole minutes, not {step_s:g} s", "step"
            )
        length = timedelta(seconds=step_s)
        start, end = checked_range(now, since, until)
        steps = cls(_floor(start, length), end, length)
        if (end - steps.since) / length > MAX_SERIES_STEPS:
            raise InvalidInputError(
                f"more than {MAX_SERIES_STEPS} steps: choose a longer step", "step"
            )
        return steps

    def starts(self) -> Iterator[datetime]:
        start = self.since
        while start < self.until:
            yield start
            start += self.length


def checked_range(now: datetime, since: Since, until: datetime | None) -> tuple[datetime, datetime]:
    """Return the begin and the end of a range. `since` may be a duration before now."""
    if isinstance(since, datetime):
        start = check_instant(since, "since")
    else:
        ago = timedelta(seconds=check_wait(since, "since"))
        if ago > COUNTS_KEPT:
            raise InvalidInputError(
                "counts are kept for two days: `since` is at most '2d'", "since"
            )
        start = now - ago
    end = now if until is None else check_instant(until, "until")
    if start >= end:
        raise InvalidInputError("the range is empty: `since` is before `until`", "since")
    return start, end


def counts_by_step(
    store: Store, steps: StepRange, tags: Sequence[str] | None
) -> dict[datetime, dict[str, RunCounts]]:
    """Return the counts by step and tag, for the steps that have any."""
    found: dict[datetime, dict[str, RunCounts]] = {}
    for start, tag, counts in _table(store).read(steps.since, steps.until, tags):
        by_tag = found.setdefault(_floor(start, steps.length), {})
        by_tag.setdefault(tag, RunCounts()).add(counts)
    return found


def count_rows(store: Store, since: datetime, until: datetime, most: int) -> int:
    """Count the rows that `series` reads for all tags of a range, up to `most`."""
    return _table(store).count(since, until, most)


def counts_by_tag(
    store: Store, since: datetime, until: datetime, tags: Sequence[str] | None
) -> list[tuple[str, RunCounts]]:
    """Return the counts of a range, in the order of the tags."""
    found: dict[str, RunCounts] = {}
    for _, tag, counts in _table(store).read(since, until, tags):
        found.setdefault(tag, RunCounts()).add(counts)
    return sorted(found.items())


def failure_groups(
    store: Store, tag: str | None, since: datetime | None, limit: int
) -> list[FailureGroup]:
    """Return the groups, beginning with the one that failed last."""
    return [
        FailureGroup(
            row.tag,
            row.pattern,
            row.fingerprint,
            row.runs,
            row.first_at,
            row.last_at,
            row.task_id,
            row.sample,
            {EPOCH + timedelta(hours=h): n for h, n in sorted(hour_counts_of(row.hours).items())},
        )
        for row in _table(store).failure_groups(tag, since, limit)
    ]


def _checked_tags(tags: Sequence[str] | None) -> Sequence[str] | None:
    if isinstance(tags, str):
        raise InvalidInputError(f"tags is a list of tags: [{tags!r}]", "tags")
    return None if tags is None else [check_tag(tag) for tag in tags]


def _table(store: Store) -> StatisticsTable:
    return StatisticsTable(store.database, store.schema)


def _floor(instant: datetime, step: timedelta) -> datetime:
    step_us = int(step.total_seconds()) * 1_000_000
    return from_us((instant - EPOCH) // timedelta(microseconds=1) // step_us * step_us)


# -- for the verdict, the command line and the console --------------------------------------------


def gather_on_time(statistics: Statistics, registry: Registry) -> list[dict[str, Any]]:
    """Return the on-time shares of the last hour and day by tag.

    The tags are those with `on_time` in this process, and those with counts in the last hour: most
    processes of an operator have no processors.
    """
    try:
        tags = {one.tag for one in statistics.on_time(since=WINDOWS["hour"])}
        tags |= {each.tag for each in registry if each.on_time_s is not None}
        return _of_tags(statistics, sorted(tags)) if tags else []
    except StoreError:
        return []  # the state of the deployment has the error


def _of_tags(statistics: Statistics, tags: Sequence[str]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for window, since in WINDOWS.items():
        for one in statistics.on_time(since=since, tags=tags):
            about = {"tag": one.tag, "promised_s": one.promised_s, "target": one.target}
            empty = dict.fromkeys(WINDOWS)
            of_tag = found.setdefault(one.tag, {**about, **empty})
            numbers = one.as_json()
            of_tag[window] = {name: numbers[name] for name in ("on_time", "late", "share")}
    return [found[tag] for tag in sorted(found)]


def recent_late_starts(runtime: Runtime, now: datetime) -> Counter[str]:
    """Return how many runs began late, by the reason (`LateReason`)."""
    late = Counter[str]()
    for _, counts in counts_by_tag(runtime.store, now - LATE_RANGE, now, None):
        for late_by, count in counts.late_starts.items():
            late[late_start(late_by)[1]] += count
    return late


def recent_failures(runtime: Runtime, now: datetime) -> list[CountedFailures]:
    """Return the groups that failed last, with the number of recent runs of their tags."""
    groups = failure_groups(runtime.store, None, None, MOST_READ_GROUPS)
    since = recent_hours(now)
    tags = sorted({group.tag for group in groups if group.last_at >= since})
    started = Counter[str]()
    if tags:
        found = counts_by_tag(runtime.store, since, now, tags)
        started.update({tag: counts.started for tag, counts in found})
    return [CountedFailures(group, started[group.tag]) for group in groups]
