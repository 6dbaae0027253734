"""What ran: each worker counts its runs and writes them once a minute, and anyone reads them.

The table has one row for each minute and tag, and one for each hour, tag and error pattern, for two
days. The counts of a row are one JSON object (`RunCounts`). Prometheus keeps longer series.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, func, select, update

from delaytasks.db.schema import FINGERPRINT_LENGTH
from delaytasks.db.statements import insert_if_absent
from delaytasks.loops import CallGroup, Loop, twin, within
from delaytasks.model.body import dump_json
from delaytasks.model.clock import EPOCH, from_us, hour_of, to_us
from delaytasks.model.errors import InvalidInputError
from delaytasks.model.inputs import Delay, check_instant, check_page_limit, check_tag, check_wait
from delaytasks.run.observers import (
    DURATION_BOUNDS_S,
    LATENESS_BOUNDS_S,
    WORKER_LOST,
    Counted,
    RunCounts,
    add_counts,
    add_failure,
)
from delaytasks.run.observers import OTHER_TAGS as OTHER_TAGS

if TYPE_CHECKING:
    from delaytasks.db.store import Store
    from delaytasks.runtime import Runtime


# -- A worker counts what its processes have run, and writes it once a minute ---------------------


#: The time between two writes. A worker that is killed, and a write that fails, lose the counts
#: since the last one.
WRITE_S = 60.0
#: How long a process that ends waits for its last write.
LAST_WRITE_S = 3.0
#: The most error patterns in one write, and about the most of all workers in one hour. Failures
#: beyond them are counted for their tag only.
MAX_PATTERNS = 100


class StatisticsWriter:
    """What a worker's processes have run since the worker started.

    The pool processes report their counts with each chunk. Any thread may call these methods: one
    thread writes the counts, and an endpoint for metrics reads `totals`.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._totals: dict[str, RunCounts] = {}
        self._unwritten: Counted = {}
        self.loop = Loop("statistics", self._turn, runtime.events)

    def add(self, counted: Counted) -> None:
        """Add what a process has reported."""
        with self._lock:
            for (tag, pattern), counts in counted.items():
                most = self._runtime.settings.statistics_tags
                name = tag if tag in self._totals or len(self._totals) < most else OTHER_TAGS
                if not pattern:
                    self._totals.setdefault(name, RunCounts()).add(counts)
                add_counts(self._unwritten, (name, pattern), counts, MAX_PATTERNS)

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        """Count the tasks that failed because their workers died. A subscriber of events."""
        if name == "task.worker_lost":
            counted: Counted = {(fields["tag"], ""): RunCounts({WORKER_LOST: 1})}
            add_failure(counted, fields["tag"], fields["id"], str(fields["error"]))
            self.add(counted)

    def totals(self) -> dict[str, RunCounts]:
        """Return the counts of each tag since the worker started, as copies."""
        with self._lock:
            return {tag: RunCounts(counts) for tag, counts in self._totals.items()}

    def write(self) -> None:
        """Write all counts that are not written yet. If that fails, they are lost."""
        with self._lock:
            taken, self._unwritten = self._unwritten, {}
        if not taken:
            return
        store, now = self._runtime.store, self._runtime.clock.now()

        def work(on: Any) -> None:
            write_counts(store, on, taken, now)

        # One try: if a commit is lost, nobody knows whether the counts were added.
        store.database.repeat(work, store.database.begin, tries=1)

    def write_last(self) -> None:
        """Write what a process that ends has counted.

        If the database does not answer, these counts are lost, because a worker must end in time.
        """
        with suppress(TimeoutError):
            attempt = self._runtime.events.attempt
            within(LAST_WRITE_S, partial(attempt, "stop", "statistics", self.write))

    def _turn(self) -> float:
        # Without tables or rights each write fails. Then the next one is a minute later, too.
        self._runtime.events.attempt(self.loop.name, "write", self.write)
        return WRITE_S


# -- The table ------------------------------------------------------------------------------------


#: The time for which counts are kept.
COUNTS_KEPT = timedelta(days=2)
#: Rows of runs that are in memory at a time.
STREAMED_ROWS = 5000
#: The most rows of failures that are read: those of the latest hours.
MOST_FAILURE_ROWS = 2000


#: The columns of the key, in the order in which every process inserts and locks rows.
_KEY = ("fingerprint", "start", "tag")


