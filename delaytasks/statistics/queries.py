"""The SQL of statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Select,
    and_,
    bindparam,
    delete,
    func,
    literal,
    select,
    union_all,
    update,
)

from delaytasks.core.clock import from_us
from delaytasks.core.filters import batches
from delaytasks.core.run_counts import RunCounts
from delaytasks.statistics.failure_groups import FailureGroups
from delaytasks.statistics.gauges import Gauges, packed_gauges, unpacked_gauges
from delaytasks.statistics.periods import (
    DAY,
    GAUGES,
    LONGER,
    MINUTE,
    Longer,
    StoredRow,
    counts_in,
    gauges_in,
)
from delaytasks.statistics.stored_counts import (
    minute_text,
    packed_counts,
    unpacked_counts,
)
from delaytasks.statistics.worker_counts import MINUTE_US, Unwritten
from delaytasks.storage.database import Database
from delaytasks.storage.inserts import insert_if_absent
from delaytasks.storage.row_counts import check_row_count
from delaytasks.storage.schema import Schema

#: Rows of one transaction, so that another worker waits only briefly for their locks.
ROWS_PER_WRITE = 200


class StatisticsTable:
    """The statistics of one database."""

    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._s = s = schema.statistics
        self.failure_groups = FailureGroups(database, schema)
        self._insert = insert_if_absent(database, s, s.c.tag)
        named = (
            s.c.period == bindparam("of_period"),
            s.c.start == bindparam("of_start", type_=s.c.start.type),
            s.c.tag == bindparam("of_tag"),
        )
        self._columns = (
            s.c.period,
            s.c.start,
            s.c.tag,
            s.c.counts,
            s.c.parts,
            s.c.lateness_max_s,
            s.c.duration_max_s,
        )
        names = ("lateness_max_s", "duration_max_s")
        highest: dict[str, Any] = {name: bindparam(f"new_{name}") for name in names}
        self._update_counts = update(s).where(*named).values(counts=bindparam("new"), **highest)
        self._update_parts = update(s).where(*named).values(parts=bindparam("new"))

    # -- what a worker writes ---------------------------------------------------------------------

    def add(self, on: Any, unwritten: Unwritten, now: datetime) -> None:
        """Add the counts of a worker to the rows of their minutes and to the failure groups."""
        by_start: dict[datetime, dict[str, RunCounts]] = {}
        for (minute, tag), counts in unwritten.runs.items():
            by_start.setdefault(from_us(minute * MINUTE_US), {})[tag] = counts
        for start, by_tag in sorted(by_start.items()):
            self._add_minute(on, start, by_tag)
        if unwritten.failures:
            self.failure_groups.add(on, unwritten.failures, now)

    def _add_minute(self, on: Any, start: datetime, by_tag: Mapping[str, RunCounts]) -> None:
        tags = sorted(by_tag)
        on.execute(self._insert, [{"period": MINUTE, "start": start, "tag": tag} for tag in tags])
        found = self._locked(on, MINUTE, start, tags)
        check_row_count(len(found), len(tags), "rows of statistics")
        rows = []
        for tag in tags:
            counts = found[tag].minute() if found[tag].counts else RunCounts()
            counts.add(by_tag[tag])
            row = _row(MINUTE, start, tag, minute_text(counts))
            row["new_lateness_max_s"] = counts.lateness_max_s
            row["new_duration_max_s"] = counts.duration_max_s
            rows.append(row)
        on.execute(self._update_counts, rows)

    def _locked(
        self, on: Any, period: str, start: datetime, tags: Sequence[str]
    ) -> dict[str, StoredRow]:
        """Lock rows, in the same order in every process, and return them by tag."""
        s = self._s
        query = (
            select(*self._columns)
            .where(s.c.period == period, s.c.start == start, s.c.tag.in_(tags))
            .order_by(s.c.tag)
            .with_for_update()
        )
        return {row.tag: StoredRow(*row) for row in on.execute(query)}

    # -- what a sweep writes ----------------------------------------------------------------------

    def write_gauges(self, start: datetime, gauges: Gauges) -> bool:
        """Write the gauges of a minute; return False if another sweep has written them."""
        s, text = self._s, gauges.as_text()

        def work(connection: Any) -> bool:
            key = {"period": MINUTE, "start": start, "tag": GAUGES}
            connection.execute(self._insert, [key])
            where = and_(s.c.period == MINUTE, s.c.start == start, s.c.tag == GAUGES)
            is_empty = and_(where, s.c.counts.is_(None))
            return bool(connection.execute(update(s).where(is_empty).values(counts=text)).rowcount)

        return self._db.transaction(work)

    def has_gauges(self, start: datetime) -> bool:
        s = self._s
        mine = and_(s.c.period == MINUTE, s.c.start == start, s.c.tag == GAUGES)
        return bool(self._db.rows(select(s.c.tag).where(mine)))

    def pack(self, period: str, before: datetime) -> int:
        """Add the oldest rows of a period to the rows of the next longer one, and delete them.

        One call packs the minutes of one hour, or the hours of one day, and only those that begin
        before `before`.

        Returns
        -------
        int
            The number of rows that were packed; 0 if there is none.
        """
        return self._db.transaction(lambda c: self._pack(c, period, before))

    def _pack(self, on: Any, period: str, before: datetime) -> int:
        s = self._s
        if self._db.can.begins_late:  # what is read must belong to the transaction
            on.execute(delete(s).where(s.c.period == "none"))
        oldest = select(func.min(s.c.start)).where(s.c.period == period, s.c.start < before)
        first = on.execute(oldest).scalar()
        if first is None:
            return 0
        longer = LONGER[period]
        start = longer.start_of(first)
        mine = and_(
            s.c.period == period,
            s.c.start >= start,
            s.c.start < min(start + longer.length, before),
        )
        query = select(*self._columns).where(mine).order_by(s.c.start, s.c.tag)
        rows = [StoredRow(*row) for row in on.execute(query.with_for_update())]
        runs: dict[str, dict[int, RunCounts]] = {}
        gauges: dict[int, list[Gauges]] = {}
        for row in rows:
            number = longer.part_of(row.start)
            if row.tag == GAUGES:
                gauges.setdefault(number, []).extend(gauges_in(row).values())
            else:
                known = runs.setdefault(row.tag, {}).setdefault(number, RunCounts())
                for one in counts_in(row).values():
                    known.add(one)
        self._add_parts(on, longer, start, runs, gauges)
        check_row_count(on.execute(delete(s).where(mine)).rowcount, len(rows), "statistics")
        return len(rows)

    def _add_parts(
        self,
        on: Any,
        longer: Longer,
        start: datetime,
        runs: Mapping[str, Mapping[int, RunCounts]],
        gauges: Mapping[int, Sequence[Gauges]],
    ) -> None:
        tags = sorted([*runs, *([GAUGES] if gauges else [])])
        keys = [{"period": longer.period, "start": start, "tag": tag} for tag in tags]
        on.execute(self._insert, keys)
        found = self._locked(on, longer.period, start, tags)
        rows = []
        for tag in tags:
            stored = found[tag].parts or b""
            if tag == GAUGES:
                means = unpacked_gauges(stored)
                for number, many in gauges.items():
                    # What was packed before counts as one more value.
                    earlier = [means[number]] if number in means else []
                    means[number] = Gauges.mean([*many, *earlier])
                packed = packed_gauges(means)
            else:
                parts = unpacked_counts(stored)
                for number, counts in runs[tag].items():
                    parts.setdefault(number, RunCounts()).add(counts)
                packed = packed_counts(parts, longer.size)
            rows.append(_row(longer.period, start, tag, packed))
        on.execute(self._update_parts, rows)

    def purge(self, before: datetime) -> int:
        """Delete the days before `before`, and the failure groups that are as old or too many."""
        s = self._s

        def work(connection: Any) -> int:
            days = delete(s).where(s.c.period == DAY, s.c.start < before)
            purged = int(connection.execute(days).rowcount)
            return purged + self.failure_groups.purge(connection, before)

        return self._db.autocommitted(work)

    # -- reading ----------------------------------------------------------------------------------

    def read(
        self, since: datetime, until: datetime, tags: Sequence[str] | None
    ) -> Iterator[StoredRow]:
        """Yield the rows of all periods that have a part in a range.

        One statement reads all of them, since a sweep may pack some meanwhile. If `tags` is None,
        all tags are read, but no gauges.
        """
        s = self._s
        for some in [None] if tags is None else batches(tags, ROWS_PER_WRITE):
            mine = s.c.tag != GAUGES if some is None else s.c.tag.in_(list(some))
            query = union_all(*self._selects(self._columns, since, until, mine))
            for row in self._db.autocommitted(partial(_all_rows, query)):
                yield StoredRow(*row)

    def count(self, since: datetime, until: datetime, most: int) -> int:
        """Count the rows that `read` yields for all tags, up to `most`."""
        of_tags = self._s.c.tag != GAUGES
        rows = union_all(*self._selects([literal(1).label("one")], since, until, of_tags))
        query = select(func.count()).select_from(rows.limit(most).subquery())
        return int(self._db.autocommitted(lambda c: c.execute(query).scalar_one()))

    def _selects(
        self, columns: Iterable[Any], since: datetime, until: datetime, mine: ColumnElement[bool]
    ) -> list[Select[Any]]:
        """Return a query for each period, of its rows that have a part in a range."""
        s = self._s
        starts = {MINUTE: since, **{one.period: one.start_of(since) for one in LONGER.values()}}
        return [
            select(*columns).where(
                s.c.period == period, s.c.start >= start, s.c.start < until, mine
            )
            for period, start in starts.items()
        ]


def _all_rows(query: Any, connection: Any) -> Sequence[Any]:
    return connection.execute(query).all()  # type: ignore[no-any-return]


def _row(period: str, start: datetime, tag: str, new: str | bytes) -> dict[str, Any]:
    return {"of_period": period, "of_start": start, "of_tag": tag, "new": new}
