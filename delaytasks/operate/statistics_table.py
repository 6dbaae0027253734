"""The table of statistics: what workers count, one row for each minute and tag, for two days.

Counts are kept for two days. Prometheus keeps longer series.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import ColumnElement, and_, bindparam, delete, func, literal, select, update

from delaytasks.db.database import Database
from delaytasks.db.schema import FINGERPRINT_LENGTH, Schema, check_row_count
from delaytasks.db.statements import insert_if_absent
from delaytasks.events import Events
from delaytasks.loops import Loop, within
from delaytasks.model.body import dump_json
from delaytasks.model.clock import Clock, from_us
from delaytasks.model.filters import batches
from delaytasks.run.observers import (
    OTHER_TAGS,
    WORKER_LOST,
    FailureCount,
    RunCounts,
    RunStatistics,
    error_pattern,
)

if TYPE_CHECKING:
    from delaytasks.db.store import Store
    from delaytasks.runtime import Runtime


# -- The counts of one worker, in its main process ------------------------------------------------


#: The length of a period in microseconds.
MINUTE_US = 60_000_000
#: The most minutes that wait to be written while a database is unavailable. The counts of other
#: minutes are added to one of them.
MAX_MINUTES = 60
#: The most groups of failures that wait to be written. The others are not counted as groups.
MAX_GROUPS_OF_WORKER = 500


@dataclass
class Unwritten:
    """Counts that are not written yet."""

    #: By the minute in which they were reported, in minutes since 1970, and by tag.
    runs: dict[tuple[int, str], RunCounts] = field(default_factory=dict)
    #: By the hour, the tag and the error pattern.
    failures: dict[tuple[int, str, str], FailureCount] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.runs or self.failures)

    def add_run(self, minute: int, tag: str, counts: RunCounts) -> None:
        if (minute, tag) in self.runs:
            self.runs[minute, tag].add(counts)
        else:
            self.runs[minute, tag] = counts

    def add_failure(self, hour: int, failure: FailureCount) -> None:
        key = hour, failure.tag, failure.pattern
        known = self.failures.get(key)
        if known is not None:
            self.failures[key] = failure._replace(runs=known.runs + failure.runs)
        elif len(self.failures) < MAX_GROUPS_OF_WORKER:
            self.failures[key] = failure

    def add(self, other: Unwritten) -> None:
        for (minute, tag), counts in other.runs.items():
            self.add_run(minute, tag, counts)
        for (hour, _, _), failure in other.failures.items():
            self.add_failure(hour, failure)

    def limit_minutes(self) -> None:
        """Keep the newest `MAX_MINUTES` minutes, and add all older runs to the oldest of them."""
        minutes = sorted({minute for minute, _ in self.runs})
        if len(minutes) <= MAX_MINUTES:
            return
        oldest = minutes[-MAX_MINUTES]
        for minute, tag in [key for key in self.runs if key[0] < oldest]:
            self.add_run(oldest, tag, self.runs.pop((minute, tag)))


class WorkerCounts:
    """What a worker's processes have run since the worker started.

    The pool processes report their counts with each chunk. Any thread may call these methods: one
    thread writes the counts, and an endpoint for metrics reads `totals`.
    """

    def __init__(self, clock: Clock, max_tags: int) -> None:
        self._clock = clock
        self._max_tags = max_tags
        self._lock = threading.Lock()
        self._tags: set[str] = set()
        self._totals: dict[str, RunCounts] = {}
        self._unwritten = Unwritten()
        #: Counts that could not be written. The totals have them already.
        self._again = Unwritten()

    def add(self, statistics: RunStatistics) -> None:
        """Add what a process has reported."""
        if not statistics.tags:
            return
        minute = self._minute()
        with self._lock:
            for tag, counts in statistics.tags:
                self._of(minute, tag).add(counts)
            for failure in statistics.failures:
                self._unwritten.add_failure(
                    minute // 60, failure._replace(tag=self._counted_as(failure.tag))
                )

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        """Count the tasks that failed because their workers died. A subscriber of events."""
        if name != "task.worker_lost":
            return
        id, tag, error = fields["id"], fields["tag"], str(fields["error"])
        failure = FailureCount(self._counted_as(tag), error_pattern(error), 1, id, error)
        minute = self._minute()
        with self._lock:
            self._of(minute, tag)[WORKER_LOST] += 1
            self._unwritten.add_failure(minute // 60, failure)

    def totals(self) -> dict[str, RunCounts]:
        """Return the counts of each tag since the worker started, as copies."""
        with self._lock:
            found = {tag: RunCounts(counts) for tag, counts in self._totals.items()}
            for (_, tag), counts in self._unwritten.runs.items():
                found.setdefault(tag, RunCounts()).add(counts)
        return found

    def take(self) -> Unwritten:
        """Return the counts that are to be written now."""
        with self._lock:
            taken, self._unwritten = self._unwritten, Unwritten()
            for (_, tag), counts in taken.runs.items():
                self._totals.setdefault(tag, RunCounts()).add(counts)
            again, self._again = self._again, Unwritten()
        again.add(taken)
        return again

    def put_back(self, unwritten: Unwritten) -> None:
        """Keep counts that could not be written for the next call of `take`."""
        with self._lock:
            self._again.add(unwritten)
            self._again.limit_minutes()

    def _minute(self) -> int:
        return int(self._clock.now_us() // MINUTE_US)

    def _of(self, minute: int, tag: str) -> RunCounts:
        runs, tag = self._unwritten.runs, self._counted_as(tag)
        counts = runs.get((minute, tag))
        if counts is None:
            if len(runs) >= MAX_MINUTES * self._max_tags:
                minute = max(known for known, _ in runs)
            counts = runs.setdefault((minute, tag), RunCounts())
        return counts

    def _counted_as(self, tag: str) -> str:
        if tag in self._tags:
            return tag
        if len(self._tags) >= self._max_tags:
            return OTHER_TAGS
        self._tags.add(tag)
        return tag


#: The time for which counts are kept.
COUNTS_KEPT = timedelta(days=2)
#: A group of failures is deleted this long after its last failure.
GROUPS_KEPT = timedelta(days=366)
#: The tags that one statement reads.
TAGS_PER_READ = 200
#: The hours of a failure group that are kept for its sparkline.
KEPT_HOURS = 48
#: The most groups that one call writes: those with the most failures.
MAX_GROUPS_PER_WRITE = 100
#: The most groups in the table. The oldest ones are purged.
MAX_STORED_GROUPS = 1000


class MinuteCounts(NamedTuple):
    """What ended in one minute, of one tag."""

    start: datetime
    tag: str
    counts: RunCounts


class StatisticsTable:
    """The tables of statistics."""

    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._s = s = schema.statistics
        self._insert = insert_if_absent(database, s, s.c.tag)
        named = (
            s.c.start == bindparam("of_start", type_=s.c.start.type),
            s.c.tag == bindparam("of_tag"),
        )
        self._update = update(s).where(*named).values(counts=bindparam("new"))
        self._f = f = schema.failures
        self._insert_group = insert_if_absent(database, f, f.c.tag)
        names = ("task_id", "sample", "runs", "last_at", "hours")
        changes = {name: bindparam(f"new_{name}", type_=f.c[name].type) for name in names}
        group = f.c.tag == bindparam("of_tag"), f.c.fingerprint == bindparam("of_fingerprint")
        self._update_group = update(f).where(*group).values(changes)

    # -- write ------------------------------------------------------------------------------------

    def add(self, on: Any, unwritten: Unwritten, now: datetime) -> None:
        """Add the counts of a worker to the rows of their minutes and to the failure groups."""
        by_start: dict[datetime, dict[str, RunCounts]] = {}
        for (minute, tag), counts in unwritten.runs.items():
            by_start.setdefault(from_us(minute * MINUTE_US), {})[tag] = counts
        for start, by_tag in sorted(by_start.items()):
            self._add_minute(on, start, by_tag)
        if unwritten.failures:
            self._add_failures(on, unwritten.failures, now)

    def _add_minute(self, on: Any, start: datetime, by_tag: Mapping[str, RunCounts]) -> None:
        s, tags = self._s, sorted(by_tag)
        on.execute(self._insert, [{"start": start, "tag": tag} for tag in tags])
        # Rows are locked in the same order in every process.
        mine = select(s.c.tag, s.c.counts).where(s.c.start == start, s.c.tag.in_(tags))
        found = {row[0]: row[1] for row in on.execute(mine.order_by(s.c.tag).with_for_update())}
        check_row_count(len(found), len(tags), "rows of statistics")
        rows = []
        for tag in tags:
            counts = _counts_of(found[tag])
            counts.add(by_tag[tag])
            rows.append({"of_start": start, "of_tag": tag, "new": dump_json(counts)})
        on.execute(self._update, rows)

    def _add_failures(
        self, on: Any, failures: Mapping[tuple[int, str, str], FailureCount], now: datetime
    ) -> None:
        """Add the failures of a worker, by hour, tag and pattern, to their groups."""
        f, groups = self._f, dict[tuple[str, str], list[tuple[int, FailureCount]]]()
        most = sorted(failures.items(), key=lambda each: -each[1].runs)[:MAX_GROUPS_PER_WRITE]
        for (hour, tag, pattern), failure in most:
            groups.setdefault((tag, _fingerprint_of(pattern)), []).append((hour, failure))
        keys = sorted(groups)
        on.execute(self._insert_group, [_new_group(key, groups[key][0][1], now) for key in keys])
        for tag, fingerprint in keys:
            mine = and_(f.c.tag == tag, f.c.fingerprint == fingerprint)
            query = select(f.c.runs, f.c.hours).where(mine).with_for_update()
            runs, hours = on.execute(query).one()
            counted = hour_counts_of(hours)
            for hour, failure in groups[tag, fingerprint]:
                counted[hour] = counted.get(hour, 0) + failure.runs
                runs += failure.runs
            _, last = max(groups[tag, fingerprint], key=itemgetter(0))
            on.execute(
                self._update_group,
                {
                    "of_tag": tag,
                    "of_fingerprint": fingerprint,
                    "new_task_id": last.task_id,
                    "new_sample": last.error,
                    "new_runs": runs,
                    "new_last_at": now,
                    "new_hours": dump_json(dict(sorted(counted.items())[-KEPT_HOURS:])),
                },
            )

    def purge(self, now: datetime) -> None:
        """Delete minutes and failure groups that are too old, and the oldest of too many groups."""
        s, f = self._s, self._f
        newest = select(f.c.last_at).order_by(f.c.last_at.desc())

        def work(on: Any) -> None:
            on.execute(delete(s).where(s.c.start < now - COUNTS_KEPT))
            bound = on.execute(newest.offset(MAX_STORED_GROUPS).limit(1)).scalar()
            before = now - GROUPS_KEPT
            on.execute(delete(f).where(f.c.last_at <= max(before, bound or before)))

        self._db.autocommitted(work)

    # -- read -------------------------------------------------------------------------------------

    def read(
        self, since: datetime, until: datetime, tags: Sequence[str] | None
    ) -> Iterator[MinuteCounts]:
        """Yield the rows of a range; None reads all tags."""
        s = self._s
        for some in [None] if tags is None else batches(tags, TAGS_PER_READ):
            rows = select(s.c.start, s.c.tag, s.c.counts).where(*self._between(since, until))
            if some is not None:
                rows = rows.where(s.c.tag.in_(list(some)))
            for start, tag, text in self._db.autocommitted(partial(_all_rows, rows)):
                yield MinuteCounts(start, tag, _counts_of(text))

    def count(self, since: datetime, until: datetime, most: int) -> int:
        """Count the rows that `read` yields for all tags, up to `most`."""
        first = select(literal(1).label("one")).where(*self._between(since, until)).limit(most)
        query = select(func.count()).select_from(first.subquery())
        return int(self._db.autocommitted(lambda c: c.execute(query).scalar_one()))

    def _between(self, since: datetime, until: datetime) -> tuple[ColumnElement[bool], ...]:
        return self._s.c.start >= since, self._s.c.start < until

    def failure_groups(self, tag: str | None, since: datetime | None, limit: int) -> Sequence[Any]:
        """Return the groups, beginning with the one that failed last."""
        f = self._f
        query = select(f).order_by(f.c.last_at.desc(), f.c.tag, f.c.fingerprint).limit(limit)
        if tag is not None:
            query = query.where(f.c.tag == tag)
        if since is not None:
            query = query.where(f.c.last_at >= since)
        return self._db.rows(query)


def _all_rows(query: Any, connection: Any) -> Sequence[Any]:
    return connection.execute(query).all()  # type: ignore[no-any-return]


def _counts_of(text: str | None) -> RunCounts:
    """Read the counts of a minute. A text of another program counts nothing."""
    counts = RunCounts()
    try:
        counts.add(json.loads(text or ""))
    except (ValueError, TypeError, AttributeError):
        return RunCounts()
    return counts


def hour_counts_of(text: str) -> dict[int, int]:
    """Return the number of failures by the hour since 1970."""
    try:
        return {int(hour): int(count) for hour, count in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def _fingerprint_of(pattern: str) -> str:
    return hashlib.sha256(pattern.encode()).hexdigest()[:FINGERPRINT_LENGTH]


def _new_group(key: tuple[str, str], failure: FailureCount, now: datetime) -> dict[str, Any]:
    tag, fingerprint = key
    return {
        "tag": tag,
        "fingerprint": fingerprint,
        "pattern": failure.pattern,
        "task_id": failure.task_id,
        "sample": failure.error,
        "runs": 0,
        "first_at": now,
        "last_at": now,
        "hours": "{}",
    }


# -- Writes the counts of a worker to the database once a minute ----------------------------------


#: The time between two writes. A worker that is killed loses the counts since the last one.
WRITE_S = 60.0
#: How long a process that ends waits for its last write.
LAST_WRITE_S = 3.0


class StatisticsWriter:
    """Writes what `counts` has."""

    def __init__(self, store: Store, clock: Clock, counts: WorkerCounts, events: Events) -> None:
        self._store = store
        self._clock = clock
        self._counts = counts
        self._events = events
        self._is_first = True
        self.loop = Loop("statistics", self._turn, events)

    def _turn(self) -> float:
        # The first turn is at the start of the worker, which has run nothing yet.
        if not self._is_first:
            # Without tables or rights each write fails. Then the next one is a minute later, too.
            self._events.attempt(self.loop.name, "write", self.write)
        self._is_first = False
        return WRITE_S

    def write(self) -> None:
        """Write all counts that are not written yet."""
        unwritten = self._counts.take()
        if not unwritten:
            return
        store, is_executed = self._store, False
        table = StatisticsTable(store.database, store.schema)

        def work(connection: Any) -> None:
            nonlocal is_executed
            table.add(connection, unwritten, self._clock.now())
            is_executed = True

        try:
            # One try: if a commit is lost, nobody knows whether the counts were added.
            store.database.repeat(work, store.database.begin, tries=1)
        except Exception:  # also if a sweep has just deleted a group of failures
            if not is_executed:
                self._counts.put_back(unwritten)
            raise


def write_last(writer: StatisticsWriter, events: Events) -> None:
    """Write what a process that ends has counted.

    If the database does not answer, these counts are lost, because a worker must end in time.
    """
    with suppress(TimeoutError):
        within(LAST_WRITE_S, partial(events.attempt, "stop", "statistics", writer.write))


def write_rest(runtime: Runtime, rest: RunStatistics) -> None:
    """Write what a process of the pool has counted after its last report."""
    counts = WorkerCounts(runtime.clock, runtime.settings.statistics_tags)
    counts.add(rest)
    writer = StatisticsWriter(runtime.store, runtime.clock, counts, runtime.events)
    write_last(writer, runtime.events)