def write_counts(store: Store, on: Any, unwritten: Counted, at: datetime) -> None:
    """Add counts to the rows of the minute and, for failures, of the hour, in a transaction."""
    s, hour, minute = store.schema.statistics, hour_of(at), at.replace(second=0, microsecond=0)
    times = {"first_us": to_us(at), "last_us": to_us(at)}
    counted: dict[tuple[Any, ...], RunCounts] = {}
    for (tag, pattern), counts in unwritten.items():
        if pattern:
            fingerprint = hashlib.sha256(pattern.encode()).hexdigest()[:FINGERPRINT_LENGTH]
            counted[fingerprint, hour, tag] = RunCounts(counts | times)
        else:
            counted["", minute, tag] = counts
    keys = sorted(counted)
    known = select(func.count()).where(s.c.fingerprint > "", s.c.start == hour)
    has_failures = any(fingerprint for fingerprint, *_ in keys)
    is_full = has_failures and on.execute(known).scalar_one() >= MAX_PATTERNS
    rows = [dict(zip(_KEY, key, strict=True)) for key in keys if not (is_full and key[0])]
    if rows:
        on.execute(insert_if_absent(store.database, s, s.c.tag).values(counts="{}"), rows)
    parts = zip(_KEY, zip(*keys, strict=True), strict=True)
    mine = [s.c[name].in_(set(values)) for name, values in parts]
    columns = [s.c[name] for name in _KEY]
    locked = select(*columns, s.c.counts).where(*mine).order_by(*columns).with_for_update()
    for *key, text in on.execute(locked).all():
        if (more := counted.get(tuple(key))) is not None:
            counts = RunCounts(json.loads(text))
            counts.add(more)
            is_row = [column == value for column, value in zip(columns, key, strict=True)]
            on.execute(update(s).where(*is_row).values(counts=dump_json(counts)))


def purge(store: Store, now: datetime) -> None:
    """Delete the rows that are too old."""
    s = store.schema.statistics
    old = delete(s).where(s.c.start < now - COUNTS_KEPT)
    store.database.autocommitted(lambda on: on.execute(old))


def read_runs(
    store: Store, since: datetime, until: datetime, tags: Sequence[str] | None
) -> Iterator[tuple[datetime, str, RunCounts]]:
    """Yield the minute, the tag and the counts of each row of a range; None reads all tags."""
    s = store.schema.statistics
    is_run = s.c.fingerprint == "", s.c.start >= since, s.c.start < until
    query = select(s.c.start, s.c.tag, s.c.counts).where(*is_run)
    if isinstance(tags, str):
        raise InvalidInputError(f"tags is a list of tags: [{tags!r}]", "tags")
    if tags is not None:
        query = query.where(s.c.tag.in_([check_tag(tag) for tag in tags]))
    # Two days of many tags are some hundred thousand rows.
    for rows in store.database.stream(query, STREAMED_ROWS):
        for start, tag, text in rows:
            yield start, tag, RunCounts(json.loads(text))


def counts_by_tag(
    store: Store, since: datetime, until: datetime, tags: Sequence[str] | None = None
) -> dict[str, RunTotals]:
    """Return the counts of a range, in the order of the tags."""
    found: dict[str, RunTotals] = {}
    for _, tag, counts in read_runs(store, since, until, tags):
        found.setdefault(tag, RunTotals()).add(counts)
    return dict(sorted(found.items()))


def failure_groups(store: Store, tag: str | None = None) -> list[FailureGroup]:
    """Return the groups of the runs that failed, beginning with the one that failed last."""
    s = store.schema.statistics
    query = select(s).where(s.c.fingerprint > "").order_by(s.c.start.desc())
    if tag is not None:
        query = query.where(s.c.tag == tag)
    merged: dict[tuple[str, str], RunCounts] = {}
    hours: dict[tuple[str, str], dict[datetime, int]] = {}
    for row in reversed(store.database.rows(query.limit(MOST_FAILURE_ROWS))):
        key, counts = (row.tag, row.fingerprint), RunCounts(json.loads(row.counts))
        merged.setdefault(key, RunCounts()).add(counts)
        hours.setdefault(key, {})[row.start] = counts["failed"]
    return groups_by_last(
        FailureGroup.of(key[0], counts, hours[key]) for key, counts in merged.items()
    )


def groups_by_last(groups: Iterable[FailureGroup]) -> list[FailureGroup]:
    """Return the groups, beginning with the one that failed last."""
    return sorted(groups, key=lambda group: group.last_at, reverse=True)


# -- The values that `delays.statistics` returns --------------------------------------------------


def quantile(
    counts: Sequence[int], bounds: Sequence[float], share: float, highest: float
) -> float | None:
    """Estimate the time that `share` of the values do not exceed.

    The values of a bucket are taken to be evenly distributed in it, up to `highest`.

    Parameters
    ----------
    counts
        The number of values in each bucket.
    bounds
        The upper bounds of the buckets. One more bucket has all higher values.
    share
        For example 0.99 for the 99th percentile.
    highest
        The largest value.

    Returns
    -------
    float or None
        None if there are no values.
    """
    wanted = share * sum(counts)
    reached = enumerate(accumulate(counts))
    number = next((n for n, until in reached if counts[n] and until >= wanted), None)
    if number is None:
        return None
    ends = (0.0, *bounds, inf)
    lower, upper = min(ends[number], highest), min(ends[number + 1], highest)
    inside = (wanted - sum(counts[:number])) / counts[number]
    return lower + (upper - lower) * max(inside, 0.0)


