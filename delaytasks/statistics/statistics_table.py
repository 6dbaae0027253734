"""The tables of statistics: a row for each minute and tag, and a row for each group of failures.

Counts are kept for two days. Prometheus keeps longer series.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, and_, bindparam, delete, func, literal, select, update

from delaytasks.core.body import dump_json
from delaytasks.core.clock import from_us
from delaytasks.core.filters import batches
from delaytasks.core.run_counts import FailureCount, RunCounts
from delaytasks.statistics.worker_counts import MINUTE_US, Unwritten
from delaytasks.storage.database import Database
from delaytasks.storage.inserts import insert_if_absent
from delaytasks.storage.row_counts import check_row_count
from delaytasks.storage.schema import FINGERPRINT_LENGTH, Schema

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
    """The statistics of one database."""

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
            rows.append({"of_start": start, "of_tag": tag, "new": dump_json(counts.as_list())})
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
    try:
        return RunCounts.of(json.loads(text or ""))
    except (ValueError, TypeError, IndexError):
        return RunCounts()


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
