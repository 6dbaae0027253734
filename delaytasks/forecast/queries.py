"""The SQL of forecasts: how many tasks are due at which second, by queue and tag.

The cost is bounded, however many tasks wait. Up to `MAX_EXACT` rows are counted exactly, through
the index that claims use. If there are more, PostgreSQL reads a random sample of the table's
blocks, and counts only the largest peaks of the sample in the index. MySQL and MariaDB have no
samples. They count in the index, which does not have the tags, and read the tags of a few rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    case,
    func,
    literal,
    select,
    tablesample,
)

from delaytasks.core.clock import from_us
from delaytasks.core.states import WAITING
from delaytasks.forecast.due_counts import (
    DueCount,
    DueCounts,
    largest_peaks,
    parts_of,
    scaled,
    tagged,
)
from delaytasks.storage.database import Database
from delaytasks.storage.estimates import estimate
from delaytasks.storage.queue_levels import has_status, levels, levels_of
from delaytasks.storage.schema import Schema
from delaytasks.storage.types import epoch_s

#: Up to this number, waiting rows are counted exactly.
MAX_EXACT = 200_000
#: About this number of waiting rows is in a sample, for which about this number of rows is read.
SAMPLED, MAX_READ = 100_000, 500_000
#: The largest peaks of a sample that are counted, and the most rows that are counted for them.
MAX_PEAKS, MAX_PEAK_ROWS = 10, 2_000_000
#: The most rows that are counted in the index where there are no samples.
MAX_INDEX_ROWS = 5_000_000
#: The rows whose tags are read for each part of these.
TAGS_READ = 30
#: The smallest part of a table to sample, in percent.
LEAST_PERCENT = 0.001


class DueTable:
    """Counts the waiting tasks of one database."""

    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._t = schema.tasks

    def counts(self, now: datetime, until: datetime) -> DueCounts:
        """Count the tasks that are due up to `until`. Overdue tasks count as due at `now`."""

        def read(connection: Connection) -> DueCounts:
            waiting = estimate(
                connection, select(self._t.c.id).where(has_status(self._t, *WAITING))
            )
            # The estimate may be old, so that counting is tried if it is not far above the limit.
            if not self._db.can.estimates or waiting <= 2 * MAX_EXACT:
                counts = self._counted(connection, now, until)
                if counts is not None:
                    return DueCounts(counts)
            if self._db.can.block_samples:
                found = self._sampled(connection, now, until, waiting)
            else:
                found = self._counted_in_index(connection, now, until)
            return DueCounts(found, is_estimate=True)

        return self._db.autocommitted(read)

    def _counted(
        self, connection: Connection, now: datetime, until: datetime
    ) -> list[DueCount] | None:
        """Count the rows, or return None if there are too many."""
        t, found, left = self._t, list[DueCount](), MAX_EXACT
        for status in WAITING:
            for queue, priority in levels(connection, t, status):
                here = (
                    has_status(t, status),
                    t.c.queue == queue,
                    t.c.priority == priority,
                    t.c.expected_time <= until,
                )
                rows = select(t.c.queue, t.c.tag, t.c.expected_time).where(*here)
                if self._db.can.estimates:
                    rows = rows.limit(left + 1)
                counts = self._grouped(connection, rows.subquery(), now)
                left -= int(sum(each.tasks for each in counts))
                if self._db.can.estimates and left < 0:
                    return None
                found += counts
        return found

    def _counted_in_index(
        self, connection: Connection, now: datetime, until: datetime
    ) -> list[DueCount]:
        """Count the rows of each second exactly, and estimate how many of them each tag has."""
        t, found, left = self._t, list[DueCount](), MAX_INDEX_ROWS
        due = t.c.expected_time
        for status in WAITING:
            for queue, priority in levels(connection, t, status):
                here = (has_status(t, status), t.c.queue == queue, t.c.priority == priority)
                rows = select(due).where(*here, due <= until).order_by(due).limit(max(left, 0))
                second = _second(rows.subquery().c.expected_time, now).label("second")
                inner = select(second).subquery()
                query = select(inner.c.second, func.count()).group_by(inner.c.second)
                seconds = {row[0]: row[1] for row in connection.execute(query)}
                left -= sum(seconds.values())
                for part in parts_of(seconds):
                    begin = from_us(min(part) * 1_000_000)
                    since = [due >= begin] if begin > now else []  # else the overdue ones
                    some = select(t.c.tag).where(*here, *since).order_by(due).limit(TAGS_READ)
                    found += tagged(queue, part, list(connection.scalars(some)))
        return found

    def _sampled(
        self, connection: Connection, now: datetime, until: datetime, waiting: int
    ) -> list[DueCount]:
        """Estimate the numbers from a random sample of the table's blocks."""
        t, all_rows = self._t, estimate(connection, select(self._t.c.id))
        wanted = min(SAMPLED / max(waiting, 1), MAX_READ / max(all_rows, 1)) * 100
        percent = min(max(wanted, LEAST_PERCENT), 100.0)
        # With a seed, two forecasts of an unchanged table are the same.
        sample = tablesample(t, func.system(literal(percent)), seed=literal(0))
        rows = select(sample.c.queue, sample.c.tag, sample.c.expected_time).where(
            sample.c.status.in_([int(status) for status in WAITING]),
            sample.c.expected_time <= until,
        )
        found = scaled(self._grouped(connection, rows.subquery(), now), 100 / percent)
        return self._with_counted_peaks(connection, found, now)

    def _with_counted_peaks(
        self, connection: Connection, found: Sequence[DueCount], now: datetime
    ) -> list[DueCount]:
        """Replace the estimates of the largest peaks by exact numbers.

        A peak was often written at one time, so that its rows are in neighbouring blocks. Its
        estimate is then less exact than that of rows that are distributed over the table.
        """
        factors: dict[tuple[str, int], float] = {}
        left = MAX_PEAK_ROWS
        for (queue, second), tasks in largest_peaks(found, MAX_PEAKS, after=int(now.timestamp())):
            if left > 2 * tasks:
                rows = self._rows_of_second(connection, queue, second, left)
                factors[queue, second] = rows / tasks
                left -= rows
        return [
            each._replace(tasks=each.tasks * factors[each.queue, each.second])
            if (each.queue, each.second) in factors
            else each
            for each in found
        ]

    def _rows_of_second(self, connection: Connection, queue: str, second: int, most: int) -> int:
        t, begin = self._t, from_us(second * 1_000_000)
        rows = 0
        for status in WAITING:
            for level in levels_of(connection, t, status, queue):
                here = select(t.c.expected_time).where(
                    has_status(t, status),
                    t.c.queue == queue,
                    t.c.priority == level.priority,
                    t.c.expected_time >= begin,
                    t.c.expected_time < begin + timedelta(seconds=1),
                )
                counted = select(func.count()).select_from(here.limit(most).subquery())
                rows += connection.scalar(counted) or 0
        return rows

    def _grouped(self, connection: Connection, rows: FromClause, now: datetime) -> list[DueCount]:
        second = _second(rows.c.expected_time, now).label("second")
        inner = select(rows.c.queue, rows.c.tag, second).subquery()
        query = select(inner.c.queue, inner.c.tag, inner.c.second, func.count()).group_by(
            inner.c.queue, inner.c.tag, inner.c.second
        )
        return [DueCount(*row) for row in connection.execute(query)]


def _second(due: ColumnElement[Any], now: datetime) -> ColumnElement[int]:
    """Return the second of a due time, or that of `now` for an overdue task."""
    return case((due <= now, int(now.timestamp())), else_=epoch_s(due))