class RunTotals(RunCounts):
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
    lateness_s, duration_s
        The sums of all latenesses and durations.
    lateness_max_s, duration_max_s
        The largest lateness and duration.
    lateness, duration
        The number of runs in each bucket, whose upper bounds are `LATENESS_BOUNDS_S` and
        `DURATION_BOUNDS_S` of this module.
    """

    done: int
    failed: int
    retried: int
    snoozed: int
    cancelled: int
    expired: int
    given_back: int
    lease_lost: int
    worker_lost: int
    lateness_s: float
    duration_s: float
    lateness_max_s: float
    duration_max_s: float

    def __getattr__(self, name: str) -> Any:
        if name in RunTotals.__annotations__:
            return self[name]
        raise AttributeError(name)

    @classmethod
    def total(cls, many: Iterable[RunCounts]) -> RunTotals:
        """Return the totals of several tags or steps together."""
        total = cls()
        for counts in many:
            total.add(counts)
        return total

    def lateness_quantile(self, share: float) -> float | None:
        """Estimate the lateness that `share` of the runs do not exceed; None without runs."""
        return quantile(self.lateness, LATENESS_BOUNDS_S, share, self.lateness_max_s)

    def duration_quantile(self, share: float) -> float | None:
        """Estimate the duration that `share` of the runs do not exceed; None without runs."""
        return quantile(self.duration, DURATION_BOUNDS_S, share, self.duration_max_s)


@dataclass(frozen=True, slots=True)
class SeriesPoint:
    """One step of a series: what ended in it."""

    start: datetime
    #: All tags together.
    total: RunTotals
    #: The tags that have runs.
    tags: Mapping[str, RunTotals]


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Failed runs of a tag with the same error.

    Attributes
    ----------
    tag
        The tag.
    pattern
        What their errors have in common; `*` stands for what differs.
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
    runs: int
    first_at: datetime
    last_at: datetime
    task_id: int
    error: str
    hours: Mapping[datetime, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, tag: str, counts: RunCounts, hours: Mapping[datetime, int] | None = None
    ) -> FailureGroup:
        """Return the group that counts describe."""
        times = from_us(counts["first_us"]), from_us(counts["last_us"])
        example = counts["task_id"], counts["error"]
        return cls(tag, counts["pattern"], counts["failed"], *times, *example, hours or {})

    @property
    def filters(self) -> dict[str, str]:
        """The filters for `find` and the methods of `bulk` that select the tasks of this group."""
        error = {"error": self.pattern} if self.pattern.strip("*") else {}
        return {"tag": self.tag, **error}

    @property
    def summary(self) -> str:
        """The type and the message of the exception, with `…` for what differs."""
        said = self.pattern.rpartition("\n")[2].strip("*").strip()
        # The whole message differs, such as the key of a KeyError.
        said += " *" if said.endswith(":") else ""
        return said.replace("*", "…") or "(no error text)"

    @property
    def where(self) -> str:
        """The function that raised the exception; empty if the error is no traceback."""
        return self.pattern.partition("\n")[0].removeprefix("* in ") if "\n" in self.pattern else ""


# -- `delays.statistics` --------------------------------------------------------------------------


#: The most steps of one series.
MAX_SERIES_STEPS = 10_000

Since = datetime | Delay


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
        step_s = check_wait(step, "step")
        if step_s < 60 or step_s % 60:
            rule = f"a step is a number of whole minutes, not {step_s:g} s"
            raise InvalidInputError(rule, "step")
        length = timedelta(seconds=step_s)
        start, end = checked_range(self._runtime.clock.now(), since, until)
        start -= (start - EPOCH) % length
        number = -((start - end) // length)
        if number > MAX_SERIES_STEPS:
            problem = f"more than {MAX_SERIES_STEPS} steps: choose a longer step"
            raise InvalidInputError(problem, "step")
        steps = {start + n * length: dict[str, RunTotals]() for n in range(number)}
        for at, tag, counts in read_runs(self._runtime.store, start, end, tags):
            by_tag = steps[at - (at - EPOCH) % length]
            by_tag.setdefault(tag, RunTotals()).add(counts)
        return [
            SeriesPoint(at, RunTotals.total(by_tag.values()), dict(sorted(by_tag.items())))
            for at, by_tag in steps.items()
        ]

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
        start, end = checked_range(self._runtime.clock.now(), since, until)
        start = start.replace(second=0, microsecond=0)
        return counts_by_tag(self._runtime.store, start, end, tags)

    atotals = twin(totals)

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
        groups = failure_groups(self._runtime.store, None if tag is None else check_tag(tag))
        return [each for each in groups if since is None or each.last_at >= since][:limit]

    afailures = twin(failures)


def checked_range(now: datetime, since: Since, until: datetime | None) -> tuple[datetime, datetime]:
    """Return the begin and the end of a range. `since` may be a duration before now."""
    if isinstance(since, datetime):
        start = check_instant(since, "since")
    else:
        ago = timedelta(seconds=check_wait(since, "since"))
        if ago > COUNTS_KEPT:
            rule = "counts are kept for two days: `since` is at most '2d'"
            raise InvalidInputError(rule, "since")
        start = now - ago
    end = now if until is None else check_instant(until, "until")
    if start >= end:
        raise InvalidInputError("the range is empty: `since` is before `until`", "since")
    return start, end


# -- for the verdict, the command line and the console --------------------------------------------


#: The range of the runs that `status` shows, and of the late starts that a verdict counts.
LATE_RANGE = timedelta(minutes=15)
